// fprop and dgrad as one implicit GEMM:
//   written[pixel, n] = bias[n] + sum over rows k of  gathered[pixel, k] * packed[k, n]
//
// A row k of the reduction is a (tap, channel) pair; a pixel is a position of one phase of the lattice
// (common/common.cuh). fprop gathers x and writes y. dgrad gathers dy and writes dx, one phase per residue of the
// stride, so that no tap is multiplied by a structural zero. implicit_gemm/pack_weights.cuh packs the weights:
// packed[group][row][n].
//
// Grid: x = pixel tile * channel tiles + channel tile (neighbours share gathered pixels in L2), y = group, z = phase.
// Shared memory: a = 2 x 8 x M pixels, b = 2 x 8 x N channels. One barrier per 8 rows: while one buffer is multiplied,
// the next 8 rows go from global memory through registers into the other.
#pragma once

#include "common/epilogue.cuh"
#include "implicit_gemm/loaders.cuh"

namespace polyconv {

// A thread's offset in two consecutive buffers of equal size. Switches between them with a single XOR: a buffer index
// would be multiplied by the size in every step, on the FP32 pipe.
template <class Element, int kElements, bool kIsPowerOfTwo = (kElements & (kElements - 1)) == 0>
struct Flip {
  int bytes;

  __device__ __forceinline__ explicit Flip(int place) : bytes(place * int(sizeof(Element))) {}
  __device__ __forceinline__ void operator()() { bytes ^= kElements * int(sizeof(Element)); }
  __device__ __forceinline__ Element* in(Element* buffers) const { return add_bytes(buffers, bytes); }
};

// For buffers of other sizes, which no single bit of the offset tells apart.
template <class Element, int kElements>
struct Flip<Element, kElements, false> {
  int now, then;

  __device__ __forceinline__ explicit Flip(int place) : now(place), then(place + kElements) {}
  __device__ __forceinline__ void operator()() {
    const int before = now;
    now = then, then = before;
  }
  __device__ __forceinline__ Element* in(Element* buffers) const { return buffers + now; }
};

// Accumulates all rows of the block's phase, double-buffered.
template <class Tile, class Loader>
__device__ __forceinline__ void accumulate(Accumulators<Tile>& c, Loader& source, PackedLoader<Tile> packed, int rows,
                                           typename Tile::Element* a, typename Tile::Element* b) {
  if (rows == 0) return;
  const TilePlace<Tile> place(threadIdx.x);
  Flip<typename Tile::Element, Tile::kDepth * Tile::kPitchM> read_a(place.m), write_a(Loader::place());
  Flip<typename Tile::Element, Tile::kDepth * Tile::kPitchN> read_b(place.n), write_b(PackedLoader<Tile>::place());
  source.load(true);
  packed.load();
  source.store(write_a.in(a));
  packed.store(write_b.in(b));
  __syncthreads();
#pragma unroll 1
  for (int left = rows - Tile::kDepth; left >= 0; left -= Tile::kDepth) {
    source.advance();
    packed.advance();
    source.load(left > 0);  // the last step's load is not used: cheaper than a branch
    packed.load();
    c.template multiply_add<Tile::kPitchM, Tile::kPitchN>(read_a.in(a), read_b.in(b));
    read_a(), read_b(), write_a(), write_b();
    source.store(write_a.in(a));
    packed.store(write_b.in(b));
    __syncthreads();
  }
}

// dgrad of a border other than zeros: one sum over all rows for each image of a pixel in the padding.
template <class Tile>
__device__ __forceinline__ void accumulate_folds(Accumulators<Tile>& c, const ImplicitGemmParamsFor<Tile>& p,
                                                 const ImplicitGemmBlock<Tile>& block, typename Tile::Element* a,
                                                 typename Tile::Element* b) {
  const bool replicate = Border(p.border) == Border::kReplicate;
  const int folds_h = replicate ? 1 + p.pad_top + p.pad_bottom : 3;
  const int folds_w = replicate ? 1 + p.pad_left + p.pad_right : 3;
  RowLoader<Tile, Gather::kFolded> source(p, block);
#pragma unroll 1
  for (int fold_h = 0; fold_h < folds_h; fold_h++)
#pragma unroll 1
    for (int fold_w = 0; fold_w < folds_w; fold_w++)
      if (source.aim(fold_h, fold_w))  // its barrier also separates the folds' use of shared memory
        accumulate<Tile>(c, source, PackedLoader<Tile>(p, block), block.rows, a, b);
}

// Address of a flattened pixel in channel 0 of the group.
template <class Tile>
__device__ __forceinline__ typename Tile::Element* written_at(u32 index, const ImplicitGemmParamsFor<Tile>& p,
                                                              const ImplicitGemmBlock<Tile>& block) {
  const Pixel pixel(index, block.h, block.w);
  return p.written + block.group * p.outputs * p.written_channel + pixel.image * p.written_batch +
         i64(block.h.written_first + pixel.i * block.h.written_step) * p.written_row +
         i64(block.w.written_first + pixel.j * block.w.written_step) * p.written_column;
}

// Visitors of the sums of a tile, one or four at a time.
struct StoreSums {
  __device__ __forceinline__ void operator()(float* at, float a) const { *at = a; }
  __device__ __forceinline__ void operator()(float* at, float a, float b, float c, float d) const {
    store4_global(at, a, b, c, d);
  }
};

struct AddResidual {
  i64 bytes;  // from a sum's address to its residual

  __device__ __forceinline__ void operator()(const float* at, float& a) const { a += *add_bytes(at, bytes); }
  __device__ __forceinline__ void operator()(const float* at, float& a, float& b, float& c, float& d) const {
    const float4 v = load4(add_bytes(at, bytes));
    a += v.x, b += v.y, c += v.z, d += v.w;
  }
};

// Passes every sum of the tile that is written, with its address, to `visit`: four at a time along the dense axis.
template <class Tile, class Visit>
__device__ __forceinline__ void visit_written(Accumulators<Tile>& c, const ImplicitGemmParams& p,
                                              const ImplicitGemmBlock<Tile>& block, u32 first_pixel, int first_output,
                                              const Visit& visit) {
  if (p.written_vector == 1) {
    const i64 to_next_group = (Tile::kLanesN * 4 - 3) * p.written_channel;
#pragma unroll
    for (int i = 0; i < Tile::kThreadM; i += 4) {
      if (first_pixel + c.offset_m(i) >= block.pixels) continue;
      float* at = written_at(first_pixel + c.offset_m(i), p, block) + first_output * p.written_channel;
#pragma unroll
      for (int j = 0; j < Tile::kThreadN; j++) {
        if (first_output + c.offset_n(j) < p.outputs)
          visit(at, c.sum[i][j], c.sum[i + 1][j], c.sum[i + 2][j], c.sum[i + 3][j]);
        at += j % 4 == 3 ? to_next_group : p.written_channel;
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Tile::kThreadM; i++) {
    if (first_pixel + c.offset_m(i) >= block.pixels) continue;
    float* at = written_at(first_pixel + c.offset_m(i), p, block) + first_output * p.written_channel;
    if (p.written_vector == 2) {
#pragma unroll
      for (int j = 0; j < Tile::kThreadN; j += 4)
        if (first_output + c.offset_n(j) < p.outputs)
          visit(at + c.offset_n(j), c.sum[i][j], c.sum[i][j + 1], c.sum[i][j + 2], c.sum[i][j + 3]);
    } else {
#pragma unroll
      for (int j = 0; j < Tile::kThreadN; j++)
        if (first_output + c.offset_n(j) < p.outputs) visit(at + c.offset_n(j) * p.written_channel, c.sum[i][j]);
    }
  }
}

// Adds the bias, applies the epilogue if there is one, and writes the tile.
template <class Tile, class Params>
__device__ __forceinline__ void write(Accumulators<Tile>& c, const Params& p) {
  const ImplicitGemmBlock<Tile> block(p);
  const TilePlace<Tile> place(fresh_thread());
  const u32 first_pixel = block.first_pixel + place.m;
  const int first_output = block.first_output + place.n;
  if (p.bias) {
    const float* bias = p.bias + block.group * p.outputs + first_output;
#pragma unroll
    for (int j = 0; j < Tile::kThreadN; j++) {
      const float add = first_output + c.offset_n(j) < p.outputs ? bias[c.offset_n(j)] : 0.f;
#pragma unroll
      for (int i = 0; i < Tile::kThreadM; i++) c.sum[i][j] += add;
    }
  }
  if constexpr (EpilogueOf<Params>::kExists) {
    // Before the first store, so that the loads overlap.
    if (p.residual) visit_written(c, p, block, first_pixel, first_output, AddResidual{p.residual_bytes()});
#pragma unroll
    for (int i = 0; i < Tile::kThreadM; i++) activate(c.sum[i], p);
  }
  visit_written(c, p, block, first_pixel, first_output, StoreSums{});
}

template <class Tile, class Loader, class Params>
__device__ __forceinline__ void implicit_gemm(const Params& p) {
  __shared__ __align__(16) float a[2 * kDepth * Tile::kM];
  __shared__ __align__(16) float b[2 * kDepth * Tile::kN];
  const ImplicitGemmBlock<Tile> block(p);
  if (block.first_pixel >= block.pixels) return;  // phases differ in size; the grid is made for the largest

  Accumulators<Tile> c;
  Loader source(p, block);
  accumulate<Tile>(c, source, PackedLoader<Tile>(p, block), block.rows, a, b);
  write(c, p);
}

template <class Tile>
__device__ __forceinline__ void implicit_gemm_folded(const ImplicitGemmParams& p) {
  __shared__ __align__(16) float a[2 * kDepth * Tile::kM];
  __shared__ __align__(16) float b[2 * kDepth * Tile::kN];
  const ImplicitGemmBlock<Tile> block(p);
  if (block.first_pixel >= block.pixels) return;

  Accumulators<Tile> c;
  accumulate_folds<Tile>(c, p, block, a, b);
  write(c, p);
}

}  // namespace polyconv
