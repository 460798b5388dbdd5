// What Python hands to the three entry points, and how a launch that was refused is told.

// Addresses, strides in elements, sizes; every field has 8 bytes.
struct Call {
  float *x, *w, *y, *bias;  // tensors, or where their gradients go; bias: null if there is none, or if it is not wanted
  float* workspace;
  i64 x_batch, x_channel, x_row, x_column;  // strides of x, or of its gradient
  i64 y_batch, y_channel, y_row, y_column;  // strides of y, or of its gradient (0 in an expanded tensor)
  i64 batch, height, width, out_height, out_width;
  cudaStream_t stream;
};

constexpr i64 kWorkspace = 64 << 20;  // bytes

// After a launch: null, or the sentence for the RuntimeError. The error is cleared, so that it is told once.
static const char* failed(const char* kernel) {
  static thread_local char sentence[256];
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return nullptr;
  snprintf(sentence, sizeof sentence, "%s could not be launched: %s", kernel, cudaGetErrorString(error));
  return sentence;
}

static i64 ceil_div(i64 a, i64 b) {
  return (a + b - 1) / b;
}
