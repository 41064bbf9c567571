// How do the threads of a region start, wait for each other and go to sleep?
#include "parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <cfenv>
#endif

namespace mlspec {
namespace {

using Clock = std::chrono::steady_clock;
// At a barrier: longer than the gaps inside a step.
constexpr auto kSpin = std::chrono::microseconds(50);
// Of a worker, for the next region: longer than what Python does between two of them, shorter than anybody notices.
constexpr auto kLinger = std::chrono::microseconds(250);

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// True when done() came true in that time.
template <class Done>
bool spin(std::chrono::microseconds time, Done&& done) {
  if (done()) return true;
  const auto end = Clock::now() + time;
  do {
    for (int i = 0; i < 16; ++i) {
      pause();
      if (done()) return true;
    }
  } while (Clock::now() < end);
  return false;
}

// Spins, then lets others run between looks: the thread waited for may have lost its core to another program.
template <class Done>
void wait_until(Done&& done) {
  if (spin(kSpin, done)) return;
  while (!done()) sched_yield();
}

// Rounding and flush-to-zero are the calling thread's: a row's bits may not depend on who computes it.
struct FloatModes {
#if defined(__x86_64__)
  unsigned modes = _mm_getcsr() & ~_MM_EXCEPT_MASK;
  void apply() const { _mm_setcsr(modes); }
#else
  std::fenv_t modes;
  FloatModes() { std::fegetenv(&modes); }
  void apply() const { std::fesetenv(&modes); }
#endif
};

int usable_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set) > 0 ? CPU_COUNT(&set) : 1;
#endif
  const unsigned cores = std::thread::hardware_concurrency();  // 0: not known
  return cores ? static_cast<int>(cores) : 1;
}

thread_local bool in_region = false;

// A thread of the pool and its bell: counts how often it was called.
struct alignas(64) Worker {
  std::atomic<uint32_t> calls{0};
  std::atomic<bool> asleep{false};
  std::mutex mutex;
  std::condition_variable bell;

  void call();
  void await_call(uint32_t answered);
};

void Worker::call() {
  calls.fetch_add(1);
  if (!asleep.load()) return;  // both sequentially consistent: it sees the call, or this sees it asleep
  { const std::lock_guard<std::mutex> lock(mutex); }  // it is not between its last look at calls and sleep
  bell.notify_one();
}

void Worker::await_call(uint32_t answered) {
  const auto called = [&] { return calls.load() != answered; };
  if (spin(kLinger, called)) return;
  std::unique_lock<std::mutex> lock(mutex);
  asleep.store(true);
  bell.wait(lock, called);
  asleep.store(false);
}

struct Pool {
  const int max_threads = usable_cores();  // asked at the first region of a process
  std::mutex turn;                         // held by the thread whose region runs, guards all below
  std::vector<std::unique_ptr<Worker>> workers;  // of index 1, 2, ...
  std::vector<detail::Cursor> cursors = std::vector<detail::Cursor>(max_threads);

  // The region that runs. Written before its workers are called, constant until `running` is back at 0.
  detail::Region region;
  detail::Entry entry = nullptr;
  void* body = nullptr;
  FloatModes modes;
  alignas(64) std::atomic<int> running{0};  // called workers that have not finished

  void run(int threads, detail::Entry wanted, void* data);
  void grow(int threads);
  void work(Worker* self, int index);
};

// Where the system grants no more threads, regions are smaller.
void Pool::grow(int threads) {
  workers.reserve(max_threads);  // a worker that runs must not fail to be remembered
  while (static_cast<int>(workers.size()) + 1 < threads) {
    auto worker = std::make_unique<Worker>();
    try {
      std::thread(&Pool::work, this, worker.get(), static_cast<int>(workers.size()) + 1).detach();
    } catch (const std::system_error&) {
      return;
    }
    workers.push_back(std::move(worker));
  }
}

void Pool::run(int threads, detail::Entry wanted, void* data) {
  const std::lock_guard<std::mutex> lock(turn);
  grow(threads);
  region.size = std::min(threads, static_cast<int>(workers.size()) + 1);
  region.cursors = cursors.data();
  entry = wanted;
  body = data;
  modes = FloatModes();
  running.store(region.size - 1, std::memory_order_relaxed);
  for (int i = 1; i < region.size; ++i) workers[i - 1]->call();
  in_region = true;
  Team team(&region, 0);
  wanted(data, team);
  in_region = false;
  wait_until([&] { return running.load(std::memory_order_acquire) == 0; });
}

void Pool::work(Worker* self, int index) {
  in_region = true;
  for (uint32_t answered = 0;; ++answered) {
    self->await_call(answered);
    modes.apply();
    Team team(&region, index);
    entry(body, team);
    running.fetch_sub(1, std::memory_order_release);
  }
}

std::atomic<Pool*> the_pool{nullptr};

// Threads do not live on in a child of fork: it forgets the pool, whose locks may be held for ever there.
[[maybe_unused]] const int forks_are_watched = pthread_atfork(nullptr, nullptr, [] {
  the_pool.store(nullptr);
  in_region = false;
});

// Never freed: workers wait in it until the process ends.
Pool& pool() {
  Pool* found = the_pool.load(std::memory_order_acquire);
  if (found) return *found;
  auto made = std::make_unique<Pool>();
  if (the_pool.compare_exchange_strong(found, made.get())) return *made.release();
  return *found;  // another thread was first; the one made here has no workers yet
}

}  // namespace

void Team::barrier() {
  if (size() == 1) return;
  const uint32_t now = region_->phase.load(std::memory_order_relaxed);
  if (region_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
    region_->arrived.store(0, std::memory_order_relaxed);
    for (int i = 0; i < size(); ++i) region_->cursors[i].taken.store(0, std::memory_order_relaxed);
    region_->phase.store(now + 1, std::memory_order_release);
  } else {
    wait_until([&] { return region_->phase.load(std::memory_order_acquire) != now; });
  }
}

void detail::run_region(int threads, Entry entry, void* body) {
  if (threads > 1 && !in_region) {
    Pool& shared = pool();
    threads = std::min(threads, shared.max_threads);
    if (threads > 1) return shared.run(threads, entry, body);
  }
  Region alone;
  Team team(&alone, 0);
  const bool nested = std::exchange(in_region, true);
  entry(body, team);
  in_region = nested;
}

}  // namespace mlspec
