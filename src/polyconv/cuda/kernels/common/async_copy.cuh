// Asynchronous copies of 16 bytes from global to shared memory (cp.async, from sm_80 on), matrices of 16 bits from
// shared memory by address, and chunks of eight elements.
#pragma once

#include "common/elements.cuh"

namespace polyconv {

// Eight neighbouring 16-bit elements, loaded and stored in one instruction.
template <class Element>
struct __align__(16) Chunk {
  Element value[8];
};

template <class Element>
__device__ __forceinline__ Chunk<Element> load_chunk(const Element* from) {
  return *reinterpret_cast<const Chunk<Element>*>(from);
}
template <class Element>
__device__ __forceinline__ void store_chunk(Element* to, const Chunk<Element>& chunk) {
  *reinterpret_cast<Chunk<Element>*>(to) = chunk;
}

// Starts a copy to an address in shared memory. Passes by the L1.
__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Writes zeros unless `really`; `from` is not read then.
__device__ __forceinline__ void copy16_or_zeros(u32 to, const void* from, bool really) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(really ? 16 : 0) : "memory");
}

// Stores a chunk with one first element, and zeros behind it, to an address in shared memory.
template <class Element>
__device__ __forceinline__ void store_shared_chunk(u32 to, Element first) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %2, %2};" ::"r"(to), "r"(u32(first.bits)), "r"(0) : "memory");
}

// Closes the group of the copies started since the last call.
__device__ __forceinline__ void close_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but the kOpen newest groups of this thread have arrived.
template <int kOpen>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kOpen) : "memory");
}

// Loads four 8 x 8 matrices of 16 bits. Lane l passes the address of row l % 8 of matrix l / 8.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices_at(u32 (&to)[4], u32 row) {
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

}  // namespace polyconv
