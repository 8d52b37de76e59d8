// Hammers both builds of the CPU ranks' exchange and compares what arrives, bit by bit.
//
// exchange_stress RANKS THREADS EPOCHS SEED [data|flags|both]: random delays and lengths, threads of each rank. Every rank
// checks every word of every peer in every epoch. Prints a digest, equal for both builds, and exits 1 at the first wrong word.
// exchange_stress time RANKS THREADS EPOCHS WORDS: no delays; prints the microseconds of an exchange.
#include <cinttypes>
#include <cstdlib>

#include "cpu/exchange.h"

using namespace mk;

namespace {

constexpr int64_t kMost = 700;

uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

struct Plan {
  int ranks, threads;
  uint64_t epochs, seed;
  int64_t words;  // of every message, or -1: another number each time
  // Every length up to a few tiles' comes up, none among them; now and then a long one.
  int64_t count(uint64_t epoch, int rank) const {
    if (words >= 0) return words;
    const uint64_t r = mix(seed + epoch * 64 + static_cast<uint64_t>(rank));
    return static_cast<int64_t>(r % 16 == 0 ? r / 16 % kMost : (epoch + r / 16 % 3) % 83);
  }
  uint32_t word(uint64_t epoch, int rank, int64_t i) const {
    const uint64_t r = mix(seed ^ (epoch << 20) ^ (static_cast<uint64_t>(rank) << 56) ^ static_cast<uint64_t>(i));
    return r % 37 == 0 ? kEmptyWord : static_cast<uint32_t>(r >> 32);
  }
};

template <Sync S>
struct Rank {
  Rank(const Plan& p, int r, Exchange<S>& exchange, Failure& failed)
      : plan(p), rank(r), link(exchange), failure(failed), seats(static_cast<size_t>(p.threads)),
        image(static_cast<size_t>(p.ranks), std::vector<uint32_t>(static_cast<size_t>(std::max(kMost, p.words)))),
        team(p.threads, 60, failed, "rank " + std::to_string(r) + ": ", true, true) {
    for (int tid = 0; tid < p.threads; tid++) {
      seats[static_cast<size_t>(tid)].rank = r;
      seats[static_cast<size_t>(tid)].tid = tid;
      seats[static_cast<size_t>(tid)].threads = p.threads;
    }
  }

  // Some ranks now and then fall behind, some threads of one rank too.
  void dawdle(uint64_t epoch, int tid) const {
    if (plan.words >= 0) return;
    const uint64_t r = mix(plan.seed * 3 + epoch * 1024 + static_cast<uint64_t>(rank) * 32 + static_cast<uint64_t>(tid));
    if (r % 8 == 0) sched_yield();
    if (r % 8 == 1) for (uint64_t i = 0; i < r / 8 % 3000; i++) _mm_pause();
    if (r % 512 == 2) usleep(static_cast<useconds_t>(r / 512 % 200));
  }

  static void work(void* self, int tid) {
    Rank& me = *static_cast<Rank*>(self);
    const Plan& plan = me.plan;
    Seat& seat = me.seats[static_cast<size_t>(tid)];
    const auto walk = [&](int from, uint64_t epoch) {
      return [&me, from, n = plan.count(epoch, from)](auto use) {  // in runs of 16, as tiles have them
        for (int64_t i = 0; i < n; i += 16) use(me.image[static_cast<size_t>(from)].data() + i, std::min<int64_t>(16, n - i));
      };
    };
    for (uint64_t epoch = 0; epoch < plan.epochs; epoch++) {
      uint32_t* own = me.image[static_cast<size_t>(me.rank)].data();
      const auto [lo, hi] = share(plan.count(epoch, me.rank), tid, plan.threads);
      for (int64_t i = lo; i < hi && plan.words < 0; i++) own[i] = plan.word(epoch, me.rank, i);
      me.dawdle(epoch, tid);
      me.link.begin(seat);
      if (!me.team.barrier(tid, "work", static_cast<int>(epoch))) return;
      for (int r = 0; r < plan.ranks; r++)
        if (r != me.rank) me.link.send(seat, r, walk(me.rank, epoch));
      me.dawdle(epoch + plan.epochs, tid);
      for (int r = 0; r < plan.ranks; r++)
        if (r != me.rank && !me.link.take(seat, r, walk(r, epoch), "work", static_cast<int>(epoch))) return;
      if (!me.team.barrier(tid, "exchange", static_cast<int>(epoch))) return;
      if (tid == 0 && plan.words < 0) me.check(epoch);
      if (!me.team.barrier(tid, "check", static_cast<int>(epoch))) return;
    }
  }

  void check(uint64_t epoch) {
    for (int r = 0; r < plan.ranks; r++)
      for (int64_t i = 0; i < plan.count(epoch, r); i++) {
        const uint32_t found = image[static_cast<size_t>(r)][static_cast<size_t>(i)], sent = plan.word(epoch, r, i);
        const uint32_t expected = r != rank && S == Sync::data ? sendable(sent) : sent;
        if (found != expected)
          failure.report("WRONG: epoch " + std::to_string(epoch) + ", rank " + std::to_string(rank) + ", word " +
                         std::to_string(i) + " of rank " + std::to_string(r));
        digest = mix(digest * 31 + sendable(found));
      }
  }

  const Plan& plan;
  const int rank;
  Exchange<S>& link;
  Failure& failure;
  std::vector<Seat> seats;
  std::vector<std::vector<uint32_t>> image;
  uint64_t digest = 0;
  Team team;
};

// The digest of what every rank received, which must be one. Exits where it is not.
template <Sync S>
uint64_t run(const Plan& plan) {
  Failure failure;
  const std::vector<int> threads(static_cast<size_t>(plan.ranks), plan.threads);
  Exchange<S> link(plan.ranks, std::max(kMost, plan.words), threads.data(), 60, failure, true);
  std::vector<std::unique_ptr<Rank<S>>> ranks;
  for (int r = 0; r < plan.ranks; r++) ranks.push_back(std::make_unique<Rank<S>>(plan, r, link, failure));
  for (auto& r : ranks) r->team.start(Rank<S>::work, r.get());
  for (auto& r : ranks) r->team.wait();
  if (!failure.failed())
    for (auto& r : ranks)
      if (r->digest != ranks[0]->digest) failure.report("WRONG: ranks received different words");
  if (!failure.failed()) return ranks[0]->digest;
  std::printf("%s\n", failure.text().c_str());
  std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i) { return i < argc ? std::strtoull(argv[i], nullptr, 10) : 0; };
  if (argc == 6 && argv[1] == std::string("time")) {
    const Plan plan{static_cast<int>(number(2)), static_cast<int>(number(3)), number(4), 1, static_cast<int64_t>(number(5))};
    const auto start = std::chrono::steady_clock::now();
    run<Sync::data>(plan);
    const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - start;
    std::printf("%.2f us\n", spent.count() / static_cast<double>(plan.epochs));
    return 0;
  }
  if (argc < 5) return 2;
  const Plan plan{static_cast<int>(number(1)), static_cast<int>(number(2)), number(3), number(4), -1};
  const std::string kind = argc > 5 ? argv[5] : "both";
  uint64_t data = 0, flags = 0;
  if (kind != "flags") data = run<Sync::data>(plan);
  if (kind != "data") flags = run<Sync::flags>(plan);
  if (kind == "both" && data != flags) {
    std::printf("WRONG: the two builds received different words\n");
    return 1;
  }
  std::printf("%016" PRIx64 "\n", kind == "flags" ? flags : data);
}
