static Images images(const torch::Tensor& t) {
  const i64 largest = std::max({t.size(2) * t.size(3), t.stride(2), t.stride(3)});
  TORCH_CHECK(largest < 0x7fffff00, "images of 2^31 pixels or more, or with such strides, are not supported");
  return {t.data_ptr<float>(), t.stride(0),    t.stride(1),    int(t.stride(2)),
          int(t.stride(3)),    int(t.size(0)), int(t.size(2)), int(t.size(3))};
}

template <class Job>
static void launch(const char* name, const torch::Tensor& x, const Job& job, unsigned slices) {
  const i64 tiles = (job.columns() + kN - 1) / kN * ((Job::kRows - 1) / kM<Job> + 1);
  if (tiles == 0) return;  // an empty batch
  const c10::cuda::CUDAGuard guard(x.device());
  gemm<<<dim3(tiles, kGroups, slices), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(job);
  const cudaError_t error = cudaGetLastError();
  TORCH_CHECK(error == cudaSuccess, name, " could not be launched: ", cudaGetErrorString(error));
}

torch::Tensor forward(torch::Tensor x, torch::Tensor w, torch::Tensor bias, int64_t height, int64_t width) {
  const torch::Tensor y = torch::empty({x.size(0), kOutChannels, height, width}, x.options());
  const float* added = bias.numel() ? bias.data_ptr<float>() : nullptr;
  launch("forward", x, Forward{images(x), images(y), w.data_ptr<float>(), added}, 1);
  return y;
}

torch::Tensor input_gradient(torch::Tensor dy, torch::Tensor w, torch::Tensor x) {
  const torch::Tensor dx = torch::empty_like(x);
  launch("input_gradient", x, InputGradient{images(dx), images(dy), w.data_ptr<float>()}, 1);
  return dx;
}

torch::Tensor weight_gradient(torch::Tensor x, torch::Tensor dy) {
  WeightGradient job{images(x), images(dy)};
  const i64 pixels = job.dy.pixels(), fit = (1 << 24) / (i64(kOutChannels) * kFilter);  // into 64 MiB
  const i64 count = std::max<i64>((pixels >> 30) + 1, std::min<i64>({pixels / 2048, fit, 65535}));
  job.slice_pixels = int((pixels + count - 1) / count);
  const torch::Tensor slices = torch::empty({count, kOutChannels, kIn, kKernelH, kKernelW}, x.options());
  job.slices = slices.data_ptr<float>();
  launch("weight_gradient", x, job, count);
  return count == 1 ? slices[0] : slices.sum(0);  // in a fixed order
}
