// Element types of tensors (float and two 16-bit formats) and their conversion from and to float.
//
// Products of 16-bit elements are exact in float, sums are float, and stores round once, to nearest.
#pragma once

#include "common/common.cuh"

namespace polyconv {

struct Half {
  unsigned short bits;
};

struct BFloat16 {
  unsigned short bits;
};

__device__ __forceinline__ float widened(float value) {
  return value;
}
__device__ __forceinline__ float widened(Half value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
}
__device__ __forceinline__ float widened(BFloat16 value) {
  return __uint_as_float(u32(value.bits) << 16);
}

template <class Element>
__device__ __forceinline__ Element rounded(float value);

template <>
__device__ __forceinline__ float rounded(float value) {
  return value;
}
template <>
__device__ __forceinline__ Half rounded(float value) {
  Half narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
  return narrow;
}
template <>
__device__ __forceinline__ BFloat16 rounded(float value) {
  BFloat16 narrow;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
#else
  // Round to nearest, ties to even: add half of the last kept place, minus one bit if that place is even.
  const u32 bits = __float_as_uint(value);
  narrow.bits = value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
#endif
  return narrow;
}

template <class Element>
__device__ __forceinline__ Element one();

template <>
__device__ __forceinline__ float one() {
  return 1.f;
}
template <>
__device__ __forceinline__ Half one() {
  return {0x3c00};
}
template <>
__device__ __forceinline__ BFloat16 one() {
  return {0x3f80};
}

// Loads an element of a tensor that the kernel does not write.
__device__ __forceinline__ float load_read_only(const float* from) {
  return __ldg(from);
}
template <class Element>
__device__ __forceinline__ Element load_read_only(const Element* from) {
  return {__ldg(&from->bits)};
}

// As in common/common.cuh for float.
template <class Element>
__device__ __forceinline__ const Element* opaque(const Element* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}
template <class Element>
__device__ __forceinline__ const Element* add_bytes(const Element* pointer, i64 bytes) {
  return reinterpret_cast<const Element*>(reinterpret_cast<const char*>(pointer) + bytes);
}
template <class Element>
__device__ __forceinline__ Element* add_bytes(Element* pointer, i64 bytes) {
  return reinterpret_cast<Element*>(reinterpret_cast<char*>(pointer) + bytes);
}

// Four neighbouring elements, loaded and stored in one instruction.
template <class Element>
struct QuadOf {
  struct __align__(4 * sizeof(Element)) Type {
    Element x, y, z, w;
  };
};
template <>
struct QuadOf<float> {
  using Type = float4;
};
template <class Element>
using Quad = typename QuadOf<Element>::Type;

template <class Element>
__device__ __forceinline__ Quad<Element> load4(const Element* from) {
  return *reinterpret_cast<const Quad<Element>*>(from);
}
template <class Element>
__device__ __forceinline__ void store4(Element* to, Quad<Element> v) {
  *reinterpret_cast<Quad<Element>*>(to) = v;
}
template <class Element>
__device__ __forceinline__ float4 widened4(Quad<Element> v) {
  return make_float4(widened(v.x), widened(v.y), widened(v.z), widened(v.w));
}

// Stores four sums to neighbouring elements in global memory.
template <class Element>
__device__ __forceinline__ void store4_global(Element* to, float a, float b, float c, float d) {
  store4<Element>(to, {rounded<Element>(a), rounded<Element>(b), rounded<Element>(c), rounded<Element>(d)});
}

}  // namespace polyconv
