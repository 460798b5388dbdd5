// Launches the filter transform and the fused kernel.
template <class Tile, class H, class W, int kLanesPoint, int kEach, int kLanesK, int kThreadK, int kChunk, int kBlocks,
          int kShared>
static const char* fused_correlation(const Call& c, const Direction& d, void (*kernel)(FusedParams), const char* name) {
  const i64 tiles_h = ceil_div(ceil_div(c.out_height, kLatticesH), Tile::kRows) * kLatticesH;
  const i64 tiles_w = ceil_div(ceil_div(c.out_width, kLatticesW), Tile::kColumns) * kLatticesW;
  const i64 positions = c.batch * tiles_h * tiles_w, k_tiles = ceil_div(d.outputs, Tile::kK);
  const i64 channels = ceil_div(d.channels, kChunk) * kChunk;
  const i64 floats = (kGroups * k_tiles * channels + 1) * Tile::kK * Tile::kPoints;
  const i64 reach = (Tile::kRows + H::kLongest) * kReadStepH * kLatticesH * c.x_row +
                    (Tile::kColumns + W::kLongest + 3) * kReadStepW * kLatticesW * c.x_column;
  if (positions == 0 || positions * k_tiles >= 0x7fffffff || reach >= 0x7fffffff || 4 * floats > kWorkspace ||
      !allow_shared(kernel, kShared))
    return d.direct(c);

  const bool is_forward = d.direct == direct_forward;
  FusedFilterParams t{};
  t.w = c.w, t.transformed = c.workspace;
  t.w_output = is_forward ? kFilter : kKernelArea, t.w_channel = is_forward ? kKernelArea : kFilter;
  t.channels = d.channels, t.outputs = d.outputs;
  t.h = {d.classes_h->taps, d.classes_h->tap_first, d.classes_h->tap_stride};
  t.w_taps = {d.classes_w->taps, d.classes_w->tap_first, d.classes_w->tap_stride};
  winograd_fused_filter<H, W, kLanesPoint, kEach, kLanesK, kThreadK>
      <<<dim3(k_tiles, channels, kGroups), Tile::kK, 0, c.stream>>>(t);
  if (const char* error = failed("winograd_fused_filter")) return error;

  // Tiles of written channels per block: as many as still leave enough blocks to fill the device.
  const i64 wanted = 4ll * kBlocks * attribute(cudaDevAttrMultiProcessorCount);
  const i64 each = ceil_div(k_tiles, min(k_tiles, ceil_div(wanted, positions * kGroups)));
  const i64 splits = ceil_div(k_tiles, each);
  FusedParams p{};
  p.source = c.x, p.weights = c.workspace, p.bias = c.bias, p.written = c.y;
  p.activates = c.activates;
  p.source_batch = c.x_batch, p.source_channel = c.x_channel;
  p.source_row = int(c.x_row), p.source_column = int(c.x_column);
  p.written_batch = c.y_batch, p.written_channel = c.y_channel;
  p.written_row = int(c.out_width);
  p.source_channel_bytes = 4 * c.x_channel, p.source_rewind_bytes = -4 * channels * c.x_channel;
  p.patch_step_bytes = 4 * (Tile::kThreads / Tile::kPatchPitch) * kReadStepH * kLatticesH * c.x_row;
  p.down_bytes = 4 * H::kM * kLatticesH * c.out_width;
  p.job_bytes = 4 * 4 * (Tile::kThreads / 32 / H::kM) * p.written_channel;
  p.pairs = kLatticesW == 1 && c.out_width % 2 == 0 && reinterpret_cast<i64>(c.y) % 8 == 0;
  p.source_height = int(c.height), p.source_width = int(c.width);
  p.channels = d.channels, p.channels_padded = int(channels), p.outputs = d.outputs;
  p.k_tiles = int(k_tiles), p.k_tiles_each = int(each), p.k_splits = by(splits);
  p.h = {0, 1, d.classes_h->read_first, kReadStepH, int(c.out_height), by(kLatticesH), by(tiles_h)};
  p.w = {0, 1, d.classes_w->read_first, kReadStepW, int(c.out_width), by(kLatticesW), by(tiles_w)};
  kernel<<<dim3(positions * splits, kGroups), Tile::kThreads, kShared, c.stream>>>(p);
  return failed(name);
}
