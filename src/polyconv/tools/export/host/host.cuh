// Division by an invariant as one high multiplication and a shift.
static FastDivisor by(i64 divisor) {
  if (divisor <= 1) return {1, 0, 0};
  int power = 31;
  while (1ll << (power - 31) < divisor) power++;
  return {u32(divisor), u32(((1ull << power) + divisor - 1) / divisor), u32(power - 32)};
}

// Attribute of the current device.
static int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  cudaGetDevice(&device), cudaDeviceGetAttribute(&value, which, device);
  return value;
}

// Allow a kernel this much dynamic shared memory; false if a block of the current device cannot have it.
template <class Kernel>
static bool allow_shared(Kernel kernel, int bytes) {
  return bytes <= attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) &&
         cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess;
}

// Exchange x and y: an input gradient becomes the call of a forward convolution that reads y and writes x.
static Call exchanged(const Call& c) {
  return {c.y,          c.w,         c.x,       nullptr,     c.workspace, c.y_batch,  c.y_channel,
          c.y_row,      c.y_column,  c.x_batch, c.x_channel, c.x_row,     c.x_column, c.batch,
          c.out_height, c.out_width, c.height,  c.width,     c.stream};
}
