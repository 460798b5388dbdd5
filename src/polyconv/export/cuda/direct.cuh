// The direct kernels take any geometry, image and strides, by index alone. Each is one product per group,
//   sums[m][n] = sum over k of a[k][m] * b[k][n]
//                      m                n                                k
//   forward            output channel   output pixel                     (input channel, tap)
//   input gradient     input channel    input pixel of one phase         (output channel, tap of the phase)
//   weight gradient    output channel   (input channel, tap), and ones   output pixel of one slice
//
// A block of 128 threads owns a tile of 64 x 128 sums (32 x 128 if there are no more than 32 rows), 8 x 8 per thread.
// Shared memory holds 8 k of both operands, twice: while one buffer is multiplied, the next 8 k travel through
// registers into the other. Its rows are padded by 4, so that neither stores nor float4 loads meet a bank conflict.

// Where a k lies: its offsets in both operands, and its shift against the position of a column.
struct Row {
  bool used;
  i64 a, b;
  int y, x;
};

// Where a column lies: in b and its image before the shift, and in the result, with the step from one m to the next.
struct Column {
  const float* b;
  int y, x;
  float* to;
  i64 step;
};

template <int kRows>
struct Product {
  static constexpr int kM = kRows, kTile = kM > 32 ? 64 : 32, kTiles = (kM + kTile - 1) / kTile;
  const Call& c;
  const u32 plane;  // a group, with a phase or slice of it

  __device__ float finished(u32, float sum) const { return sum; }
};

template <class P>
__global__ void __launch_bounds__(128, 3) direct(const Call c) {
  __shared__ __align__(16) float a[2][8][P::kTile + 4], b[2][8][128 + 4];
  const u32 columns = P::columns(c), tiles = (columns + 127) / 128, tile = blockIdx.x / P::kTiles;
  const u32 first_m = blockIdx.x % P::kTiles * P::kTile, first_n = tile % tiles * 128, thread = threadIdx.x;
  const P product{{c, tile / tiles}};

  // Neighbouring threads load neighbouring k of a, and neighbouring columns of b.
  Column column[4];
  UNROLL for (int j = 0; j < 4; j++) column[j] = product.column(min(first_n + thread % 32 + j * 32, columns - 1));
  float next_a[P::kTile / 16], next_b[8];
  const auto load = [&](u32 k) {
    const Row row = product.row(k + thread % 8);
    UNROLL for (int i = 0; i < P::kTile / 16; i++) {
      const u32 m = first_m + thread / 8 + i * 16;
      next_a[i] = row.used && m < P::kM ? product.a(row, m) : 0.f;
    }
    UNROLL for (int i = 0; i < 8; i++) {
      const Row row = product.row(k + thread / 32 + i / 4 * 4);
      next_b[i] = row.used ? product.b(row, column[i % 4]) : 0.f;
    }
  };
  const auto store = [&](int buffer) {
    UNROLL for (int i = 0; i < P::kTile / 16; i++) a[buffer][thread % 8][thread / 8 + i * 16] = next_a[i];
    UNROLL for (int i = 0; i < 8; i++) b[buffer][thread / 32 + i / 4 * 4][thread % 32 + i % 4 * 32] = next_b[i];
    __syncthreads();
  };

  // A thread's sums lie in groups of 4 x 4; the groups are half a tile apart.
  constexpr int kEach = P::kTile / 8;
  const u32 m = thread / 16 * 4, n = thread % 16 * 4;
  float sums[kEach][8] = {};
  load(product.first);
  store(0);
  for (u32 k = product.first, buffer = 0; k < product.end; k += 8, buffer ^= 1) {
    load(k + 8);  // zeros behind the end
    UNROLL for (int d = 0; d < 8; d++) {
      float4 u[kEach / 4], v[2];
      UNROLL for (int i = 0; i < kEach / 4; i++) u[i] = *reinterpret_cast<const float4*>(&a[buffer][d][m + i * 32]);
      UNROLL for (int j = 0; j < 2; j++) v[j] = *reinterpret_cast<const float4*>(&b[buffer][d][n + j * 64]);
      UNROLL for (int i = 0; i < kEach * 8; i++) sums[i / 8][i % 8] +=
          (&u[i / 32].x)[i / 8 % 4] * (&v[i % 8 / 4].x)[i % 4];
    }
    store(buffer ^ 1);
  }
  UNROLL for (int j = 0; j < 8; j++) {
    const u32 at = first_n + n + j / 4 * 64 + j % 4;
    const Column column = product.column(at);
    UNROLL for (int i = 0; i < kEach; i++) {
      const u32 row = first_m + m + i / 4 * 32 + i % 4;
      if (at < columns && row < P::kM && column.to) column.to[row * column.step] = product.finished(row, sums[i][j]);
    }
  }
}

template <class P>
static const char* launch_direct(const Call& c, const char* name) {
  const i64 columns = P::columns(c), blocks = (columns + 127) / 128 * P::kTiles * P::planes(c);
  if (columns == 0) return nullptr;
  if (max(max(columns, blocks), c.batch * c.out_height * c.out_width) > 0x7fffff00)
    return "the direct kernels count pixels and tiles with 31 bits: give a smaller batch";
  direct<P><<<blocks, 128, 0, c.stream>>>(c);
  return failed(name);
}

struct Forward : Product<kGroupOutputs> {
  const u32 first = 0, end = kFilter;

  static __host__ __device__ i64 columns(const Call& c) { return c.batch * c.out_height * c.out_width; }
  static i64 planes(const Call&) { return kGroups; }
  __device__ Row row(u32 k) const {
    const u32 channel = plane * kGroupInputs + k / kKernelArea;
    const u32 y = k / kKernelW % kKernelH * kDilationH, x = k % kKernelW * kDilationW;
    return {k < end, i64(plane) * kGroupOutputs * kFilter + k, in_x(c, 0, channel, y, x), int(y), int(x)};
  }
  __device__ Column column(u32 n) const {
    const int3 p = pixel_at(n, c.out_height, c.out_width);
    const int y = p.y * kStrideH - kPadTop, x = p.x * kStrideW - kPadLeft;
    return {c.x + in_x(c, p.z, 0, y, x), y, x, c.y + in_y(c, p.z, plane * kGroupOutputs, p.y, p.x), c.y_channel};
  }
  __device__ float a(Row row, u32 m) const { return c.w[row.a + i64(m) * kFilter]; }
  __device__ float b(Row row, Column at) const { return read_x(c, at.b + row.b, at.y + row.y, at.x + row.x); }
  __device__ float finished(u32 m, float sum) const { return c.bias ? sum + c.bias[plane * kGroupOutputs + m] : sum; }
};

static const char* direct_forward(const Call& c) {
  return launch_direct<Forward>(c, "direct_forward");
}

constexpr int common_divisor(int a, int b) {
  return b ? common_divisor(b, a % b) : a;
}

// Input pixels with the same rest modulo the stride are a phase: only every kStep-th tap reaches them, and no other is
// multiplied. A border mixes the phases: then there is one, and whether a tap reaches a pixel is looked at in b.
constexpr int kPhasesH = kBorder ? 1 : kStrideH, kStepH = kPhasesH / common_divisor(kPhasesH, kDilationH);
constexpr int kPhasesW = kBorder ? 1 : kStrideW, kStepW = kPhasesW / common_divisor(kPhasesW, kDilationW);
constexpr int kPhaseTapsH = (kKernelH + kStepH - 1) / kStepH, kPhaseTapsW = (kKernelW + kStepW - 1) / kStepW;

// The first tap that reaches a coordinate of the padded image, or a number that no tap has.
__device__ __forceinline__ int first_tap(int at, int phases, int taps, int dilation) {
  int tap = 0;
  while (tap < taps && (at - tap * dilation) % phases) tap++;
  return tap;
}

struct InputGradient : Product<kGroupInputs> {
  const int group = plane / (kPhasesH * kPhasesW), phase_y = plane / kPhasesW % kPhasesH, phase_x = plane % kPhasesW;
  const int tap_y = first_tap(phase_y + kPadTop, kPhasesH, kKernelH, kDilationH);
  const int tap_x = first_tap(phase_x + kPadLeft, kPhasesW, kKernelW, kDilationW);
  const u32 first = 0, end = kGroupOutputs * kPhaseTapsH * kPhaseTapsW;

  static __host__ __device__ i64 height(const Call& c) { return (c.height + kPhasesH - 1) / kPhasesH; }
  static __host__ __device__ i64 width(const Call& c) { return (c.width + kPhasesW - 1) / kPhasesW; }
  static __host__ __device__ i64 columns(const Call& c) { return c.batch * height(c) * width(c); }
  static i64 planes(const Call&) { return i64(kGroups) * kPhasesH * kPhasesW; }
  __device__ Row row(u32 k) const {
    const u32 channel = group * kGroupOutputs + k / (kPhaseTapsH * kPhaseTapsW);
    const u32 i = k / kPhaseTapsW % kPhaseTapsH, j = k % kPhaseTapsW;
    const u32 r = tap_y + i * kStepH, y = i * (kStepH * kDilationH / kPhasesH);
    const u32 s = tap_x + j * kStepW, x = j * (kStepW * kDilationW / kPhasesW);
    const i64 a = i64(channel) * kFilter + r * kKernelW + s, b = in_y(c, 0, channel, 0, 0) - in_y(c, 0, 0, y, x);
    return {k < end && r < kKernelH && s < kKernelW, a, b, -int(y), -int(x)};
  }
  __device__ Column column(u32 n) const {
    const int3 p = pixel_at(n, height(c), width(c));
    const int v = p.y * kPhasesH + phase_y, y = (v + kPadTop - tap_y * kDilationH) / kPhasesH;
    const int u = p.x * kPhasesW + phase_x, x = (u + kPadLeft - tap_x * kDilationW) / kPhasesW;
    float* to = v < c.height && u < c.width ? c.x + in_x(c, p.z, group * kGroupInputs, v, u) : nullptr;
    return {c.y + in_y(c, p.z, 0, y, x), y, x, to, c.x_channel};
  }
  __device__ float a(Row row, u32 m) const { return c.w[row.a + i64(m) * kKernelArea]; }
  __device__ float b(Row row, Column at) const {
    const float* from = at.b + row.b;
    if (!kBorder) return u32(at.y + row.y) < c.out_height && u32(at.x + row.x) < c.out_width ? *from : 0.f;
    float sum = 0.f;
    for (Unfolded v{at.y - kPadTop, int(c.height), kPadTop, kPadBottom}; v.more(); v.next()) {
      const int y = v.p + kPadTop + row.y;
      if (y % kStrideH || u32(y / kStrideH) >= c.out_height) continue;
      for (Unfolded u{at.x - kPadLeft, int(c.width), kPadLeft, kPadRight}; u.more(); u.next()) {
        const int x = u.p + kPadLeft + row.x;
        if (x % kStrideW || u32(x / kStrideW) >= c.out_width) continue;
        sum += from[in_y(c, 0, 0, y / kStrideH - at.y - row.y, x / kStrideW - at.x - row.x)];
      }
    }
    return sum;
  }
};

static const char* direct_input_gradient(const Call& c) {
  return launch_direct<InputGradient>(c, "direct_input_gradient");
}

struct WeightGradient : Product<kGroupOutputs> {
  const u32 count = slices(c), group = plane / count, slice = plane % count;
  const u32 first = first_pixel(c, slice, count), end = first_pixel(c, slice + 1, count);

  static __host__ __device__ i64 columns(const Call& c) { return kFilter + (c.bias != nullptr); }
  static __host__ __device__ i64 slices(const Call& c) {
    return slice_count(c, kGroups * kTiles * (kFilter / 128 + 1));
  }
  static i64 planes(const Call& c) { return kGroups * slices(c); }
  __device__ Row row(u32 k) const {
    const int3 p = pixel_at(k, c.out_height, c.out_width);
    const int y = p.y * kStrideH - kPadTop, x = p.x * kStrideW - kPadLeft;
    return {k < end, in_y(c, p.z, group * kGroupOutputs, p.y, p.x), in_x(c, p.z, group * kGroupInputs, y, x), y, x};
  }
  __device__ Column column(u32 n) const {
    const int y = n / kKernelW % kKernelH * kDilationH, x = n % kKernelW * kDilationW;
    float* to = in_slice(c, slice, count, group * kGroupOutputs, n);
    const float* b = n == kFilter ? nullptr : c.x + in_x(c, 0, n / kKernelArea, y, x);
    return {b, y, x, to, in_slice(c, slice, count, group * kGroupOutputs + 1, n) - to};
  }
  __device__ float a(Row row, u32 m) const { return c.y[row.a + m * c.y_channel]; }
  __device__ float b(Row row, Column at) const {
    return at.b ? read_x(c, at.b + row.b, at.y + row.y, at.x + row.x) : 1.f;
  }
};

static const char* direct_weight_gradient(const Call& c) {
  const char* error = launch_direct<WeightGradient>(c, "direct_weight_gradient");
  const i64 slices = WeightGradient::slices(c);
  return error || slices == 1 ? error : add_slices(c, slices);
}
