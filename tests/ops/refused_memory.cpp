// What if there is no memory at one moment? Preloaded, it takes the place of operator new and posix_memalign, and refuses one
// request of the compiled library, or one of torch for the elements of a tensor.
#include <dlfcn.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

static std::atomic<long> left{-1};          // requests of the library until one is refused; below 0: all are served
static std::atomic<long> tensors_left{-1};  // the same of torch's for tensors

extern "C" void refuse_after(long count) { left = count; }
extern "C" long requests_left() { return left; }
extern "C" void refuse_tensor_after(long count) { tensors_left = count; }
extern "C" long tensors_left_until() { return tensors_left; }

static bool is_from(void* caller, const char* library) {
  Dl_info from;
  return dladdr(caller, &from) && from.dli_fname && std::strstr(from.dli_fname, library);
}

static void* serve(std::size_t size, std::size_t alignment, void* caller) {
  if (left >= 0 && is_from(caller, "/_C.so") && left-- == 0) throw std::bad_alloc();
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

extern "C" int posix_memalign(void** found, std::size_t alignment, std::size_t size) {
  if (tensors_left >= 0 && is_from(__builtin_return_address(0), "/libc10.so") && tensors_left-- == 0) return ENOMEM;
  *found = std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  return *found || !size ? 0 : ENOMEM;
}
