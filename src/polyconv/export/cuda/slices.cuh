// A weight gradient is summed over slices of the pixels, which keep all multiprocessors busy and the sums short. Their
// results lie in the workspace as [slice][output channel][filter, bias], and are added in ascending order: the same
// call gives the same bits.
constexpr i64 kSlice = i64(kOutChannels) * (kFilter + 1);  // elements

__global__ void __launch_bounds__(128) sum_slices(const Call c, const int slices) {
  const i64 element = i64(blockIdx.x) * 128 + threadIdx.x, m = element / (kFilter + 1), n = element % (kFilter + 1);
  if (m >= kOutChannels || (n == kFilter && !c.bias)) return;
  float sum = 0.f;
  for (int slice = 0; slice < slices; slice++) sum += c.workspace[slice * kSlice + element];
  (n == kFilter ? c.bias[m] : c.w[m * kFilter + n]) = sum;
}

static const char* add_slices(const Call& c, int slices) {
  sum_slices<<<ceil_div(kSlice, 128), 128, 0, c.stream>>>(c, slices);
  return failed("sum_slices");
}
