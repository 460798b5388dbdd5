// Direct kernels, for any geometry, image size and strides. Each computes one matrix product per group,
//   sums[m][n] = sum over k of a[k][m] * b[k][n]
//                      m                n                                k
//   forward            output channel   output pixel                     (input channel, tap)
//   input gradient     input channel    input pixel                      (output channel, tap)
//   weight gradient    output channel   (input channel, tap), and ones   output pixel of one slice
//
// A thread computes two columns of up to 32 sums. A step covers 8 k: b is read from global memory, a, which all threads
// need, from shared memory. If there are few columns, the k of a step are divided among the threads, too.
//
// One k: its offsets in both operands, and its shift relative to the position of a column.
struct Row {
  bool used;
  i64 a, b;
  int y, x;
};

// One column: address in b and position in the image, both before the shift; address in the result, and step per m.
struct Column {
  const float* b;
  int y, x;
  float* to;
  i64 step;
};

struct Product {
  static constexpr int kLanes = 128;  // threads along the columns

  const Call& c;
  const u32 plane;  // group, and phase or slice within it
  const u32 share;  // which part of a step

  __device__ float finished(u32, float sum) const { return sum; }
};

template <class P>
__global__ void __launch_bounds__(128, 3) direct(const Call c) {
  constexpr int kRows = P::kM < 32 ? (P::kM + 3) / 4 * 4 : 32, kTiles = (P::kM + kRows - 1) / kRows;  // in quads
  constexpr int kStep = 8 * 128 / P::kLanes;
  __shared__ __align__(16) float a[kStep][kRows + 4];
  __shared__ Row rows[kStep];
  const u32 columns = P::columns(c), tiles = (columns - 1) / (2 * P::kLanes) + 1, tile = blockIdx.x / kTiles;
  const u32 first_m = blockIdx.x % kTiles * kRows, n = tile % tiles * 2 * P::kLanes + threadIdx.x % P::kLanes;
  const P product{{c, tile / tiles, threadIdx.x / P::kLanes}};
  const Column column[2] = {product.column(min(n, columns - 1)), product.column(min(n + P::kLanes, columns - 1))};
  float sums[2][kRows] = {};
  for (u32 k = product.first; k < product.end; k += kStep) {
    const Row row = product.row(k + threadIdx.x % kStep);
    __syncthreads();
    if (threadIdx.x < kStep) rows[threadIdx.x] = row;
    for (int i = threadIdx.x / kStep; i < kRows; i += 128 / kStep)
      a[threadIdx.x % kStep][i] = row.used && first_m + i < P::kM ? product.a(row, first_m + i) : 0.f;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const Row at = rows[product.share * 8 + i];
      const float b[2] = {at.used ? product.b(at, column[0]) : 0.f, at.used ? product.b(at, column[1]) : 0.f};
#pragma unroll
      for (int j = 0; j < 2 * kRows; j++) sums[j % 2][j / 2] += a[product.share * 8 + i][j / 2] * b[j % 2];
    }
  }
#pragma unroll
  for (int j = 0; j < 2 * kRows; j++) {
    const u32 m = first_m + j / 2;
    if (m < P::kM && n + j % 2 * P::kLanes < columns && column[j % 2].to)
      column[j % 2].to[m * column[j % 2].step] = activated(product.finished(m, sums[j % 2][j / 2]), c.activates);
  }
}

template <class P>
static const char* launch_direct(const Call& c) {
  const i64 columns = P::columns(c), blocks = ceil_div(columns, 2 * P::kLanes) * ceil_div(P::kM, 32) * P::planes(c);
  if (max(max(columns, blocks), c.batch * c.out_height * c.out_width) > 0x7fffff00)
    return "the direct kernels count pixels and tiles with 31 bits: give a smaller batch";
  if (blocks > 0) direct<P><<<blocks, 128, 0, c.stream>>>(c);
  return failed("direct");
}

struct Forward : Product {
  static constexpr int kM = kGroupOutputs;
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
  return launch_direct<Forward>(c);
}

constexpr int common_divisor(int a, int b) {
  return b ? common_divisor(b, a % b) : a;
}

// Input pixels with equal residues modulo the stride form a phase: only every kStep-th tap contributes to it, and no
// other is multiplied.
constexpr int kPhasesH = kStrideH, kStepH = kPhasesH / common_divisor(kPhasesH, kDilationH);
constexpr int kPhasesW = kStrideW, kStepW = kPhasesW / common_divisor(kPhasesW, kDilationW);

// First tap that contributes to a coordinate of the padded image, or the number of taps if none does.
__device__ __forceinline__ int first_of_phase(int at, int phases, int taps, int dilation) {
  int tap = 0;
  while (tap < taps && (at - tap * dilation) % phases) tap++;
  return tap;
}

struct PhasedInputGradient : Product {
  static constexpr int kM = kGroupInputs;
  const int group = plane / (kPhasesH * kPhasesW), phase_y = plane / kPhasesW % kPhasesH, phase_x = plane % kPhasesW;
  const int tap_y = first_of_phase(phase_y + kPadTop, kPhasesH, kKernelH, kDilationH);
  const int tap_x = first_of_phase(phase_x + kPadLeft, kPhasesW, kKernelW, kDilationW);
  const int taps_h = (kKernelH - tap_y + kStepH - 1) / kStepH, taps_w = (kKernelW - tap_x + kStepW - 1) / kStepW;
  const u32 first = 0, end = kGroupOutputs * taps_h * taps_w;

  static __host__ __device__ i64 height(const Call& c) { return (c.height + kPhasesH - 1) / kPhasesH; }
  static __host__ __device__ i64 width(const Call& c) { return (c.width + kPhasesW - 1) / kPhasesW; }
  static __host__ __device__ i64 columns(const Call& c) { return c.batch * height(c) * width(c); }
  static i64 planes(const Call&) { return i64(kGroups) * kPhasesH * kPhasesW; }
  __device__ Row row(u32 k) const {
    const int3 tap = pixel_at(k, taps_h, taps_w);  // tap of the phase; z is the output channel
    const int y = tap.y * (kStepH * kDilationH / kPhasesH), x = tap.x * (kStepW * kDilationW / kPhasesW);
    const i64 channel = group * kGroupOutputs + tap.z;
    const i64 a = channel * kFilter + (tap_y + tap.y * kStepH) * kKernelW + tap_x + tap.x * kStepW;
    return {k < end, a, in_y(c, 0, channel, -y, -x), -y, -x};
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
    return u32(at.y + row.y) < c.out_height && u32(at.x + row.x) < c.out_width ? *from : 0.f;
  }
};

struct InputGradient : Product {
  static constexpr int kM = kGroupInputs;
  const u32 first = 0, end = kGroupOutputs * kKernelArea;

  static __host__ __device__ i64 columns(const Call& c) { return c.batch * c.height * c.width; }
  static i64 planes(const Call&) { return kGroups; }
  __device__ Row row(u32 k) const {
    const int3 tap = pixel_at(k, kKernelH, kKernelW);  // z is the output channel
    const int y = -tap.y * kDilationH, x = -tap.x * kDilationW;
    const i64 channel = plane * kGroupOutputs + tap.z;
    return {k < end, channel * kFilter + k % kKernelArea, in_y(c, 0, channel, y, x), y, x};
  }
  __device__ Column column(u32 n) const {
    const int3 p = pixel_at(n, c.height, c.width);
    const int y = p.y + kPadTop, x = p.x + kPadLeft;
    return {c.y + in_y(c, p.z, 0, y, x), y, x, c.x + in_x(c, p.z, plane * kGroupInputs, p.y, p.x), c.x_channel};
  }
  __device__ float a(Row row, u32 m) const { return c.w[row.a + i64(m) * kKernelArea]; }
  __device__ float b(Row row, Column at) const {
    if (kBorder == 0) return read_y(at.b + row.b, at.y + row.y, at.x + row.x);
    float sum = 0.f;
    for (Unfolded v{at.y - kPadTop, int(c.height), kPadTop, kPadBottom}; v.more(); v.next()) {
      for (Unfolded u{at.x - kPadLeft, int(c.width), kPadLeft, kPadRight}; u.more(); u.next()) {
        const int y = v.p + kPadTop, x = u.p + kPadLeft;
        sum += read_y(at.b + row.b + in_y(c, 0, 0, y - at.y, x - at.x), y + row.y, x + row.x);
      }
    }
    return sum;
  }
  // y at a position of the input; 0 where the taps skip it. `at` is its address if the strides are 1.
  __device__ float read_y(const float* at, int y, int x) const {
    const int v = y / kStrideH, u = x / kStrideW;
    if (y % kStrideH || x % kStrideW || u32(v) >= c.out_height || u32(u) >= c.out_width) return 0.f;
    return at[in_y(c, 0, 0, v - y, u - x)];
  }
};

static const char* direct_input_gradient(const Call& c) {
  return launch_direct<InputGradient>(c);
}

struct WeightGradient : Product {
  static constexpr int kM = kGroupOutputs, kLanes = kFilter < 128 && kSlice < 1 << 20 ? 8 : 128, kShares = 128 / kLanes;
  const u32 count = slices(c), group = plane / count, slice = plane % count;
  const u32 first = pixels(c) * slice / count, end = pixels(c) * (slice + 1) / count;

  static __host__ __device__ i64 pixels(const Call& c) { return c.batch * c.out_height * c.out_width; }
  static __host__ __device__ i64 columns(const Call& c) { return kFilter + (c.bias != nullptr); }
  static __host__ __device__ i64 slices(const Call& c) {
    const i64 wanted = max(pixels(c) / 16384 / kShares, 640 / (i64(kGroups) * (kM / 32 + 1) * (kFilter / 256 + 1)));
    return max(min(min(wanted, pixels(c) / 64), kWorkspace / 4 / kSlice / kShares), 1ll);
  }
  static i64 planes(const Call& c) { return kGroups * slices(c); }
  __device__ Row row(u32 k) const {
    const int3 p = pixel_at(k, c.out_height, c.out_width);
    const int y = p.y * kStrideH - kPadTop, x = p.x * kStrideW - kPadLeft;
    return {k < end, in_y(c, p.z, group * kGroupOutputs, p.y, p.x), in_x(c, p.z, group * kGroupInputs, y, x), y, x};
  }
  __device__ Column column(u32 n) const {
    const int y = n / kKernelW % kKernelH * kDilationH, x = n % kKernelW * kDilationW;
    const float* b = n == kFilter ? nullptr : c.x + in_x(c, 0, n / kKernelArea, y, x);
    float* to = c.workspace + (slice * kShares + share) * kSlice + i64(group) * kM * (kFilter + 1) + n;
    return {b, y, x, to, kFilter + 1};
  }
  __device__ float a(Row row, u32 m) const { return c.y[row.a + m * c.y_channel]; }
  __device__ float b(Row row, Column at) const {
    return at.b ? read_x(c, at.b + row.b, at.y + row.y, at.x + row.x) : 1.f;
  }
};

static const char* direct_weight_gradient(const Call& c) {
  const char* error = launch_direct<WeightGradient>(c);
  return error ? error : add_slices(c, WeightGradient::slices(c) * WeightGradient::kShares);
}
