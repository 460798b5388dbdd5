// Arguments of the three entry points, as Python passes them, and the message of a failed launch.

// Addresses, strides in elements, sizes; every field has 8 bytes.
struct Call {
  float *x, *w, *y, *bias;  // tensors or, in the place of those that are written, gradients; bias may be null
  float* workspace;
  i64 x_batch, x_channel, x_row, x_column;  // strides of x, or of its gradient
  i64 y_batch, y_channel, y_row, y_column;  // strides of y, or of its gradient (0 in an expanded tensor)
  i64 batch, height, width, out_height, out_width;
  cudaStream_t stream;
  i64 activates;  // whether the forward pass applies the activation
};

constexpr i64 kWorkspace = 64 << 20;  // bytes

// Message for a RuntimeError if the last launch failed, else null. CUDA's error is cleared, so it is reported once.
static const char* failed(const char* kernel) {
  static thread_local char message[256];
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return nullptr;
  snprintf(message, sizeof message, "%s could not be launched: %s", kernel, cudaGetErrorString(error));
  return message;
}

static i64 ceil_div(i64 a, i64 b) {
  return (a + b - 1) / b;
}
