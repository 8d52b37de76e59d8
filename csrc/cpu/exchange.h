// How ranks on CPUs tell each other what they computed. docs/TENSOR_PARALLEL.md, "CPU ranks", has the protocol and its proof.
//
// A rank receives in three buffers, each with a slot for every other rank. Every exchange is one epoch: a rank clears its
// buffer of two epochs back, writes its words into its slot in every peer's buffer of this epoch, and polls its own buffer
// until every word of every peer is there. The rank's threads share all of that.
//
// Sync::data is the exchange: a word is its own flag. Sync::flags is the same with plain words and an epoch counter beside
// them, released and acquired: slower on a GPU, obvious everywhere, and what the first is compared with.
#pragma once
#include <cstring>
#include <utility>

#include "common/exchange.h"
#include "common/format.h"
#include "cpu/team.h"

namespace mk {

enum class Sync { data, flags };

constexpr int kMaxRanks = 64;

constexpr int buffer_of(uint64_t epoch) { return static_cast<int>(epoch % kExchangeCopies); }
// The buffer of two epochs back, which the next epoch uses again.
constexpr int cleared_in(uint64_t epoch) { return buffer_of(epoch + 1); }
// A message has at least one word, so that who has taken a peer's message knows how far that peer has come.
constexpr int64_t message_words(int64_t words) { return std::max<int64_t>(words, 1); }

// Where one thread of a rank stands. Senders and receivers each cut a message by their own number of threads.
struct Seat {
  int rank, tid, threads;
  uint64_t epoch = 0;
  int64_t words[kExchangeCopies][kMaxRanks] = {};  // of the message that each peer sent in the buffer's last epoch
};

template <Sync S>
class Exchange {
 public:
  // words: of the longest message. threads: of each rank. limit_s: longest wait for a peer.
  Exchange(int ranks, int64_t words, const int* threads, double limit_s, Failure& failure, bool crowded)
      : ranks_(ranks), words_(words), limit_s_(limit_s), spins_(spins(crowded)), failure_(failure) {
    for (int r = 0; r < ranks; r++) {
      boxes_.push_back(std::make_unique<Box>());
      Box& box = *boxes_.back();
      box.threads = static_cast<uint32_t>(threads[r]);
      const auto count = static_cast<size_t>(kExchangeCopies * ranks * words);
      box.slots.reset(new Slot[count]);
      for (size_t i = 0; i < count; i++) put(box.slots[i], kEmptyWord);
    }
  }

  // For the texts of failures: where a rank was last seen.
  void note(int rank, const char* phase, int layer) {
    boxes_[rank]->phase.store(phase, std::memory_order_relaxed);
    boxes_[rank]->layer.store(layer, std::memory_order_relaxed);
  }

  // Begins this thread's next epoch and clears its share of the buffer of two epochs back. Then the rank's threads must
  // meet before any of them sends: a peer that has taken anything of this epoch may write there in the next.
  void begin(Seat& seat) {
    seat.epoch++;
    if constexpr (S == Sync::data) {
      const int buffer = cleared_in(seat.epoch);
      for (int from = 0; from < ranks_; from++) {
        const auto [lo, hi] = share(std::exchange(seat.words[buffer][from], 0), seat.tid, seat.threads);
        Slot* slot = slots(seat.rank, buffer, from);
        for (int64_t i = lo; i < hi; i++) put(slot[i], kEmptyWord);
      }
    }
  }

  // Sends this thread's share of a message. walk(use) calls use(address, words) for the runs that make it up; the
  // receiver walks over runs of the same sizes.
  template <class Walk>
  void send(const Seat& seat, int to, Walk walk) {
    Slot* slot = slots(to, buffer_of(seat.epoch), seat.rank);
    // Orders what was cleared before what is sent. No instruction on x86, where stores keep their order anyway; it keeps
    // the compiler to that.
    if constexpr (S == Sync::data) std::atomic_thread_fence(std::memory_order_release);
    const int64_t words = count(walk);
    const auto [lo, hi] = share(words, seat.tid, seat.threads);
    if (words == 0 && seat.tid == 0) put(slot[0], 0);
    runs(walk, lo, hi, [&](int64_t at, const void* run, int64_t n) {
      for (int64_t i = 0; i < n; i++) {
        uint32_t word;
        std::memcpy(&word, static_cast<const char*>(run) + i * 4, 4);
        put(slot[at + i], S == Sync::data ? sendable(word) : word);
      }
    });
    Box& box = *boxes_[to];
    if constexpr (S == Sync::flags) box.sent[seat.rank].count.fetch_add(1, std::memory_order_release);
    // A courtesy to sleepers: who misses it looks again soon.
    if (box.sleepers.load(std::memory_order_relaxed)) {
      box.bell.fetch_add(1, std::memory_order_relaxed);
      futex_wake(box.bell);
    }
  }

  // The words of a message that a thread takes. unit: so many belong together.
  static std::pair<int64_t, int64_t> share_of(const Seat& seat, int64_t words, int unit) {
    const auto [lo, hi] = share(ceil_div(words, unit), seat.tid, seat.threads);
    return {lo * unit, std::min(hi * unit, words)};
  }

  // Takes this thread's share of what `from` sent in this epoch. phase and layer: what it is the result of. False: given
  // up, here or elsewhere. limited: false where the peer may rightly take long.
  template <class Walk>
  bool take(Seat& seat, int from, Walk walk, const char* phase, int layer, bool limited = true, int unit = 1) {
    const int buffer = buffer_of(seat.epoch);
    Slot* slot = slots(seat.rank, buffer, from);
    const int64_t words = count(walk);
    seat.words[buffer][from] = message_words(words);
    bool here = true;
    const auto arrived = [&](int64_t i) {
      if constexpr (S == Sync::flags) {
        const uint32_t sent = boxes_[seat.rank]->sent[from].count.load(std::memory_order_acquire);
        return static_cast<int32_t>(sent - boxes_[from]->threads * static_cast<uint32_t>(seat.epoch)) >= 0;
      } else {
        return slot[i].load(std::memory_order_relaxed) != kEmptyWord;
      }
    };
    const auto await = [&](int64_t i) {
      if (!arrived(i)) [[unlikely]]
        here = wait(seat, from, phase, layer, limited, [&] { return arrived(i); });
      return here;
    };
    const auto [lo, hi] = share_of(seat, words, unit);
    // Each thread sees something of each message, however few its words are: it must not go on before the peer has come.
    if (lo == hi && !await(0)) return false;
    runs(walk, lo, hi, [&](int64_t at, void* run, int64_t n) {
      for (int64_t i = 0; i < n && await(at + i); i++) {
        const uint32_t word = get(slot[at + i]);
        std::memcpy(static_cast<char*>(run) + i * 4, &word, 4);
      }
    });
    if constexpr (S == Sync::data) std::atomic_thread_fence(std::memory_order_acquire);
    return here;
  }

 private:
  using Slot = std::conditional_t<S == Sync::data, std::atomic<uint32_t>, uint32_t>;
  struct alignas(64) Counter {
    std::atomic<uint32_t> count{0};
  };
  // What belongs to one rank: its peers write slots, counters and the bell, and read the rest only to say what is wrong.
  struct Box {
    std::unique_ptr<Slot[]> slots;  // [buffer][from][words]
    Counter sent[kMaxRanks];        // of Sync::flags: threads of that peer that have sent, over all epochs
    alignas(64) std::atomic<uint32_t> bell{0};
    std::atomic<uint32_t> sleepers{0};
    alignas(64) std::atomic<const char*> phase{nullptr};
    std::atomic<int> layer{-1};
    uint32_t threads = 0;
  };
  static constexpr long kSleepNs = 1'000'000;

  static void put(Slot& slot, uint32_t word) {
    if constexpr (S == Sync::data) slot.store(word, std::memory_order_relaxed);
    else slot = word;
  }
  static uint32_t get(const Slot& slot) {
    if constexpr (S == Sync::data) return slot.load(std::memory_order_relaxed);
    else return slot;
  }
  Slot* slots(int rank, int buffer, int from) const {
    return boxes_[rank]->slots.get() + (int64_t{buffer} * ranks_ + from) * words_;
  }

  template <class Walk>
  static int64_t count(Walk walk) {
    int64_t words = 0;
    walk([&](const void*, int64_t n) { words += n; });
    return words;
  }
  // use(place in the message, address, words) for what of the runs lies in [lo, hi).
  template <class Walk, class Use>
  static void runs(Walk walk, int64_t lo, int64_t hi, Use use) {
    int64_t at = 0;
    walk([&](auto* run, int64_t n) {
      const int64_t a = std::max(lo, at), b = std::min(hi, at + n);
      if (a < b) use(a, run + (a - at), b - a);
      at += n;
    });
  }

  template <class Ready>
  __attribute__((noinline)) bool wait(const Seat& seat, int from, const char* phase, int layer, bool limited, Ready ready) {
    for (int i = 0; i < spins_; i++) {
      if (ready()) return true;
      _mm_pause();
    }
    Box& box = *boxes_[seat.rank];
    for (Patience patience(limit_s_, 1e-9 * kSleepNs);;) {
      const uint32_t heard = box.bell.load(std::memory_order_relaxed);
      box.sleepers.fetch_add(1, std::memory_order_seq_cst);
      const bool now = ready();
      if (!now) futex_wait(box.bell, heard, kSleepNs);
      box.sleepers.fetch_sub(1, std::memory_order_relaxed);
      if (now || ready()) return true;
      if (failure_.failed()) return false;
      if (limited && patience.over()) {
        give_up(seat, from, phase, layer);
        return false;
      }
    }
  }

  void give_up(const Seat& seat, int from, const char* phase, int layer) {
    std::string text = "rank " + std::to_string(seat.rank) + " waited more than " + seconds(limit_s_) +
                       " s in the exchange after phase " + place(phase, layer) + " for";
    const char* between = " ";
    for (int r = 0; r < ranks_; r++) {
      if (r == seat.rank || (r != from && begun(seat, r))) continue;
      const char* seen = boxes_[r]->phase.load(std::memory_order_relaxed);
      text += between + ("rank " + std::to_string(r));
      if (seen) text += " (last seen in " + place(seen, boxes_[r]->layer.load(std::memory_order_relaxed)) + ")";
      between = ", ";
    }
    failure_.report(text);
  }
  // Whether anything of a peer's message of this epoch is there.
  bool begun(const Seat& seat, int from) const {
    if constexpr (S == Sync::flags) {
      const uint32_t sent = boxes_[seat.rank]->sent[from].count.load(std::memory_order_relaxed);
      return static_cast<int32_t>(sent - boxes_[from]->threads * static_cast<uint32_t>(seat.epoch - 1)) > 0;
    } else {
      return get(slots(seat.rank, buffer_of(seat.epoch), from)[0]) != kEmptyWord;
    }
  }

  const int ranks_;
  const int64_t words_;
  const double limit_s_;
  const int spins_;
  Failure& failure_;
  std::vector<std::unique_ptr<Box>> boxes_;
};

}  // namespace mk
