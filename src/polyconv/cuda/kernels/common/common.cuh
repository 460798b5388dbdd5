// Shared by all kernels: index types, division by an invariant, the lattice of one axis, borders.
//
// Device headers include neither torch nor the standard library: NVRTC, nvcc and the emulator's toolchain read one
// text. Params structs are plain old data that the host fills (cuda/planner/kernel_params.py). Every generated source
// asserts the offsets of their fields and the constants that the host relies on (cuda/planner/codegen.py).
#pragma once

namespace polyconv {

using i64 = long long;
using u32 = unsigned int;

// Blocks per multiprocessor that a kernel's registers must allow. From sm_100 on, ptxas keeps more loads in flight and
// would spill at the occupancy that exactly fits the others: request a quarter less there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define POLYCONV_MIN_BLOCKS(blocks) ((blocks) - ((blocks) > 1) * ((blocks) + 3) / 4)
#else
#define POLYCONV_MIN_BLOCKS(blocks) (blocks)
#endif

// Quotient by a divisor known on the host: one high multiplication and one shift. For dividends below 2^31.
struct FastDivisor {
  u32 divisor;
  u32 multiplier;
  u32 shift;

  __device__ __forceinline__ u32 quotient(u32 dividend) const {
    return divisor == 1 ? dividend : __umulhi(dividend, multiplier) >> shift;
  }
};

// One residue class ("phase") of positions along one axis: a dense, unit-stride problem on a sub-lattice.
// Position i is written at     written_first + i * written_step,             0 <= i < count.
// Its tap j reads the source   read_first + i * read_step + j * tap_step,    0 <= j < taps,
// with the kernel's element    tap_first + j * tap_stride.
// fprop has one phase per axis, dgrad one per residue of the stride (derived in algebra/polyphase.py). All phases of an
// axis share tap_step, which is in the kernel's Params.
struct AxisPhase {
  int written_first, written_step;
  int read_first, read_step;
  int taps, tap_first, tap_stride;
  FastDivisor count;
};

// Phases per axis in one launch; larger strides take several launches.
constexpr int kMaxPhases = 8;

// Padding mode.
enum class Border : int { kZeros = 0, kReflect = 1, kReplicate = 2, kCircular = 3 };

// Coordinate inside the image whose value stands at `at`. One fold suffices for the pads that torch allows (reflect:
// less than the extent; circular: at most the extent).
__device__ __forceinline__ int fold_into(int at, int extent, Border border) {
  if (border == Border::kReflect) {
    at = at < 0 ? -at : at;
    return at >= extent ? 2 * (extent - 1) - at : at;
  }
  if (border == Border::kReplicate) return min(max(at, 0), extent - 1);
  if (border == Border::kCircular) {
    at = at < 0 ? at + extent : at;
    return at >= extent ? at - extent : at;
  }
  return at;
}

// Inverse of fold_into: image number `fold` of coordinate `at` outside of the extent. False if there is none. Fold 0 is
// the coordinate itself. Reflect and circular have one image before and one after; replicate has one image of the first
// coordinate per padded position before it, then one of the last per padded position after it.
__device__ __forceinline__ bool unfold(int at, int fold, int extent, int before, int after, Border border, int& image) {
  image = at;
  if (fold == 0) return true;
  if (border == Border::kReflect) {
    image = fold == 1 ? -at : 2 * (extent - 1) - at;
    return fold == 1 ? (at > 0 && at <= before) : (at < extent - 1 && image < extent + after);
  }
  if (border == Border::kCircular) {
    image = fold == 1 ? at - extent : at + extent;
    return fold == 1 ? image >= -before : image < extent + after;
  }
  image = fold <= before ? -fold : extent - 1 + (fold - before);
  return fold <= before ? at == 0 : at == extent - 1;
}

// Special registers, read again at each call. Values that an epilogue derives from them cannot be kept live across the
// main loop, where every register is an accumulator.
__device__ __forceinline__ u32 fresh_thread() {
  u32 v;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
  return v;
}
__device__ __forceinline__ u32 fresh_block_x() {
  u32 v;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(v));
  return v;
}
__device__ __forceinline__ u32 fresh_block_y() {
  u32 v;
  asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(v));
  return v;
}
__device__ __forceinline__ u32 fresh_block_z() {
  u32 v;
  asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(v));
  return v;
}

// Returns the pointer with its origin hidden from the compiler, which could otherwise turn a chain of additions back
// into multiples of the stride, computed on the FP32 pipe.
__device__ __forceinline__ const float* opaque(const float* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

__device__ __forceinline__ const float* add_bytes(const float* pointer, i64 bytes) {
  return reinterpret_cast<const float*>(reinterpret_cast<const char*>(pointer) + bytes);
}
__device__ __forceinline__ float* add_bytes(float* pointer, i64 bytes) {
  return reinterpret_cast<float*>(reinterpret_cast<char*>(pointer) + bytes);
}

__device__ __forceinline__ float4 load4(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}
__device__ __forceinline__ void store4(float* to, float4 v) {
  *reinterpret_cast<float4*>(to) = v;
}

// Stores four floats to global memory in one instruction. PTX, because the compiler prefers four scalar stores, with
// four times the memory transactions, to moving accumulators into neighbouring registers.
__device__ __forceinline__ void store4_global(float* to, float a, float b, float c, float d) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

}  // namespace polyconv
