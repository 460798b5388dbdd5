// Launches the four kernels in slabs of rows whose X and Y fit the workspace.
template <class H, class W, int kK, int kSegmentsH, int kSegmentsW, int kBlocks, int kResident>
static const char* separable(const Call& c, const Direction& d) {
  using Gemm = NonfusedGemm<W, kK>;
  constexpr int kPasses = W::kTiles > 1 ? W::kPasses : kSegmentsW, kPartsH = kClassesH * kSegmentsH;
  const i64 tiles_h = ceil_div(c.out_height, kLatticesH * H::kM), rows = c.batch * kLatticesH * tiles_h;
  const i64 units = ceil_div(c.out_width, kLatticesW * W::kOutputs), row_columns = units * kLatticesW;
  const i64 columns = row_columns + (W::kPoints - 1 + (kPasses - 1) * W::kM) / W::kOutputs * kLatticesW;
  const i64 pitch = columns >= 16 ? columns | 1 : columns;  // odd: the points of H do not all lie in one memory bank
  const i64 vectors = W::kTiles * pitch, channel_stride = vectors * W::kM;
  const i64 channels_all = i64(kPartsH) * kClassesW * d.channels, chunks = ceil_div(channels_all, kChannelChunk);
  const i64 k_tiles = ceil_div(d.outputs, kK), products = H::kPoints * kGroups * k_tiles;
  const i64 row_stride = H::kPoints * kGroups * chunks * kChannelChunk * channel_stride;
  const i64 weights = products * chunks * kChannelChunk * kPasses * W::kPoints * kK;
  const auto columns_filled = [&](i64 n) { return ceil_div(n * row_columns, Gemm::kU) * Gemm::kU + 8; };
  const auto floats = [&](i64 n) {
    return weights + n * row_stride + H::kPoints * kGroups * d.outputs * W::kOutputs * columns_filled(n);
  };

  // Rows of a slab that fit and take the fewest rounds of the persistent blocks, each launch counted as one more round.
  constexpr int kShared = 4 * Gemm::kSharedFloats;
  i64 room = kWorkspace;
  if constexpr (kResident > 0) {
    if (4 * floats(1) <= kResident) room = kResident;  // slabs of this size stay in the L2
  }
  i64 most = min(rows, min(room / 4 / max(row_stride, 1ll), 0x7fffffff / max(row_stride, 1ll)));
  while (most > 0 && 4 * floats(most) > room) most--;
  if (most == 0 || rows >= 0x7fffffff || max(c.x_row, c.x_column) >= 0x7fffffff ||
      !allow_shared(winograd_nonfused_gemm<W, kK>, kShared))
    return d.direct(c);
  const i64 blocks = kBlocks * attribute(cudaDevAttrMultiProcessorCount);
  const auto rounds = [&](i64 n) { return ceil_div(products * ceil_div(n * row_columns, Gemm::kU), blocks); };
  i64 slab = most, fewest = 0;
  for (i64 n = most; n > most / 2; n -= max(1ll, most / 48)) {
    const i64 whole = rows / n, left = rows % n;
    const i64 all = whole * (rounds(n) + 1) + (left ? rounds(left) + 1 : 0);
    if (fewest == 0 || all < fewest) slab = n, fewest = all;
  }

  const bool is_forward = d.direct == direct_forward;
  NonfusedFilterParams t{};
  t.w = c.w, t.u = c.workspace;
  t.w_output = is_forward ? kFilter : kKernelArea, t.w_channel = is_forward ? kKernelArea : kFilter;
  t.channels = d.channels, t.channels_all = int(channels_all), t.chunks = int(chunks), t.segments = kSegmentsW;
  t.outputs = d.outputs, t.k_tile = kK, t.k_tiles = int(k_tiles), t.source_channels = by(d.channels);
  NonfusedInputParams f{};
  f.source = c.x, f.x = c.workspace + weights;
  f.source_batch = c.x_batch, f.source_channel = c.x_channel;
  f.source_row = int(c.x_row), f.source_column = int(c.x_column);
  f.vectors = by(vectors), f.pitch = by(pitch);
  f.channels = kGroups * chunks * kChannelChunk, f.channels_filled = by(chunks * kChannelChunk);
  f.source_channels = by(d.channels), f.channels_all = int(channels_all);
  f.tiles = by(tiles_h), f.outputs_w = W::kOutputs;
  for (int part = 0; part < kPartsH; part++) {
    const TapClass& down = d.classes_h[part % kClassesH];
    const int skipped = part / kClassesH * H::kM;  // taps of the previous segments
    const int own = part / kClassesH == kSegmentsH - 1 ? down.taps - skipped : min(H::kM, down.taps - skipped);
    t.tap_part_h[part] = {max(0, own), down.tap_first + skipped * down.tap_stride, down.tap_stride};
    f.part_h[part] = {down.read_first + kReadStepH * kLatticesH * skipped,
                      read_end(down, kReadStepH, kLatticesH, c.out_height, c.height)};
  }
  for (int i = 0; i < kClassesW; i++) {
    const TapClass& across = d.classes_w[i];
    t.tap_class_w[i] = {across.taps, across.tap_first, across.tap_stride};
    f.class_w[i] = {across.read_first, read_end(across, kReadStepW, kLatticesW, c.out_width, c.width)};
  }

  NonfusedGemmParams g{};
  g.x = f.x, g.u = t.u, g.y = c.workspace + weights + slab * row_stride;
  g.k_tiles = by(k_tiles), g.row_columns = by(row_columns);
  g.row_stride = int(row_stride), g.group_stride = int(chunks * kChannelChunk * channel_stride);
  g.channel_stride = int(channel_stride), g.part_stride = int(pitch * W::kM), g.next = kLatticesW * W::kM;
  g.chunks = int(chunks), g.segments = kSegmentsW, g.outputs = d.outputs;
  NonfusedOutputParams i{};
  const i64 stretch_units = ceil_div(units, ceil_div(W::kTiles * row_columns, 256));
  const i64 stretch_columns = stretch_units * kLatticesW, stretch = stretch_columns * W::kOutputs;
  const i64 lines = min(i64(d.outputs), max(1ll, 128 / (W::kTiles * stretch_columns)));
  const i64 line_blocks = ceil_div(d.outputs, lines), stretches = ceil_div(units, stretch_units);
  i.y = g.y, i.bias = c.bias, i.written = c.y, i.activates = c.activates;
  i.written_batch = c.y_batch, i.written_channel = c.y_channel;
  i.written_row = int(c.out_width), i.outputs = d.outputs, i.outputs_w = W::kOutputs, i.parts = W::kTiles;
  i.lines = int(lines), i.stretch_columns = int(stretch_columns);
  i.line_blocks = by(line_blocks), i.stretches = by(stretches), i.vectors = by(W::kTiles * stretch_columns);
  i.columns = by(stretch_columns), i.row_columns = int(row_columns), i.tiles = by(tiles_h), i.stretch = by(stretch);
  i.count_h = int(c.out_height), i.count_w = int(c.out_width);
  i.vector = c.out_width % 4 == 0 && stretch % 4 == 0 && reinterpret_cast<i64>(c.y) % 16 == 0;

  winograd_nonfused_filter<H, W><<<kGroups * k_tiles * chunks, 256, 0, c.stream>>>(t);
  if (const char* error = failed("winograd_nonfused_filter")) return error;
  for (i64 first = 0; first < rows; first += slab) {
    const i64 n = min(slab, rows - first), tiles = products * ceil_div(n * row_columns, Gemm::kU);
    f.first_row = i.first_row = int(first), f.rows = i.rows = by(n);
    f.items = u32(n * kGroups * chunks * kChannelChunk * channel_stride);
    g.tiles = int(tiles), g.column_tiles = by(tiles / products), g.columns = int(n * row_columns);
    g.columns_filled = i.columns_filled = int(columns_filled(n));
    winograd_nonfused_input<H, W::kM><<<ceil_div(f.items, 256), 256, 0, c.stream>>>(f);
    if (const char* error = failed("winograd_nonfused_input")) return error;
    winograd_nonfused_gemm<W, kK><<<min(tiles, blocks), Gemm::kThreads, kShared, c.stream>>>(g);
    if (const char* error = failed("winograd_nonfused_gemm")) return error;
    winograd_nonfused_output<H, W::kM>
        <<<n * kGroups * line_blocks * stretches, 128, 4 * lines * H::kM * stretch, c.stream>>>(i);
    if (const char* error = failed("winograd_nonfused_output")) return error;
  }
  return nullptr;
}
