// A rank whose thread stalls or dies in the middle of a step, from inside: model.h is that of the model to run.
//
// rank_failures HOW RANK THREAD PHASE LAYER LIMIT_S THREADS BLOB...: runs a prompt on ranks with memory of their own. When
// that thread of that rank comes to that phase, it does not go on: HOW is stall (until the call has returned), die (the thread
// ends), or fine (nothing happens). Prints the code, the seconds the call took, and its error.
#include <fcntl.h>
#include <sys/stat.h>

#include <cstdlib>

#include "cpu/model.cpp"

namespace {

struct Plan {
  std::string how;
  int rank, thread, layer;
  std::string phase;
} plan;
std::atomic<bool> released{false};

void before(const State& s, int tid, const m::Stage& stage) {
  if (plan.how == "fine" || s.rank != plan.rank || tid != plan.thread || stage.layer != plan.layer) return;
  if (m::phase_names[static_cast<size_t>(stage.phase)] != plan.phase) return;
  if (plan.how == "die") syscall(SYS_exit, 0);
  while (!released) usleep(1000);
}

void work(void* self, int tid) {
  State& s = *static_cast<State*>(self);
  serve(s, tid, [] {}, [&](const m::Stage& stage) { before(s, tid, stage); });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8 + m::ranks) return 2;
  plan = {argv[1], std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[5]), argv[4]};
  const void* blobs[m::ranks];
  for (int r = 0; r < m::ranks; r++) {
    const int fd = open(argv[8 + r], O_RDONLY);
    blobs[r] = mmap(nullptr, m::blob_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    if (blobs[r] == MAP_FAILED) return 3;
  }
  const mk_options options{blobs, m::blob_bytes, m::ranks, std::atoi(argv[7]), 0, MK_OPTION_RANKS, std::atof(argv[6])};
  mk_model* model = nullptr;
  if (mk_create(&options, &model)) return 4;
  const int32_t prompt[] = {1, 2, 3, 4, 5};
  int at = 0;
  const auto start = std::chrono::steady_clock::now();
  model->ranks.run(work, [&] {
    State& s = model->state;
    const auto next = [&] {
      if (at == 5) return model->end_steps();
      model->set_step(prompt + at, 1, 1, true);
      at++;
    };
    serve(s, 0, next, [&](const m::Stage& stage) { before(s, 0, stage); });
  });
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
  float logits[m::vocab_size];
  const int32_t code = mk_step(model, prompt, 1, logits, 1);  // what every later call says
  std::printf("%d\n%.3f\n%s\n", code, spent.count(), mk_last_error());
  std::fflush(stdout);
  released = true;
  mk_destroy(model);
}
