// Memory that is handed out here and not by malloc, made known to AddressSanitizer; nothing at all in other builds.
#pragma once

#include <cstddef>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>

#include <cstring>
#endif

namespace polyconv {

#ifdef __SANITIZE_ADDRESS__

// Of `whole` bytes only the first `bytes` may be used, and what they hold is of no use to anyone: floats that are NaN.
inline void HandOut(void* data, std::size_t bytes, std::size_t whole) {
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  ASAN_POISON_MEMORY_REGION(static_cast<char*>(data) + bytes, whole - bytes);
  std::memset(data, 0xFF, bytes);
}

// Nobody may use it until it is handed out again.
inline void TakeBack(void* data, std::size_t bytes) {
  ASAN_POISON_MEMORY_REGION(data, bytes);
}

// It goes back to where it came from.
inline void LetGo(void* data, std::size_t bytes) {
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
}

#else

inline void HandOut(void*, std::size_t, std::size_t) {}
inline void TakeBack(void*, std::size_t) {}
inline void LetGo(void*, std::size_t) {}

#endif

}  // namespace polyconv
