// The threads that live as long as the model, and the barrier they meet at.
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
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace mk {

class Team {
 public:
  // `n` threads in all; the caller of run() is thread 0. `limit_s`: longest wait at a barrier.
  Team(int n, double limit_s) : n_(n), limit_s_(limit_s), arrivals_(new Arrivals[n]) {
    try {
      for (int tid = 1; tid < n; tid++) threads_.emplace_back([this, tid] { work(tid); });
    } catch (...) {  // too many threads or too little memory: those that did start wait for work and must be let go
      stop();
      throw;
    }
  }
  ~Team() { stop(); }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return n_; }
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

  // Runs job(tid) on every thread and returns when all are done.
  void run(const std::function<void(int)>& job) {
    {
      std::lock_guard lock(mutex_);
      job_ = &job;
      done_.value.store(0, std::memory_order_relaxed);
      job_number_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job(0);
    for (uint32_t done; (done = done_.value.load(std::memory_order_acquire)) != static_cast<uint32_t>(n_) - 1;)
      done_.wait_while(done);
  }

  // Returns false when the wait was given up, here or by another thread: then leave the job. `limited` is false where
  // the others may rightly take long (a callback of the user).
  bool barrier(int tid, const char* phase, int layer, bool limited = true) {
    const uint32_t mine = arrivals_[tid].count.load(std::memory_order_relaxed) + 1;
    arrivals_[tid].count.store(mine, std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == static_cast<uint32_t>(n_) - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      epoch_.add();
      return !failed();
    }
    using clock = std::chrono::steady_clock;
    double waited = 0;
    for (auto last = clock::time_point{}; epoch_.value.load(std::memory_order_acquire) == mine - 1;) {
      if (failed()) return false;
      if (limited && last != clock::time_point{}) {
        // Time this thread did not run (a stopped process, a suspended machine) must not count as waiting.
        waited += std::min(2e-9 * Word::kSleepNs, std::chrono::duration<double>(clock::now() - last).count());
        if (waited > limit_s_) {
          give_up(tid, mine, phase, layer);
          return false;
        }
      }
      last = clock::now();
      epoch_.wait_while(mine - 1);
    }
    return !failed();
  }

  std::string failure() {
    std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  struct alignas(64) Arrivals {
    std::atomic<uint32_t> count{0};
  };

  // A counter that threads wait on: spinning first, since phases are short, then asleep, so that on a busy machine the
  // thread that is waited for gets the core.
  struct alignas(64) Word {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};
    static constexpr int kSpins = 4096;
    static constexpr long kSleepNs = 20'000'000;

    void add() {
      value.fetch_add(1, std::memory_order_seq_cst);
      if (sleepers.load(std::memory_order_seq_cst)) syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
    }
    // Returns when `value` is no longer `old`, or after about kSleepNs.
    void wait_while(uint32_t old) {
      for (int spins = 0; spins < kSpins; spins++) {
        if (value.load(std::memory_order_acquire) != old) return;
        _mm_pause();
      }
      const timespec limit{0, kSleepNs};
      sleepers.fetch_add(1, std::memory_order_seq_cst);
      syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, old, &limit, nullptr, 0);
      sleepers.fetch_sub(1, std::memory_order_relaxed);
    }
  };

  static std::string seconds(double s) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", s);
    return text;
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      quit_ = true;
    }
    wake_.notify_all();
    for (auto& t : threads_) t.join();
  }

  void give_up(int tid, uint32_t mine, const char* phase, int layer) {
    std::lock_guard lock(mutex_);
    if (failed()) return;
    failure_ = "thread " + std::to_string(tid) + " waited more than " + seconds(limit_s_) + " s after phase " +
               phase + (layer < 0 ? "" : " of layer " + std::to_string(layer)) + " for thread";
    for (int i = 0; i < n_; i++)
      if (static_cast<int32_t>(arrivals_[i].count.load(std::memory_order_relaxed) - mine) < 0)
        failure_ += " " + std::to_string(i);
    failed_.store(true, std::memory_order_release);
  }

  void work(int tid) {
    uint32_t seen = 0;
    for (;;) {
      for (int spins = 0; spins < 4 * Word::kSpins && job_number_.load(std::memory_order_acquire) == seen; spins++) _mm_pause();
      const std::function<void(int)>* job;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return quit_ || job_number_.load(std::memory_order_relaxed) != seen; });
        if (quit_) return;
        seen = job_number_.load(std::memory_order_relaxed);
        job = job_;
      }
      (*job)(tid);
      done_.add();
    }
  }

  const int n_;
  const double limit_s_;
  std::vector<std::thread> threads_;
  std::unique_ptr<Arrivals[]> arrivals_;
  alignas(64) std::atomic<uint32_t> arrived_{0};
  Word epoch_;
  Word done_;
  alignas(64) std::atomic<uint32_t> job_number_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  const std::function<void(int)>* job_ = nullptr;
  bool quit_ = false;
  std::string failure_;
};

// The share of thread `tid` of `n` items: [first, second).
inline std::pair<int64_t, int64_t> share(int64_t n, int tid, int threads) {
  return {n * tid / threads, n * (tid + 1) / threads};
}

}  // namespace mk
