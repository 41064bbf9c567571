// What if a GPU has no memory at one moment? Preloaded, it stands before the CUDA runtime that torch loads, and refuses
// requests for memory, and for what a captured graph takes.
#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

static std::atomic<long> came{0}, first{-1}, last{-1};  // requests so far; those in [first, last) are refused
constexpr int kNoMemory = 2;                             // cudaErrorMemoryAllocation

extern "C" void refuse_device(long from, long count) {
  came = 0;
  first = from;
  last = from + count;
}
extern "C" long device_requests() { return came; }

static void* behind(const char* name) {
  if (void* const found = dlsym(RTLD_NEXT, name)) return found;
  std::string place;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        if (!std::strstr(info->dlpi_name, "libcudart")) return 0;
        *static_cast<std::string*>(data) = info->dlpi_name;
        return 1;
      },
      &place);
  void* const library = place.empty() ? nullptr : dlopen(place.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  void* const found = library ? dlsym(library, name) : nullptr;
  if (!found) std::abort();
  return found;
}

static bool refused() {
  const long number = came++;
  return first >= 0 && first <= number && number < last;
}

extern "C" int cudaMalloc(void** pointer, std::size_t size) {
  static const auto real = reinterpret_cast<int (*)(void**, std::size_t)>(behind("cudaMalloc"));
  return refused() ? kNoMemory : real(pointer, size);
}
extern "C" int cudaGraphInstantiate(void** made, void* graph, unsigned long long flags) {
  static const auto real = reinterpret_cast<int (*)(void**, void*, unsigned long long)>(behind("cudaGraphInstantiate"));
  return refused() ? kNoMemory : real(made, graph, flags);
}
extern "C" int cudaGraphInstantiateWithFlags(void** made, void* graph, unsigned long long flags) {
  static const auto real = reinterpret_cast<int (*)(void**, void*, unsigned long long)>(behind("cudaGraphInstantiateWithFlags"));
  return refused() ? kNoMemory : real(made, graph, flags);
}
