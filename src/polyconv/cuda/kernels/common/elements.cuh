// What tensors are made of: float, or one of the two formats of 16 bits; how these become floats, and are made of them.
//
// All sums are float. The product of two elements of 16 bits is exact there, and a result is rounded once, to nearest,
// where it is stored.
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
  // Half of the last place that stays is added, less a bit where that one is even: then ties go to the even one.
  const u32 bits = __float_as_uint(value);
  narrow.bits = value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
#endif
  return narrow;
}

// The number one.
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

// An element of a tensor that the kernel does not write to.
__device__ __forceinline__ float load_read_only(const float* from) {
  return __ldg(from);
}
template <class Element>
__device__ __forceinline__ Element load_read_only(const Element* from) {
  return {__ldg(&from->bits)};
}

// What common/common.cuh has for float.
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

// Four neighbours in memory, which come in one load and go in one store.
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

// Four sums to four neighbours in global memory.
template <class Element>
__device__ __forceinline__ void store4_global(Element* to, float a, float b, float c, float d) {
  store4<Element>(to, {rounded<Element>(a), rounded<Element>(b), rounded<Element>(c), rounded<Element>(d)});
}

}  // namespace polyconv
