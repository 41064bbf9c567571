// What if there is no memory at one moment? Preloaded, it takes the place of operator new, and refuses the compiled library one request.
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

static std::atomic<long> left{-1};  // requests of the library until one is refused; below 0: all are served

extern "C" void refuse_after(long count) { left = count; }
extern "C" long requests_left() { return left; }

static void* serve(std::size_t size, std::size_t alignment, void* caller) {
  Dl_info from;
  if (left >= 0 && dladdr(caller, &from) && from.dli_fname && std::strstr(from.dli_fname, "/_C.so") && left-- == 0)
    throw std::bad_alloc();
  void* const found = alignment ? std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment) : std::malloc(size ? size : 1);
  if (!found) throw std::bad_alloc();
  return found;
}

void* operator new(std::size_t size) { return serve(size, 0, __builtin_return_address(0)); }
void* operator new[](std::size_t size) { return serve(size, 0, __builtin_return_address(0)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return serve(size, static_cast<std::size_t>(alignment), __builtin_return_address(0));
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete[](void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }
void operator delete[](void* data, std::size_t) noexcept { std::free(data); }
void operator delete(void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, std::size_t, std::align_val_t) noexcept { std::free(data); }
