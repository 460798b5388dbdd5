// Offsets of elements in the tensors, and the values of the border around an image.
constexpr int kGroupInputs = kInChannels / kGroups, kGroupOutputs = kOutChannels / kGroups;  // channels of one group
constexpr int kKernelArea = kKernelH * kKernelW, kFilter = kGroupInputs * kKernelArea;

__device__ __forceinline__ i64 in_x(const Call& c, i64 image, i64 channel, i64 y, i64 x) {
  return image * c.x_batch + channel * c.x_channel + y * c.x_row + x * c.x_column;
}

__device__ __forceinline__ i64 in_y(const Call& c, i64 image, i64 channel, i64 y, i64 x) {
  return image * c.y_batch + channel * c.y_channel + y * c.y_row + x * c.y_column;
}

// Column, row and image of a pixel.
__device__ __forceinline__ int3 pixel_at(u32 index, u32 height, u32 width) {
  return make_int3(index % width, index / width % height, index / width / height);
}

// Coordinate in the image that is copied to one in its border. Negative padding crops the image first.
__device__ __forceinline__ int folded(int at, int extent, int before, int after) {
  const int first = max(-before, 0), last = extent - 1 + min(after, 0);
  if (kBorder == 0 || (first <= at && at <= last)) return at;
  if (kBorder == 1) return 2 * (at < first ? first : last) - at;
  if (kBorder == 2) return at < first ? first : last;
  return at < first ? at + (last - first + 1) : at - (last - first + 1);
}

// x at a position in the image or its border; `at` is the address that the position would have.
__device__ __forceinline__ float read_x(const Call& c, const float* at, int y, int x) {
  if (kBorder == 0) return u32(y) < u32(c.height) && u32(x) < u32(c.width) ? *at : 0.f;
  const int v = folded(y, c.height, kPadTop, kPadBottom), u = folded(x, c.width, kPadLeft, kPadRight);
  return u32(v) < u32(c.height) && u32(u) < u32(c.width) ? at[in_x(c, 0, 0, v - y, u - x)] : 0.f;
}

// Iterates over the coordinates that fold to one: in the border before the image, itself, in the border after it.
struct Unfolded {
  const int at, extent, before, after;
  int p = kBorder && before > 0 ? -before : at;

  __device__ bool more() {
    while (kBorder && p < extent + after && folded(p, extent, before, after) != at) next();
    return kBorder ? p < extent + after : p == at;
  }
  __device__ void next() { p = p == -1 ? at : p == at ? extent : p + 1; }
};

// A weight gradient is computed in slices of the pixels, which fill the device and keep sums short. Their partial sums
// lie in the workspace as [slice][output channel][filter, bias], and are added in ascending order: the result is
// deterministic.
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
