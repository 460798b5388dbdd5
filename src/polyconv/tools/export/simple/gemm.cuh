using i64 = long long;
constexpr int kIn = kInChannels / kGroups, kOut = kOutChannels / kGroups;  // channels of a group
constexpr int kTaps = kKernelH * kKernelW, kFilter = kIn * kTaps;          // weights of an output channel
constexpr int kThreads = 128, kN = 128, kK = 8;  // of a block: threads, columns of its tile, terms between barriers

struct Pixel {
  int image, row, column;
};

// Float32 images where they lie in memory. Strides are in elements, all 0 in the gradient of y.sum().
struct Images {
  float* data;
  i64 image_stride, channel_stride;
  int row_stride, column_stride, batch, height, width;

  __host__ __device__ i64 pixels() const { return i64(batch) * height * width; }
  __device__ Pixel pixel(i64 index) const {
    const int area = height * width, place = int(index % area);
    return {int(index / area), place / width, place % width};
  }
  __device__ bool contains(int row, int column) const {
    return unsigned(row) < unsigned(height) && unsigned(column) < unsigned(width);
  }
  __device__ float& at(int image, int channel, int row, int column) const {
    return data[image * image_stride + channel * channel_stride + i64(row) * row_stride + i64(column) * column_stride];
  }
  // The element that a tap of the kernel meets at an output pixel; 0 in the padding, which is nowhere in memory.
  __device__ float under_tap(int channel, int tap, Pixel output) const {
    const int row = output.row * kStrideH - kPadTop + tap / kKernelW * kDilationH;
    const int column = output.column * kStrideW - kPadLeft + tap % kKernelW * kDilationW;
    return contains(row, column) ? at(output.image, channel, row, column) : 0.f;
  }
};

// Three jobs for the kernel below. Each says what the matrices of its product are, and where the sums go. `pixel` is
// that of column n or, if kPixelsAreTerms, of term k: neighbouring threads read neighbouring pixels.
struct Forward {
  static constexpr int kRows = kOut;
  static constexpr bool kPixelsAreTerms = false;
  Images x, y;
  const float *w, *bias;  // bias may be null

  __host__ __device__ i64 columns() const { return y.pixels(); }
  __device__ int terms(int) const { return kFilter; }
  __device__ Pixel pixel(int, i64 n, int) const { return y.pixel(n); }
  __device__ float a(int group, int m, int k, Pixel) const { return w[i64(group * kOut + m) * kFilter + k]; }
  __device__ float b(int group, int k, i64, Pixel pixel) const {
    return x.under_tap(group * kIn + k / kTaps, k % kTaps, pixel);
  }
  __device__ void store(int group, int, int m, i64, Pixel pixel, float sum) const {
    const int channel = group * kOut + m;
    y.at(pixel.image, channel, pixel.row, pixel.column) = bias ? sum + bias[channel] : sum;
  }
};

struct InputGradient {
  static constexpr int kRows = kIn;
  static constexpr bool kPixelsAreTerms = false;
  Images dx, dy;
  const float* w;

  __host__ __device__ i64 columns() const { return dx.pixels(); }
  __device__ int terms(int) const { return kOut * kTaps; }
  __device__ Pixel pixel(int, i64 n, int) const { return dx.pixel(n); }
  __device__ float a(int group, int m, int k, Pixel) const {
    return w[i64(group * kOut + k / kTaps) * kFilter + m * kTaps + k % kTaps];
  }
  // The output pixel at which this tap met the input pixel. With strides, most taps met it at none.
  __device__ float b(int group, int k, i64, Pixel pixel) const {
    const int tap = k % kTaps, row = pixel.row + kPadTop - tap / kKernelW * kDilationH;
    const int column = pixel.column + kPadLeft - tap % kKernelW * kDilationW;
    if (row < 0 || column < 0 || row % kStrideH != 0 || column % kStrideW != 0) return 0.f;
    if (!dy.contains(row / kStrideH, column / kStrideW)) return 0.f;
    return dy.at(pixel.image, group * kOut + k / kTaps, row / kStrideH, column / kStrideW);
  }
  __device__ void store(int group, int, int m, i64, Pixel pixel, float sum) const {
    dx.at(pixel.image, group * kIn + m, pixel.row, pixel.column) = sum;
  }
};

// The output pixels are cut into slices, or there would be too few blocks for a GPU. The caller adds the slices.
struct WeightGradient {
  static constexpr int kRows = kOut;
  static constexpr bool kPixelsAreTerms = true;
  Images x, dy;
  float* slices;  // [slice][weight]
  int slice_pixels;

  __host__ __device__ i64 columns() const { return kFilter; }
  __device__ int terms(int slice) const {
    return int(min(i64(slice_pixels), dy.pixels() - i64(slice) * slice_pixels));  // none may be left for the last slice
  }
  __device__ Pixel pixel(int slice, i64, int k) const { return dy.pixel(i64(slice) * slice_pixels + k); }
  __device__ float a(int group, int m, int, Pixel pixel) const {
    return dy.at(pixel.image, group * kOut + m, pixel.row, pixel.column);
  }
  __device__ float b(int group, int, i64 n, Pixel pixel) const {
    return x.under_tap(group * kIn + int(n) / kTaps, int(n) % kTaps, pixel);
  }
  __device__ void store(int group, int slice, int m, i64 n, Pixel, float sum) const {
    slices[(i64(slice) * kOutChannels + group * kOut + m) * kFilter + n] = sum;
  }
};

template <class Job>
constexpr int kM = Job::kRows > 32   ? 64
                   : Job::kRows > 16 ? 32
                                     : 16;  // rows of a block's tile

template <int size>
struct __align__(size < 4 ? 8 : 16) Floats {  // one read of shared memory, or two
  float of[size];
};

// A tile of a group's product per block: kOwn x 8 sums in each thread's registers. While kK terms in shared memory are
// multiplied, the next ones are on their way. Grid: x = tile of rows, then of columns; y = group; z = slice.
template <class Job>
__global__ void __launch_bounds__(kThreads, 3) gemm(const Job job) {
  constexpr int kOwn = kM<Job> / 8, kStep = kThreads / kK, kLoadsA = kM<Job> / kStep, kLoadsB = kN / kStep;
  __shared__ __align__(16) float a[kK][kM<Job> + 4], b[kK][kN + 4];  // with 4 more, stores along k meet all banks
  const int thread = threadIdx.x, group = blockIdx.y, slice = blockIdx.z;
  constexpr int kTilesM = (Job::kRows - 1) / kM<Job> + 1;
  const int first_m = blockIdx.x % kTilesM * kM<Job>, terms = job.terms(slice);
  const i64 first_n = i64(blockIdx.x / kTilesM) * kN;
  const int columns = int(min(i64(kN), job.columns() - first_n));
  const int own_k = thread % kK, own_line = thread / kK;          // of what it loads, where neighbours lie along k
  const int own_m = thread / 16 * kOwn, own_n = thread % 16 * 4;  // of its sums: columns own_n to + 3, and kN / 2 on
  const Pixel own_pixel = job.pixel(slice, first_n + thread, 0);
  float next_a[kLoadsA], next_b[kLoadsB], sums[kOwn][8] = {};

  const auto load = [&](int first_k) {
    const Pixel pixel = Job::kPixelsAreTerms ? job.pixel(slice, 0, first_k + own_k) : own_pixel;
#pragma unroll
    for (int i = 0; i < kLoadsA; i++) {
      const int k = first_k + own_k, m = first_m + own_line + i * kStep;
      next_a[i] = k < terms && m < Job::kRows ? job.a(group, m, k, pixel) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kLoadsB; i++) {
      const int k = first_k + (Job::kPixelsAreTerms ? own_k : i);
      const int n = Job::kPixelsAreTerms ? own_line + i * kStep : thread;
      next_b[i] = k < terms && n < columns ? job.b(group, k, first_n + n, pixel) : 0.f;
    }
  };

  load(0);
  for (int k = 0; k < terms; k += kK) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kLoadsA; i++) a[own_k][own_line + i * kStep] = next_a[i];
#pragma unroll
    for (int i = 0; i < kLoadsB; i++)
      (Job::kPixelsAreTerms ? b[own_k][own_line + i * kStep] : b[i][thread]) = next_b[i];
    __syncthreads();
    if (k + kK < terms) load(k + kK);
#pragma unroll
    for (int i = 0; i < kK; i++) {
      const auto row = *reinterpret_cast<const Floats<kOwn>*>(&a[i][own_m]);
      const auto left = *reinterpret_cast<const Floats<4>*>(&b[i][own_n]);
      const auto right = *reinterpret_cast<const Floats<4>*>(&b[i][own_n + kN / 2]);
#pragma unroll
      for (int j = 0; j < kOwn * 8; j++) sums[j / 8][j % 8] += row.of[j / 8] * (j & 4 ? right : left).of[j % 4];
    }
  }

#pragma unroll
  for (int j = 0; j < 8; j++) {
    const int n = own_n + j % 4 + j / 4 * (kN / 2);
    if (n >= columns) continue;
    const Pixel pixel = job.pixel(slice, first_n + n, 0);
#pragma unroll
    for (int i = 0; i < kOwn; i++) {
      const int m = first_m + own_m + i;
      if (m < Job::kRows) job.store(group, slice, m, first_n + n, pixel, sums[i][j]);
    }
  }
}
