static i64 ceil_div(i64 a, i64 b) {
  return (a + b - 1) / b;
}

// Division by an invariant as one high multiplication and a shift.
static FastDivisor by(i64 divisor) {
  if (divisor <= 1) return {1, 0, 0};
  int power = 31;
  while (1ll << (power - 31) < divisor) power++;
  return {u32(divisor), u32(((1ull << power) + divisor - 1) / divisor), u32(power - 32)};
}

static int attribute(cudaDeviceAttr which, i64 device) {
  int value = 0;
  cudaDeviceGetAttribute(&value, which, int(device));
  return value;
}

// Whether a block of the device may have so much shared memory; if so, the kernel may.
template <class Kernel>
static bool allow_shared(Kernel kernel, int bytes, i64 device) {
  return bytes <= attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) &&
         cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess;
}
