// Announces memory that is managed here, not by malloc, to AddressSanitizer. No effect in other builds.
#pragma once

#include <cstddef>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>

#include <cstring>
#endif

namespace polyconv {

#ifdef __SANITIZE_ADDRESS__

// Allows access to the first `bytes` of `whole` bytes only, and fills them with NaN.
inline void HandOut(void* data, std::size_t bytes, std::size_t whole) {
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  ASAN_POISON_MEMORY_REGION(static_cast<char*>(data) + bytes, whole - bytes);
  std::memset(data, 0xFF, bytes);
}

// Forbids access until the memory is handed out again.
inline void TakeBack(void* data, std::size_t bytes) {
  ASAN_POISON_MEMORY_REGION(data, bytes);
}

// Allows access again before the memory is unmapped.
inline void LetGo(void* data, std::size_t bytes) {
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
}

#else

inline void HandOut(void*, std::size_t, std::size_t) {}
inline void TakeBack(void*, std::size_t) {}
inline void LetGo(void*, std::size_t) {}

#endif

}  // namespace polyconv
