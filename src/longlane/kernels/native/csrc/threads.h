// A pool of threads that run one body together and meet at barriers.
//
// A decode step of a small model passes some 250 barriers in a few milliseconds, so waiting must be spinning; a thread
// that has spun for long yields, so that a busy machine slows down instead of standing still, and a pool without work
// sleeps.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <immintrin.h>
#include <mutex>
#include <thread>
#include <vector>

namespace longlane {

constexpr int kSpins = 4000;

class Pool {
 public:
  explicit Pool(int threads) : size_(threads), owner_(getpid()) {
    for (int id = 1; id < threads; ++id) workers_.emplace_back([this, id] { work(id); });
  }

  ~Pool() {
    stop_ = true;
    wake();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return size_; }
  bool serves(int threads) const { return size_ == threads && owner_ == getpid(); }
  bool forked() const { return owner_ != getpid(); }

  // Calls body(id) once on every thread, the caller being id 0, and returns when all are done.
  template <class Body>
  void run(Body& body) {
    call_ = [](void* context, int id) { (*static_cast<Body*>(context))(id); };
    context_ = &body;
    wake();
    body(0);
    barrier();
  }

  void barrier() {
    const int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (spins < kSpins) _mm_pause();
      else sched_yield();
    }
  }

 private:
  void wake() {
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
  }

  void work(int id) {
    for (int seen = 0;; ++seen) {
      for (int spins = 0; spins < kSpins && epoch_.load(std::memory_order_acquire) == seen; ++spins) _mm_pause();
      epoch_.wait(seen, std::memory_order_acquire);
      if (stop_) return;
      call_(context_, id);
      barrier();
    }
  }

  const int size_;
  const pid_t owner_;
  std::vector<std::thread> workers_;
  void (*call_)(void*, int) = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<int> epoch_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

// Runs body on `threads` threads. One caller at a time: a second one waits. A forked child has none of its parent's
// threads and gets a pool of its own.
template <class Body>
void run(int threads, Body&& body) {
  static std::mutex busy;
  static Pool* pool = nullptr;
  const std::lock_guard<std::mutex> guard(busy);
  if (pool == nullptr || !pool->serves(threads)) {
    if (pool != nullptr && !pool->forked()) delete pool;
    pool = new Pool(threads);
  }
  auto bound = [&](int id) { body(*pool, id); };
  pool->run(bound);
}

struct Range {
  int begin, end;
};

inline Range share(int count, int id, int size) {
  const long wide = count;
  return {static_cast<int>(wide * id / size), static_cast<int>(wide * (id + 1) / size)};
}

}  // namespace longlane
