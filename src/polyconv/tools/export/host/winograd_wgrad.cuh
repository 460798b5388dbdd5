// Launches the three kernels of the weight gradient.
template <class H, class W, class Tile, int kInterleave, bool kClassed>
static const char* toom_weight_gradient(const Call& c) {
  const i64 tiles_h = ceil_div(c.out_height, kLatticesH * H::kM);
  const i64 tiles = ceil_div(c.out_width, kLatticesW * 4) * kInterleave;
  const i64 rows = c.batch * kLatticesH * tiles_h * (kLatticesW / kInterleave);
  const i64 most_stride = max(max(c.x_row * kReadStepH, c.x_column * kReadStepW), max(c.y_row, c.y_column));
  if (rows * ceil_div(tiles, kChunk) >= 0x7fffffff || most_stride >= 0x7fffffff ||
      c.batch * c.out_height * c.out_width > kMostPixels ||
      !allow_shared(winograd_wgrad<H, W, Tile, kClassed>, kWgradShared))
    return direct_weight_gradient(c);

  // Slices of the rows: enough to fill whole waves and to keep sums short, few enough for the workspace.
  const int sms = attribute(cudaDevAttrMultiProcessorCount);
  const i64 most = max(1ll, min(rows, kWorkspace / 4 / (Tile::kSplit * kWgradElements + kOutChannels)));
  i64 slices = 1;
  double least = 0;
  for (int count = 1; count <= 8; count++) {
    const i64 n = max(1ll, min(most, i64(count) * sms / kWgradBlocks));
    const i64 whole = kWgradBlocks * n / sms, rest = kWgradBlocks * n % sms;
    const double last = rest == 0 ? 0. : max(double(rest) / sms, whole ? .5 : 1.);
    const double cost = (whole + last) * ceil_div(rows, n);
    if (least == 0 || cost < least - 1e-6 || (cost < least + 1e-6 && n > slices)) slices = n, least = cost;
  }

  float* const bias_partial = c.bias ? c.workspace + kWgradElements * slices * Tile::kSplit : nullptr;
  WinogradWgradParams p{};
  p.x = c.x, p.dy = c.y, p.partial = c.workspace, p.bias_partial = bias_partial;
  p.x_batch = c.x_batch, p.x_channel = c.x_channel, p.dy_batch = c.y_batch, p.dy_channel = c.y_channel;
  p.x_row = int(c.x_row * kReadStepH), p.x_column = int(c.x_column * kReadStepW);
  p.dy_row = int(c.y_row), p.dy_column = int(c.y_column);
  p.x_next_row = 4 * kReadStepH * kLatticesH * c.x_row, p.dy_next_row = 4 * kLatticesH * c.y_row;
  p.x_next_channel = kWgradThreads / 8 * c.x_channel, p.dy_next_channel = kWgradThreads / 8 * c.y_channel;
  for (int i = 0; i < kClassesH; i++) {
    p.read_first_h[i] = kForwardH[i].read_first, p.x_first_h[i] = kForwardH[i].read_first * c.x_row;
    p.height = max(p.height, read_end(kForwardH[i], kReadStepH, kLatticesH, c.out_height, c.height));
  }
  for (int i = 0; i < kClassesW; i++) {
    p.read_first_w[i] = kForwardW[i].read_first, p.x_first_w[i] = kForwardW[i].read_first * c.x_column;
    p.width = max(p.width, read_end(kForwardW[i], kReadStepW, kLatticesW, c.out_width, c.width));
  }
  p.count_h = int(c.out_height), p.count_w = int(c.out_width);
  p.rows = int(rows), p.tiles = int(tiles), p.slices = int(slices), p.tiles_h = by(tiles_h);
  winograd_wgrad<H, W, Tile, kClassed><<<kWgradBlocks * slices, kWgradThreads, kWgradShared, c.stream>>>(p);
  if (const char* error = failed("winograd_wgrad")) return error;

  if (slices * Tile::kSplit > 1) {
    WinogradWgradSumParams s{};
    s.partial = c.workspace, s.slices = int(slices * Tile::kSplit);
    winograd_wgrad_sum<<<ceil_div(kWgradElements, 1024), 256, 0, c.stream>>>(s);
    if (const char* error = failed("winograd_wgrad_sum")) return error;
  }
  WinogradWgradOutputParams f{};
  f.partial = c.workspace, f.bias_partial = bias_partial, f.dw = c.w, f.db = c.bias;
  f.slices = int(slices);
  for (int i = 0; i < kClassesH; i++) {
    f.taps_h[i] = kForwardH[i].taps, f.tap_first_h[i] = kForwardH[i].tap_first;
  }
  for (int i = 0; i < kClassesW; i++) {
    f.taps_w[i] = kForwardW[i].taps, f.tap_first_w[i] = kForwardW[i].tap_first;
  }
  winograd_wgrad_output<H, W><<<ceil_div(kWgradPairs, 128), 128, 0, c.stream>>>(f);
  return failed("winograd_wgrad_output");
}
