// The threads that live as long as the model, the barrier they meet at, and how a wait that takes too long ends them all.
#pragma once
#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace mk {

// Why a model is given up: one text, of whoever noticed first. All threads of all ranks look at it while they wait.
class Failure {
 public:
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  void report(const std::string& text) {
    std::lock_guard lock(mutex_);
    if (failed()) return;
    text_ = text;
    failed_.store(true, std::memory_order_release);
  }
  std::string text() {
    std::lock_guard lock(mutex_);
    return text_;
  }

 private:
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::string text_;
};

// How long somebody has waited. Time that the thread did not run (a stopped process, a suspended machine) must not
// count, so a look counts no more than twice what lies between two looks at most.
class Patience {
 public:
  Patience(double limit_s, double look_s) : limit_s_(limit_s), look_s_(look_s) {}
  bool over() {
    const auto now = clock::now();
    if (last_ != clock::time_point{}) waited_ += std::min(2 * look_s_, std::chrono::duration<double>(now - last_).count());
    last_ = now;
    return waited_ > limit_s_;
  }

 private:
  using clock = std::chrono::steady_clock;
  const double limit_s_, look_s_;
  double waited_ = 0;
  clock::time_point last_{};
};

inline std::string seconds(double s) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", s);
  return text;
}
inline std::string place(const char* phase, int layer) {
  return phase + (layer < 0 ? std::string() : " of layer " + std::to_string(layer));
}

// Returns when `word` is no longer `old`, when woken, or after `ns`.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t old, long ns) {
  const timespec limit{0, ns};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, old, &limit, nullptr, 0);
}
inline void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

// Looks at something before going to sleep for it: phases are short. Where threads outnumber cores, whoever is waited
// for may need this one.
constexpr int spins(bool crowded) { return crowded ? 64 : 4096; }

class Team {
 public:
  using Job = void (*)(void* self, int tid);

  // `n` threads in all; thread 0 is the caller of start(), or one more of these where `own_first`. `limit_s`: longest
  // wait at a barrier. who: begins the texts of this team's failures.
  Team(int n, double limit_s, Failure& failure, std::string who = {}, bool own_first = false, bool crowded = false)
      : n_(n), limit_s_(limit_s), spins_(spins(crowded)), who_(std::move(who)), failure_(failure), arrivals_(new Arrivals[n]) {
    try {
      for (int tid = own_first ? 0 : 1; tid < n; tid++) threads_.emplace_back([this, tid] { work(tid); });
    } catch (...) {  // too many threads or too little memory: those that did start wait for work and must be let go
      stop();
      throw;
    }
  }
  ~Team() { stop(); }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return n_; }

  // Starts job(self, tid) on the team's own threads. Both must live as long as the team: a thread that is given up may
  // come back later.
  void start(Job job, void* self) {
    {
      std::lock_guard lock(mutex_);
      job_ = job;
      self_ = self;
      done_.value.store(0, std::memory_order_relaxed);
      job_number_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
  }

  // Returns when those threads are done, or soon after a failure that one of them does not hear of.
  void wait() {
    Patience patience(kGraceS, 1e-9 * Word::kSleepNs);
    for (uint32_t done; (done = done_.value.load(std::memory_order_acquire)) != threads_.size();) {
      if (failure_.failed() && patience.over()) return;
      done_.wait_while(done, spins_);
    }
  }

  // Returns false when the wait was given up, here or by another thread: then leave the job. `limited` is false where
  // the others may rightly take long (a callback of the user).
  bool barrier(int tid, const char* phase, int layer, bool limited = true) {
    const uint32_t mine = arrivals_[tid].count.load(std::memory_order_relaxed) + 1;
    arrivals_[tid].count.store(mine, std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == static_cast<uint32_t>(n_) - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      epoch_.add();
      return !failure_.failed();
    }
    Patience patience(limit_s_, 1e-9 * Word::kSleepNs);
    while (epoch_.value.load(std::memory_order_acquire) == mine - 1) {
      if (failure_.failed()) return false;
      if (limited && patience.over()) {
        give_up(tid, mine, phase, layer);
        return false;
      }
      epoch_.wait_while(mine - 1, spins_);
    }
    return !failure_.failed();
  }

 private:
  static constexpr double kGraceS = 0.25;

  struct alignas(64) Arrivals {
    std::atomic<uint32_t> count{0};
  };

  // A counter that threads wait on: spinning first, then asleep, so that on a busy machine the thread that is waited for
  // gets the core.
  struct alignas(64) Word {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};
    static constexpr long kSleepNs = 20'000'000;

    void add() {
      value.fetch_add(1, std::memory_order_seq_cst);
      if (sleepers.load(std::memory_order_seq_cst)) futex_wake(value);
    }
    // Returns when `value` is no longer `old`, or after about kSleepNs.
    void wait_while(uint32_t old, int spins) {
      for (int i = 0; i < spins; i++) {
        if (value.load(std::memory_order_acquire) != old) return;
        _mm_pause();
      }
      sleepers.fetch_add(1, std::memory_order_seq_cst);
      futex_wait(value, old, kSleepNs);
      sleepers.fetch_sub(1, std::memory_order_relaxed);
    }
  };

  void stop() {
    {
      std::lock_guard lock(mutex_);
      quit_ = true;
    }
    wake_.notify_all();
    for (auto& t : threads_) t.join();
  }

  void give_up(int tid, uint32_t mine, const char* phase, int layer) {
    std::string text = who_ + "thread " + std::to_string(tid) + " waited more than " + seconds(limit_s_) +
                       " s after phase " + place(phase, layer) + " for thread";
    for (int i = 0; i < n_; i++)
      if (static_cast<int32_t>(arrivals_[i].count.load(std::memory_order_relaxed) - mine) < 0)
        text += " " + std::to_string(i);
    failure_.report(text);
  }

  void work(int tid) {
    uint32_t seen = 0;
    for (;;) {
      for (int i = 0; i < 4 * spins_ && job_number_.load(std::memory_order_acquire) == seen; i++) _mm_pause();
      Job job;
      void* self;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return quit_ || job_number_.load(std::memory_order_relaxed) != seen; });
        if (quit_) return;
        seen = job_number_.load(std::memory_order_relaxed);
        job = job_;
        self = self_;
      }
      job(self, tid);
      done_.add();
    }
  }

  const int n_;
  const double limit_s_;
  const int spins_;
  const std::string who_;
  Failure& failure_;
  std::vector<std::thread> threads_;
  std::unique_ptr<Arrivals[]> arrivals_;
  alignas(64) std::atomic<uint32_t> arrived_{0};
  Word epoch_;
  Word done_;
  alignas(64) std::atomic<uint32_t> job_number_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  Job job_ = nullptr;
  void* self_ = nullptr;
  bool quit_ = false;
};

// The share of thread `tid` of `n` items: [first, second).
inline std::pair<int64_t, int64_t> share(int64_t n, int tid, int threads) {
  return {n * tid / threads, n * (tid + 1) / threads};
}

}  // namespace mk
