// Direct kernels for groups of few channels, for any geometry, image size and strides. A thread computes one element of
// the output or of the input gradient, the next thread the next column; a block computes one slice of the weight
// gradient of one row of taps.
//
// Column, row and plane of the thread's element. A block of 256 threads stays within a plane; a thread without an
// element gets a row past the last one.
__device__ __forceinline__ int3 element_of_thread(i64 height, i64 width) {
  const u32 blocks = (height * width + 255) / 256, element = blockIdx.x % blocks * 256 + threadIdx.x;
  return make_int3(element % u32(width), element / u32(width), blockIdx.x / blocks);
}

static const char* launch_direct(void (*kernel)(Call), const Call& c, i64 planes, i64 elements) {
  const i64 blocks = planes * ceil_div(elements, 256);
  if (max(blocks, elements) > 0x7fffff00) return "the direct kernels count blocks with 31 bits: give a smaller batch";
  if (blocks > 0) kernel<<<blocks, 256, 0, c.stream>>>(c);
  return failed("direct");
}

__global__ void __launch_bounds__(256) direct_output(const Call c) {
  const int3 at = element_of_thread(c.out_height, c.out_width);
  const int image = at.z / kOutChannels, m = at.z % kOutChannels;
  const int top = at.y * kStrideH - kPadTop, left = at.x * kStrideW - kPadLeft;
  if (at.y >= c.out_height) return;
  float sum = c.bias ? c.bias[m] : 0.f;
  for (int k = 0; k < kGroupInputs; k++) {
    const float* from = c.x + in_x(c, image, m / kGroupOutputs * kGroupInputs + k, 0, 0);
    for (int tap = 0; tap < kKernelArea; tap++) {
      const int y = top + tap / kKernelW * kDilationH, x = left + tap % kKernelW * kDilationW;
      sum += c.w[i64(m) * kFilter + k * kKernelArea + tap] * read_x(c, from + in_x(c, 0, 0, y, x), y, x);
    }
  }
  c.y[in_y(c, image, m, at.y, at.x)] = activated(sum, c.activates);
}

static const char* direct_forward(const Call& c) {
  return launch_direct(direct_output, c, c.batch * kOutChannels, c.out_height * c.out_width);
}

// Gradient of one position of the input or of its border.
__device__ __forceinline__ float gradient_at(const Call& c, int image, int k, int v, int u) {
  float sum = 0.f;
  for (int tap = 0; tap < kKernelArea; tap++) {
    const int y = v + kPadTop - tap / kKernelW * kDilationH, x = u + kPadLeft - tap % kKernelW * kDilationW;
    if (y % kStrideH || u32(y / kStrideH) >= c.out_height || x % kStrideW || u32(x / kStrideW) >= c.out_width) continue;
    for (int m = k / kGroupInputs * kGroupOutputs; m < (k / kGroupInputs + 1) * kGroupOutputs; m++)
      sum += c.w[i64(m) * kFilter + k % kGroupInputs * kKernelArea + tap] *
             c.y[in_y(c, image, m, y / kStrideH, x / kStrideW)];
  }
  return sum;
}

__global__ void __launch_bounds__(256) direct_input(const Call c) {
  const int3 at = element_of_thread(c.height, c.width);
  const int image = at.z / kInChannels, k = at.z % kInChannels;
  if (at.y >= c.height) return;
  float sum = 0.f;
  if (kBorder == 0) {
    sum = gradient_at(c, image, k, at.y, at.x);
  } else {
    for (Unfolded v{at.y, int(c.height), kPadTop, kPadBottom}; v.more(); v.next())
      for (Unfolded u{at.x, int(c.width), kPadLeft, kPadRight}; u.more(); u.next())
        sum += gradient_at(c, image, k, v.p, u.p);
  }
  c.x[in_x(c, image, k, at.y, at.x)] = sum;
}

static const char* direct_input_gradient(const Call& c) {
  return launch_direct(direct_input, c, c.batch * kInChannels, c.height * c.width);
}

constexpr i64 kSliceBlocks = i64(kOutChannels) * kGroupInputs * kKernelH;

__global__ void __launch_bounds__(256) direct_weights(const Call c, const i64 slices) {
  __shared__ float sums[8][kKernelW + 1];
  const u32 row = blockIdx.x % kSliceBlocks, r = row % kKernelH;
  const u32 k = row / kKernelH % kGroupInputs, m = row / kKernelH / kGroupInputs;
  const i64 slice = blockIdx.x / kSliceBlocks, pixels = c.batch * c.out_height * c.out_width;
  const float* plane = c.x + in_x(c, 0, m / kGroupOutputs * kGroupInputs + k, 0, 0);
  float sum[kKernelW + 1] = {};  // the last one is the bias gradient
  for (i64 p = pixels * slice / slices + threadIdx.x; p < pixels * (slice + 1) / slices; p += 256) {
    const int3 at = pixel_at(p, c.out_height, c.out_width);
    const float gradient = c.y[in_y(c, at.z, m, at.y, at.x)];
    UNROLL for (int s = 0; s < kKernelW; s++) {
      const int y = at.y * kStrideH - kPadTop + r * kDilationH, x = at.x * kStrideW - kPadLeft + s * kDilationW;
      sum[s] += gradient * read_x(c, plane + in_x(c, at.z, 0, y, x), y, x);
    }
    sum[kKernelW] += gradient;
  }
  UNROLL for (int s = 0; s <= kKernelW; s++) {
    for (int lanes = 16; lanes; lanes /= 2) sum[s] += __shfl_xor_sync(~0u, sum[s], lanes);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32][s] = sum[s];
  }
  __syncthreads();
  for (u32 s = threadIdx.x; s < kKernelW + (c.bias && r + k == 0); s += 256) {
    float total = 0.f;
    for (int warp = 0; warp < 8; warp++) total += sums[warp][s];
    const i64 n = s < kKernelW ? k * kKernelArea + r * kKernelW + s : kFilter;
    c.workspace[slice * kSlice + m * (kFilter + 1) + n] = total;
  }
}

static const char* direct_weight_gradient(const Call& c) {
  const i64 pixels = c.batch * c.out_height * c.out_width, wanted = max(pixels / 16384, 640 / kSliceBlocks);
  const i64 slices = max(min(min(wanted, pixels / 64), kWorkspace / 4 / kSlice), 1ll);
  if (max(slices * kSliceBlocks, pixels) > 0x7fffff00)
    return "the direct kernels count pixels with 31 bits: give a smaller batch";
  direct_weights<<<slices * kSliceBlocks, 256, 0, c.stream>>>(c, slices);
  const char* error = failed("direct_weights");
  return error ? error : add_slices(c, slices);
}
