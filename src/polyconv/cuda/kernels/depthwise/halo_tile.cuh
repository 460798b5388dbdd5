// A tile of one image plane with its halo, copied from global to shared memory through registers, so that the next tile
// is in flight while the current one is used.
#pragma once

#include "common/elements.cuh"

namespace polyconv {

// Elements that one thread holds. Bounds the tiles that the planner may choose.
constexpr int kCarry = 12;

// Extent of the tile, and its row length in shared memory.
struct HaloShape {
  int height, pitch;
  FastDivisor width;

  __device__ __forceinline__ int elements() const { return height * pitch; }
};

// The plane that tiles are cut from.
struct Plane {
  int row, column;  // element strides
  int height, width;
  Border border;
};

template <int kThreads>
struct HaloTile {
  float carried[kCarry];

  // Outside the plane: zeros, or the border's values.
  template <class Element>
  __device__ __forceinline__ void load(const Element* from, const Plane& plane, const HaloShape& shape, int origin_y,
                                       int origin_x) {
#pragma unroll
    for (int e = 0; e < kCarry; e++) {
      const int index = threadIdx.x + e * kThreads, row = shape.width.quotient(index);
      int v = origin_y + row, u = origin_x + index - row * int(shape.width.divisor);
      if (plane.border != Border::kZeros) {
        // A coordinate that no tap reads may fold to one outside, and then reads zero.
        v = fold_into(v, plane.height, plane.border);
        u = fold_into(u, plane.width, plane.border);
      }
      const bool inside = row < shape.height && u32(v) < u32(plane.height) && u32(u) < u32(plane.width);
      carried[e] = inside ? widened(from[i64(v) * plane.row + i64(u) * plane.column]) : 0.f;
    }
  }

  __device__ __forceinline__ void store(float* to, const HaloShape& shape) const {
#pragma unroll
    for (int e = 0; e < kCarry; e++) {
      const int index = threadIdx.x + e * kThreads, row = shape.width.quotient(index);
      if (row < shape.height) to[row * shape.pitch + index - row * int(shape.width.divisor)] = carried[e];
    }
  }
};

}  // namespace polyconv
