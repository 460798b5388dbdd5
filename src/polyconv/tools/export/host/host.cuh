// Division by an invariant as one high multiplication and a shift.
static FastDivisor by(i64 divisor) {
  if (divisor <= 1) return {1, 0, 0};
  int power = 31;
  while (1ll << (power - 31) < divisor) power++;
  return {u32(divisor), u32(((1ull << power) + divisor - 1) / divisor), u32(power - 32)};
}

// Of the current device.
static int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  cudaGetDevice(&device), cudaDeviceGetAttribute(&value, which, device);
  return value;
}

// Whether a block of the current device may have so much shared memory; if so, the kernel may.
template <class Kernel>
static bool allow_shared(Kernel kernel, int bytes) {
  return bytes <= attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) &&
         cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess;
}

// The call of an input gradient as that of a forward convolution, which reads y and writes x; and back.
static Call exchanged(const Call& c) {
  return {c.y,          c.w,         c.x,       nullptr,     c.workspace, c.y_batch,  c.y_channel,
          c.y_row,      c.y_column,  c.x_batch, c.x_channel, c.x_row,     c.x_column, c.batch,
          c.out_height, c.out_width, c.height,  c.width,     c.stream};
}
