// Rows of every strip. Tall strips have few halo steps; short ones make more threads, up to three waves.
static int rows_per_strip(const Call& c, int blocks) {
  const i64 filled = 3ll * 128 * blocks * attribute(cudaDevAttrMultiProcessorCount);
  const i64 side_by_side = c.batch * kOutChannels * c.out_width;
  i64 best = 0, least = 0;
  for (i64 most = 64; most >= 4; most--) {
    const i64 strips = ceil_div(c.out_height, most), rows = ceil_div(c.out_height, strips);
    const i64 cost = (rows + (kKernelH + kStrideH - 1) / kStrideH - 1) * max(side_by_side * strips, filled);
    if (best == 0 || cost < least) best = rows, least = cost;
  }
  return int(best);
}

// Whether the strip kernels support the tensors: neighbouring threads take columns that must be adjacent in memory.
static bool takes_strips(const Call& c) {
  const i64 most = c.batch * kOutChannels * max(c.width, c.out_width) * (max(c.height, c.out_height) / 4 + 1);
  return c.x_column == 1 && c.y_column == 1 && 0 < most && most <= 0x7fffffff && max(c.x_row, c.y_row) <= 0x7fffffff;
}

// Correlates x with the taps and writes y.
template <int kTapsH, int kTapsW, int kStride, int kBlocks>
static const char* launch_strips(StripParams p) {
  p.rows_per_strip = rows_per_strip(p, kBlocks);
  p.row_strips = u32(ceil_div(p.out_height, p.rows_per_strip));
  p.strips = u32(p.batch * kOutChannels * p.row_strips * p.out_width);
  depthwise_strip<kTapsH, kTapsW, kStride, Lanes::kColumns><<<ceil_div(p.strips, 128), 128, 0, p.stream>>>(p);
  return failed("depthwise_strip");
}

template <int kTapsH, int kTapsW, int kStride, int kBlocks>
static const char* strip_forward(const Call& c) {
  StripParams p{c};
  p.first_row = -kPadTop, p.first_column = -kPadLeft, p.w_first = 0, p.w_row = kTapsW, p.w_column = 1;
  return takes_strips(c) ? launch_strips<kTapsH, kTapsW, kStride, kBlocks>(p) : direct_forward(c);
}

// The input gradient reads y, writes x and reverses the taps.
template <int kTapsH, int kTapsW, int kStride, int kBlocks>
static const char* strip_input_gradient(const Call& c) {
  StripParams p{exchanged(c)};
  p.first_row = kPadTop + 1 - kTapsH, p.first_column = kPadLeft + 1 - kTapsW;
  p.w_first = kTapsH * kTapsW - 1, p.w_row = -kTapsW, p.w_column = -1;
  return takes_strips(c) ? launch_strips<kTapsH, kTapsW, kStride, kBlocks>(p) : direct_input_gradient(c);
}

// Weight gradient in slices of the strips, as many as fill the device and fit the workspace, and the sum of the slices.
template <int kTapsH, int kTapsW, int kStride, int kBlocks>
static const char* strip_weight_gradient(const Call& c) {
  if (!takes_strips(c) || kOutChannels > 65535) return direct_weight_gradient(c);
  StripWgradParams g{c};
  g.rows_per_strip = rows_per_strip(c, kBlocks);
  g.row_strips = u32(ceil_div(c.out_height, g.rows_per_strip));
  g.strips = u32(c.batch * g.row_strips * c.out_width);
  const i64 wanted = ceil_div(32 * attribute(cudaDevAttrMultiProcessorCount), kOutChannels);
  const i64 most = max(1ll, min(wanted, kWorkspace / 4 / kSlice));
  g.strips_per_slice = u32(128 * ceil_div(ceil_div(g.strips, 128), most));
  const dim3 blocks(ceil_div(g.strips, g.strips_per_slice), kOutChannels);
  depthwise_strip_wgrad<kTapsH, kTapsW, kStride, Lanes::kColumns, 128><<<blocks, 128, 0, c.stream>>>(g);
  const char* error = failed("depthwise_strip_wgrad");
  return error ? error : add_slices(c, blocks.x);
}
