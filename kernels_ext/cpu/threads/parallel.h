// Who computes at the same time? One pool of threads for all kernels, one parallel region per call, shared-out work inside.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace mlspec {

namespace detail {
// How many items of a member's own range are taken, by itself or by others; 0 between shares.
struct alignas(64) Cursor {
  std::atomic<int64_t> taken{0};
};

// What the members of a region share; each counter has a cache line of its own.
struct Region {
  int size = 1;
  Cursor* cursors = nullptr;                   // [size], null in a region of one
  alignas(64) std::atomic<int> arrived{0};     // at the current barrier
  alignas(64) std::atomic<uint32_t> phase{0};  // barriers passed
};
}  // namespace detail

// The threads inside a region. Every member calls the same barriers and shares in the same order.
class Team {
 public:
  Team(detail::Region* region, int index) : region_(region), index_(index) {}
  int size() const { return region_->size; }
  int index() const { return index_; }  // of the calling thread, 0 is the caller of run
  void barrier();
  // f(begin, end) for pieces of [0, items), then a barrier. Every member works through a range of its own, in order, in
  // pieces that shrink to `grain`, and then helps the others: memory streams, and cores need not be alike.
  template <class F>
  void share(int64_t items, int64_t grain, F&& f);

 private:
  detail::Region* region_;
  int index_;
};

namespace detail {
using Entry = void (*)(void* body, Team& team);
void run_region(int threads, Entry entry, void* body);
}  // namespace detail

// body(team) on min(threads, usable cores) threads, the caller among them; returns when all have finished. body must not throw.
// Workers spin about 250 us for the next region, then sleep. A child of fork() gets a pool of its own at its first region.
// A region inside a region runs on the calling thread alone; regions of different threads take turns.
template <class Body>
void run(int threads, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  const auto entry = [](void* data, Team& team) noexcept { (*static_cast<Plain*>(data))(team); };
  detail::run_region(threads, entry, const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

template <class F>
void Team::share(int64_t items, int64_t grain, F&& f) {
  if (size() == 1) {
    if (items > 0) f(int64_t{0}, items);
    return;
  }
  if (grain < 1) grain = 1;
  for (int v = 0; v < size(); ++v) {
    const int owner = (index_ + v) % size();
    const int64_t first = (items * owner + size() - 1) / size(), end = (items * (owner + 1) + size() - 1) / size();
    std::atomic<int64_t>& taken = region_->cursors[owner].taken;
    for (;;) {
      const int64_t left = end - first - taken.load(std::memory_order_relaxed);
      if (left <= 0) break;
      const int64_t piece = left / 4 > grain ? left / 4 : grain;
      const int64_t begin = first + taken.fetch_add(piece, std::memory_order_relaxed);
      if (begin >= end) break;
      f(begin, begin + piece < end ? begin + piece : end);
    }
  }
  barrier();  // its last member sets the cursors back to 0: no member can still be taking items then
}

}  // namespace mlspec
