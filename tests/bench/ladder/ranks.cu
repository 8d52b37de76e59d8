// Exchanges between 2, 4 and 8 ranks that share this GPU, each with its part of the SMs: every round a rank sends the
// words it computed to all others and takes theirs, and its blocks meet. First hammered, with random delays and patterns, words by
// themselves and by flags: every word is checked, and both must leave the same sums. Then timed, beside the bytes of all
// ranks.
//   python tests/bench/ladder/run.py ranks
// An argument: rounds of the first part, for trying the program. Or: DEVICES RANKS ROUNDS BYTES ..., for so many ranks spread
// over so many GPUs: hammered a twentieth of the rounds, then timed with each number of bytes of all ranks (a multiple of 16 a
// rank), lines of: bytes, us by words, us by flags. `make gpu-test-tp` runs it so.
#include <memory>
#include "bench.cuh"
#include "exchange.cuh"

using namespace bench;

constexpr int kThreadsEach = 128;
constexpr uint64_t kLimit = 10'000'000'000;  // ns that a wait may take
// A load that L2 has, measured on an H200; a store takes as long to get there.
constexpr double kHitCycles = 270;

template <int kRanks>
struct Params {
  Peers<kRanks> peers[kRanks];
  uint32_t* barriers[kRanks];  // two of each
  uint64_t* sums[kRanks];
  uint32_t* result[kRanks];  // [words]
  int32_t* wrong[kRanks];    // words that were not what was sent; waits that ended
  int first;                 // rank of this launch
  int grid;            // blocks of a rank
  int words;           // of an image, a multiple of 4 times the ranks
  int rounds;
  int delays;          // now and then a warp sleeps
};

// Every pattern that needs care turns up: EMPTY, what it becomes, and zeros.
__device__ uint32_t pattern(int round, int word) {
  const uint32_t h = hash((uint64_t)round << 32 | (uint32_t)word);
  return h % 64 == 0 ? kEmptyWord : h % 64 == 1 ? kNanWord : h % 64 == 2 ? 0 : hash(h);
}

template <int kRanks, bool kByFlag>
__global__ void __launch_bounds__(kThreadsEach, 1) exchange_ranks(Params<kRanks> p) {
  MK_DYNAMIC_SHARED(raw);
  volatile int32_t& failed = *(volatile int32_t*)raw;
  const int rank = p.first + blockIdx.x / p.grid, block = blockIdx.x % p.grid, tid = threadIdx.x;
  const Peers<kRanks>& peers = p.peers[rank];
  uint32_t *result = p.result[rank], *barriers = p.barriers[rank];
  const int share = p.words / kRanks, stride = p.grid * kThreadsEach, first = block * kThreadsEach + tid;
  if (tid == 0) failed = 0;
  __syncthreads();
  uint64_t sum = 0;
  for (int round = 0; round < p.rounds && !failed; round++) {
    const Exchange<kRanks, kByFlag> exchange{peers, (uint32_t)(round % kExchangeCopies * p.words)};
    const uint64_t start = global_nanoseconds();
    const auto waiting = [&](int) {
      if (global_nanoseconds() - start > kLimit) failed = 1;
      return (bool)failed;
    };
    const auto dawdle = [&] {
      const uint32_t h = hash((uint64_t)round * 1000003 + blockIdx.x * 32 + tid / 32);
      if (p.delays && h % 16 == 0) __nanosleep(h % 4096);
    };
    // Of four words one vector, of the next two pairs, of the next single ones.
    dawdle();
    for (int i = 4 * first; i < share; i += 4 * stride) {
      const int at = rank * share + i;
      const uint4 w = {pattern(round, at), pattern(round, at + 1), pattern(round, at + 2), pattern(round, at + 3)};
      if (i / 4 % 3 == 0) {
        exchange.put(0, at, w);
      } else if (i / 4 % 3 == 1) {
        exchange.put(0, at, uint2{w.x, w.y});
        exchange.put(0, at + 2, uint2{w.z, w.w});
      } else {
        exchange.put(0, at, w.x), exchange.put(0, at + 1, w.y), exchange.put(0, at + 2, w.z), exchange.put(0, at + 3, w.w);
      }
      result[at] = sendable(w.x), result[at + 1] = sendable(w.y);
      result[at + 2] = sendable(w.z), result[at + 3] = sendable(w.w);
    }
    dawdle();
    if constexpr (kByFlag) {
      __syncthreads();
      if (tid == 0) {
        exchange.sent();
        exchange.await((uint32_t)(round + 1) * p.grid, waiting);
      }
      __syncthreads();
    }
    for (int i = 4 * first; i < p.words; i += 4 * stride) {
      const int peer = i / share;
      if (peer == rank) continue;
      uint4 w;
      if (i / 4 % 2) {
        w = exchange.template take<uint4>(i, peer, waiting);
      } else {
        w.x = exchange.template take<uint32_t>(i, peer, waiting), w.y = exchange.template take<uint32_t>(i + 1, peer, waiting);
        w.z = exchange.template take<uint32_t>(i + 2, peer, waiting);
        w.w = exchange.template take<uint32_t>(i + 3, peer, waiting);
      }
      *(uint4*)(result + i) = w;
    }
    // The rank's blocks meet, as after every phase of a step.
    __syncthreads();
    if (tid == 0) {
      add_release(barriers, 1);
      for (uint32_t spins = 1; (int32_t)(load_acquire(barriers) - (uint32_t)(round + 1) * p.grid) < 0; spins++)
        if (spins % 16 == 0 && waiting(rank)) break;
    }
    __syncthreads();
    if (!p.delays) continue;
    for (int i = first; i < p.words; i += stride) {
      const uint32_t w = __ldcg(result + i);
      if (w != sendable(pattern(round, i))) atomicAdd(p.wrong[rank], 1);
      sum += (uint64_t)w * hash(i);
    }
    // What was read is overwritten in the next round.
    __syncthreads();
    if (tid == 0) {
      add_release(barriers + 1, 1);
      for (uint32_t spins = 1; (int32_t)(load_acquire(barriers + 1) - (uint32_t)(round + 1) * p.grid) < 0; spins++)
        if (spins % 16 == 0 && waiting(rank)) break;
    }
    __syncthreads();
  }
  atomicAdd((unsigned long long*)p.sums[rank], (unsigned long long)sum);
  if (tid == 0 && failed) atomicAdd(p.wrong[rank], 1);
}

// A rank's memory, on its device.
struct Own {
  Array<uint32_t> receive, sent, barriers{2}, result;
  Array<uint64_t> sums{1};
  Array<int32_t> wrong{1};
  Own(int words, int ranks) : receive((int64_t)kExchangeCopies * words), sent(ranks), result(words) {}
};

template <int kRanks>
struct Run {
  int words, grid, devices;
  std::vector<std::unique_ptr<Own>> own;
  Params<kRanks> p{};

  Run(int words, int grid, int devices = 1) : words(words), grid(grid), devices(devices) {
    for (int r = 0; r < kRanks; r++) {
      CHECK(cudaSetDevice(device(r)));
      own.push_back(std::make_unique<Own>(words, kRanks));
      CHECK(cudaMemset(own[r]->wrong.data, 0, 4));
    }
    for (int r = 0; r < kRanks; r++) {
      p.peers[r].rank = r;
      for (int k = 0; k < kRanks; k++) p.peers[r].words[k] = own[k]->receive.data, p.peers[r].sent[k] = own[k]->sent.data;
      p.barriers[r] = own[r]->barriers.data, p.sums[r] = own[r]->sums.data;
      p.result[r] = own[r]->result.data, p.wrong[r] = own[r]->wrong.data;
    }
    p.grid = grid, p.words = words;
    // A kernel is loaded when it is first launched, and loading may wait for what runs on other devices, which may be a kernel
    // that waits for this one.
    operator()<false>(0, false);
    operator()<true>(0, false);
    each_device([](int) { CHECK(cudaDeviceSynchronize()); });
  }
  int device(int rank) const { return rank * devices / kRanks; }
  void each_device(auto&& work) const {
    for (int d = devices - 1; d >= 0; d--) {
      CHECK(cudaSetDevice(d));
      work(d);
    }
  }
  // Nothing may be sent before all have emptied what they receive in.
  void reset() {
    for (int r = 0; r < kRanks; r++) {
      CHECK(cudaSetDevice(device(r)));
      for (const auto* a : {&own[r]->sent, &own[r]->barriers}) CHECK(cudaMemset(a->data, 0, a->size * 4));
      CHECK(cudaMemset(own[r]->receive.data, 0xFF, own[r]->receive.size * 4));
      CHECK(cudaMemset(own[r]->sums.data, 0, 8));
    }
    each_device([](int) { CHECK(cudaDeviceSynchronize()); });
  }
  template <bool kByFlag>
  void operator()(int rounds, bool delays) {
    p.rounds = rounds, p.delays = delays;
    each_device([&](int d) {
      p.first = d * (kRanks / devices);
      launch(exchange_ranks<kRanks, kByFlag>, kRanks / devices * grid, kThreadsEach, 16, true, p);
    });
  }
  // us of a round by the first device's clock, median of five.
  template <bool kByFlag>
  double timed(int rounds) {
    std::vector<float> all;
    cudaEvent_t a, b;
    CHECK(cudaEventCreate(&a));
    CHECK(cudaEventCreate(&b));
    for (int i = 0; i < 6; i++) {
      reset();
      CHECK(cudaEventRecord(a));
      operator()<kByFlag>(rounds, false);
      CHECK(cudaEventRecord(b));
      CHECK(cudaEventSynchronize(b));
      float ms;
      CHECK(cudaEventElapsedTime(&ms, a, b));
      if (i) all.push_back(ms);
    }
    std::sort(all.begin(), all.end());
    return all[2] * 1e3 / rounds;
  }
  void check() {
    each_device([](int) { CHECK(cudaDeviceSynchronize()); });
    for (int r = 0; r < kRanks; r++) expect(own[r]->wrong.get(0, 1)[0] == 0, "words that came through");
  }
  std::vector<uint64_t> sums() const {
    std::vector<uint64_t> found;
    for (int r = 0; r < kRanks; r++) found.push_back(own[r]->sums.get(0, 1)[0]);
    return found;
  }
};

template <int kRanks>
void hammer(int rounds, int words, int grid, int devices = 1) {
  Run<kRanks> run(words, grid, devices);
  run.reset();
  run.template operator()<false>(rounds, true);
  run.check();
  const std::vector<uint64_t> found = run.sums();
  run.reset();
  run.template operator()<true>(rounds, true);
  run.check();
  expect(run.sums() == found, "the same sums by words and by flags");
  for (int r = 1; r < kRanks; r++) expect(found[r] == found[0], "the same sums on every rank");
}

template <int kRanks>
void time_it(int words, int grid) {
  constexpr int kRounds = 5000;
  Run<kRanks> run(words, grid);
  char what[80];
  const auto show = [&](const char* how, double us) {
    snprintf(what, sizeof what, "%d ranks x %d SMs, %d B in all, %s", kRanks, grid, words * 4, how);
    row("ranks", what, us, 2 * kHitCycles / 1980., "us", true);
  };
  // Both times have a barrier of the rank's blocks in them.
  show("words", run.template timed<false>(kRounds));
  show("flags", run.template timed<true>(kRounds));
  run.check();
}

template <int kRanks>
void on_devices(int devices, int rounds, const std::vector<int>& bytes) {
  const int grid = (kGrid * devices) / kRanks;
  for (int n : bytes) hammer<kRanks>(std::max(1, rounds / 20), n / 4, grid, devices);
  for (int n : bytes) {
    Run<kRanks> run(n / 4, grid, devices);
    const double words = run.template timed<false>(rounds), flags = run.template timed<true>(rounds);
    run.check();
    printf("%d %.3f %.3f\n", n, words, flags);
  }
}

int several(int argc, char** argv) {
  const int devices = atoi(argv[1]), ranks = atoi(argv[2]), rounds = atoi(argv[3]);
  std::vector<int> bytes;
  for (int i = 4; i < argc; i++) bytes.push_back(atoi(argv[i]));
  for (int a = 0; a < devices; a++)
    for (int b = 0; b < devices; b++)
      if (a != b) {
        CHECK(cudaSetDevice(a));
        CHECK(cudaDeviceEnablePeerAccess(b, 0));
      }
  if (ranks == 2)
    on_devices<2>(devices, rounds, bytes);
  else if (ranks == 4)
    on_devices<4>(devices, rounds, bytes);
  else
    on_devices<8>(devices, rounds, bytes);
  return finish();
}

int main(int argc, char** argv) {
  if (argc > 4) return several(argc, argv);
  const int rounds = argc > 1 ? std::max(1, atoi(argv[1])) : 20000;
  const bool trying = argc > 1;
  for (int words : {32, 96, 1024, 8192}) {
    if (trying && words > 96) break;
    hammer<2>(rounds, words, trying ? 2 : kGrid / 2);
    hammer<4>(rounds, words, trying ? 1 : kGrid / 4);
    hammer<8>(rounds, words, trying ? 1 : kGrid / 8);
  }
  if (!trying)
    for (int words : {96, 768, 6144, 24576, 98304}) {
      time_it<2>(words, kGrid / 2);
      time_it<4>(words, kGrid / 4);
      time_it<8>(words, kGrid / 8);
    }
  return finish();
}
