// A weight gradient is summed over slices of the pixels, which keep all multiprocessors busy and the sums short. Their
// results lie in the workspace as [slice][output channel][filter, bias], and are added in ascending order: the same
// call gives the same bits. Where the workspace holds no two slices there is one, written to where it belongs.
constexpr i64 kSlice = i64(kOutChannels) * (kFilter + 1);  // elements

__host__ __device__ inline i64 slice_count(const Call& c, i64 blocks_per_slice) {
  const i64 pixels = c.batch * c.out_height * c.out_width, wanted = max(pixels / 16384, 640 / blocks_per_slice);
  return max(min(min(wanted, pixels / 64), kWorkspace / 4 / kSlice), 1ll);
}

__device__ __forceinline__ u32 first_pixel(const Call& c, u32 slice, u32 slices) {
  const u32 pixels = c.batch * c.out_height * c.out_width;
  return min((pixels + slices - 1) / slices * slice, pixels);
}

// Column n of the filter of output channel m; behind the filter comes the bias.
__device__ __forceinline__ float* in_slice(const Call& c, i64 slice, i64 slices, i64 m, i64 n) {
  if (slices > 1) return c.workspace + slice * kSlice + m * (kFilter + 1) + n;
  return n == kFilter ? c.bias + m : c.w + m * kFilter + n;
}

__global__ void __launch_bounds__(128) sum_slices(const Call c, const int slices) {
  const i64 element = i64(blockIdx.x) * 128 + threadIdx.x, m = element / (kFilter + 1), n = element % (kFilter + 1);
  if (m >= kOutChannels || (n == kFilter && !c.bias)) return;
  float sum = 0.f;
  for (int slice = 0; slice < slices; slice++) sum += c.workspace[slice * kSlice + element];
  *in_slice(c, 0, 1, m, n) = sum;
}

static const char* add_slices(const Call& c, int slices) {
  sum_slices<<<(kSlice + 127) / 128, 128, 0, c.stream>>>(c, slices);
  return failed("sum_slices");
}
