// Exchanges between 2, 4 and 8 ranks that share this GPU, each with its part of the SMs: every round a rank sends the
// words it computed to all others and takes theirs, and its blocks meet. First hammered, with random delays and patterns, words by
// themselves and by flags: every word is checked, and both must leave the same sums. Then timed, beside the bytes of all
// ranks.
//   python tests/bench/ladder/run.py ranks
// An argument: rounds of the first part, for trying the program.
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
  uint32_t* barriers;  // [kRanks]
  uint64_t* sums;      // [kRanks]
  uint32_t* result;    // [kRanks][words]
  int32_t* wrong;      // words that were not what was sent; waits that ended
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
  const int rank = blockIdx.x / p.grid, block = blockIdx.x % p.grid, tid = threadIdx.x;
  const Peers<kRanks>& peers = p.peers[rank];
  uint32_t* result = p.result + (int64_t)rank * p.words;
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
        exchange.put(at, w);
      } else if (i / 4 % 3 == 1) {
        exchange.put(at, uint2{w.x, w.y});
        exchange.put(at + 2, uint2{w.z, w.w});
      } else {
        exchange.put(at, w.x), exchange.put(at + 1, w.y), exchange.put(at + 2, w.z), exchange.put(at + 3, w.w);
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
      add_release(p.barriers + rank, 1);
      for (uint32_t spins = 1; (int32_t)(load_acquire(p.barriers + rank) - (uint32_t)(round + 1) * p.grid) < 0; spins++)
        if (spins % 16 == 0 && waiting(rank)) break;
    }
    __syncthreads();
    if (!p.delays) continue;
    for (int i = first; i < p.words; i += stride) {
      const uint32_t w = __ldcg(result + i);
      if (w != sendable(pattern(round, i))) atomicAdd(p.wrong, 1);
      sum += (uint64_t)w * hash(i);
    }
    // What was read is overwritten in the next round.
    __syncthreads();
    if (tid == 0) {
      add_release(p.barriers + kRanks + rank, 1);
      for (uint32_t spins = 1; (int32_t)(load_acquire(p.barriers + kRanks + rank) - (uint32_t)(round + 1) * p.grid) < 0; spins++)
        if (spins % 16 == 0 && waiting(rank)) break;
    }
    __syncthreads();
  }
  atomicAdd((unsigned long long*)p.sums + rank, (unsigned long long)sum);
  if (tid == 0 && failed) atomicAdd(p.wrong, 1);
}

template <int kRanks>
struct Run {
  int words, grid;
  Array<uint32_t> receive{(int64_t)kRanks * kExchangeCopies * words}, sent{kRanks * kRanks}, barriers{2 * kRanks},
      result{(int64_t)kRanks * words};
  Array<uint64_t> sums{kRanks};
  Array<int32_t> wrong{1};
  Params<kRanks> p{};

  Run(int words, int grid) : words(words), grid(grid) {
    for (int r = 0; r < kRanks; r++) {
      p.peers[r].rank = r;
      for (int k = 0; k < kRanks; k++) {
        p.peers[r].words[k] = receive.data + (int64_t)k * kExchangeCopies * words;
        p.peers[r].sent[k] = sent.data + k * kRanks;
      }
    }
    p.barriers = barriers.data, p.sums = sums.data, p.result = result.data, p.wrong = wrong.data;
    p.grid = grid, p.words = words;
    CHECK(cudaMemset(wrong.data, 0, 4));
  }
  template <bool kByFlag>
  void operator()(int rounds, bool delays) {
    p.rounds = rounds, p.delays = delays;
    CHECK(cudaMemset(receive.data, 0xFF, receive.size * 4));
    CHECK(cudaMemset(sent.data, 0, sent.size * 4));
    CHECK(cudaMemset(barriers.data, 0, barriers.size * 4));
    CHECK(cudaMemset(sums.data, 0, kRanks * 8));
    launch(exchange_ranks<kRanks, kByFlag>, kRanks * grid, kThreadsEach, 16, true, p);
  }
};

template <int kRanks>
void hammer(int rounds, int words, int grid) {
  Run<kRanks> run(words, grid);
  run.template operator()<false>(rounds, true);
  const std::vector<uint64_t> found = run.sums.get(0, kRanks);
  run.template operator()<true>(rounds, true);
  expect(run.wrong.get(0, 1)[0] == 0, "words that came through");
  expect(run.sums.get(0, kRanks) == found, "the same sums by words and by flags");
  for (int r = 1; r < kRanks; r++) expect(found[r] == found[0], "the same sums on every rank");
}

template <int kRanks>
void time_it(int words, int grid) {
  constexpr int kRounds = 5000;
  Run<kRanks> run(words, grid);
  char what[80];
  const auto show = [&](const char* how, double t) {
    snprintf(what, sizeof what, "%d ranks x %d SMs, %d B in all, %s", kRanks, grid, words * 4, how);
    row("ranks", what, t / kRounds * 1e6, 2 * kHitCycles / 1980., "us", true);
  };
  // Both times have a barrier of the rank's blocks in them.
  show("words", seconds([&] { run.template operator()<false>(kRounds, false); }));
  show("flags", seconds([&] { run.template operator()<true>(kRounds, false); }));
  expect(run.wrong.get(0, 1)[0] == 0, "waits that came to their end");
}

int main(int argc, char** argv) {
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
