constexpr int kMostStage = 128;     // most quads of a chunk that a tile reads: four per lane
constexpr int kMostBlocks = 65535;  // most blocks along the second and third axis of a grid

// Cut of the positions of a plane into tiles (winograd_fp16x3/layout).
struct Tiling {
  int rows, phases, units;  // of a tile; rows is 0 if the taps read too much for any tile
  int row_groups, phase_groups, unit_groups;
  int pitch, stage;  // columns of V of a column group; quads that a tile reads of a chunk
};

// Cheapest cut of `rows` rows of `units` units of `outputs` outputs. The cost of a tile counts its products, its reads,
// and how well its runs of results fill sectors.
static Tiling tiling(i64 rows, i64 units, int outputs, int taps_h, int shifts) {
  Tiling best{};
  double least = 0;
  for (int groups = 1; groups <= kLatticesW; groups++) {  // all phases and some units, or some phases and one unit
    const int phases = int(ceil_div(kLatticesW, groups));
    const i64 most = groups == 1 ? min(units, i64(kTensorUnits / phases)) : 1;
    for (int each = 1; each <= most; each++) {
      const int tall = int(min(rows, i64(kTensorUnits / (phases * each)))), pitch = (each + shifts - 1) * phases;
      const int stage = (tall + taps_h - 1) * pitch;
      if (tall == 0 || stage > kMostStage) continue;
      const Tiling cut = {
          tall,  phases, each, int(ceil_div(rows, tall)), int(ceil_div(kLatticesW, phases)), int(ceil_div(units, each)),
          pitch, stage};
      const int run = phases == kLatticesW ? phases * each * outputs : phases;
      const double tiles = double(cut.row_groups) * cut.phase_groups * cut.unit_groups;
      const double cost = tiles * (3 + 0.3 * stage / 100 + 0.3 * (run + 7) / run);
      if (best.rows == 0 || cost < least) best = cut, least = cost;
    }
  }
  return best;
}

// Launches the five kernels in slabs of planes, or of rows of one plane, whose V fits the workspace. GPUs without the
// instruction, of compute capability kFirst, use the direct kernels, as do images that are too large.
template <class W, class Steps, int kShifts, int kHeadroomSources, int kHeadroomFilters, int kResident, int kFirst>
static const char* on_tensor_cores(const Call& c, const Direction& d) {
  using Tile = typename Steps::Tile;
  constexpr int kPoints = W::kPoints, kPasses = kTensorPasses<W>;
  const int taps_h = d.classes_h->taps;
  const i64 rows = ceil_div(c.out_height, kLatticesH), units = ceil_div(c.out_width, kLatticesW * W::kOutputs);
  const Tiling cut = tiling(rows, units, W::kOutputs, taps_h, kShifts);
  if (cut.rows == 0) return d.direct(c);
  if constexpr (kFirst == 70) {  // newer GPUs emulate m8n8k4
    const int arch = 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
    if (arch != kFirst) return d.direct(c);
  } else {
    cudaFuncAttributes code{};  // in a file compiled for older GPUs the kernel is empty, whatever it runs on
    cudaFuncGetAttributes(&code, winograd_fp16x3_gemm<W, Steps>);
    if (code.ptxVersion < kFirst) return d.direct(c);
  }
  const int columns = cut.phases * cut.units;  // of a tile
  const i64 column_groups = i64(cut.phase_groups) * cut.unit_groups, planes = c.batch * kLatticesH;
  const i64 channels_all = i64(kClassesH) * kClassesW * d.channels, k_tiles = ceil_div(d.outputs, kTensorK);
  const i64 chunks = ceil_div(channels_all, kTensorChannels * Tile::kChunks) * Tile::kChunks;
  const i64 filters = i64(kGroups) * d.outputs, images = c.batch * kGroups;

  // Workspace offsets [bytes]: absmax of the filters; U and a step of slack, because the GEMM prefetches a step; absmax
  // of the images; V.
  const auto aligned = [](i64 bytes) { return ceil_div(bytes, 256) * 256; };
  const i64 steps = kGroups * k_tiles * kPoints * kPasses * chunks * taps_h * kShifts;
  const i64 at_u = aligned(4 * filters), at_images = at_u + aligned(16 * (steps + 1) * kTensorK);
  const i64 at_v = at_images + 4 * images * kMagnitudeParts;
  const auto positions = [&](i64 row_groups) {  // in whole sectors
    return ceil_div((row_groups * cut.rows + taps_h - 1) * cut.pitch, 2) * 2;
  };
  const i64 plane_points = column_groups * kPasses * chunks * kPoints;
  const auto plane_bytes = [&](i64 row_groups) { return aligned(16 * kGroups * plane_points * positions(row_groups)); };
  i64 room = kWorkspace - at_v;
  if constexpr (kResident > 0) {
    if (plane_bytes(1) <= kResident - at_v) room = kResident - at_v;  // slabs of this size stay in the L2
  }

  // Slabs of about the same size: as many planes as fit, or as many rows of one plane.
  const i64 most_planes = min(i64(kMostBlocks / kGroups), room / plane_bytes(cut.row_groups));
  const i64 slab_planes = ceil_div(planes, ceil_div(planes, max(1ll, min(planes, most_planes))));
  i64 slab_rows = cut.row_groups;
  while (slab_rows > 1 && plane_bytes(slab_rows) > room) slab_rows -= max(1ll, slab_rows / 32);
  slab_rows = ceil_div(cut.row_groups, ceil_div(cut.row_groups, slab_rows));
  const int stage = Tile::kChunks == 1 ? cut.stage : Tile::kChunks * ((cut.stage + 1 | 3) - 1);
  const int exchanged_floats = (Tile::kNested && !Steps::kParks ? 2 : 1) * Tile::kExchange;
  const int shared = 4 * Tile::kWarps * (max(8 * stage, exchanged_floats) + (Steps::kParks ? Tile::kParked : 0));
  if (plane_bytes(slab_rows) > room || max(max(filters, images), chunks) > kMostBlocks ||
      max(c.x_row, c.x_column) >= 0x7fffffff || max(d.channels, d.outputs) * c.height * c.width >= 0x7fffffff ||
      cut.row_groups * column_groups * planes >= 0x0fffffff || plane_points * positions(cut.row_groups) >= 0x7fffffff ||
      !allow_shared(winograd_fp16x3_gemm<W, Steps>, shared))
    return d.direct(c);

  char* const workspace = reinterpret_cast<char*>(c.workspace);
  u32 *const of_filters = reinterpret_cast<u32*>(workspace), *const of_images = of_filters + at_images / 4;
  const bool is_forward = d.direct == direct_forward;
  const i64 w_output = is_forward ? kFilter : kKernelArea, w_channel = is_forward ? kKernelArea : kFilter;
  Fp16x3AbsmaxParams m{};
  m.source = c.w, m.largest = of_filters;
  m.outer_stride = i64(kGroupOutputs) * kFilter, m.inner_stride = w_output, m.inner_slots = by(d.outputs);
  m.elements = u32(d.channels * kKernelArea), m.extent[0] = by(kKernelW), m.extent[1] = by(kKernelH);
  m.stride[0] = 1, m.stride[1] = kKernelW, m.stride[2] = w_channel;
  winograd_fp16x3_absmax<<<dim3(1, filters), 256, 0, c.stream>>>(m);
  if (const char* error = failed("winograd_fp16x3_absmax")) return error;

  Fp16x3FilterParams t{};
  t.w = c.w, t.u = reinterpret_cast<uint4*>(workspace + at_u), t.largest = of_filters;
  t.w_output = w_output, t.w_channel = w_channel, t.headroom = kHeadroomFilters;
  t.channels_all = int(channels_all), t.outputs = d.outputs, t.shifts = kShifts;
  t.chunks = by(chunks), t.k_tiles = by(k_tiles), t.source_channels = by(d.channels);
  Fp16x3InputParams f{};
  f.source = c.x, f.v = reinterpret_cast<uint4*>(workspace + at_v), f.largest = of_images;
  f.source_batch = c.x_batch, f.source_channel = c.x_channel;
  f.source_row = int(c.x_row), f.source_column = int(c.x_column), f.headroom = kHeadroomSources;
  f.channels_all = int(channels_all), f.chunks = int(chunks);
  f.pitch = by(cut.pitch), f.phases = by(cut.phases), f.column_groups = by(column_groups);
  f.phase_groups = by(cut.phase_groups), f.source_channels = by(d.channels), f.units = cut.units;
  for (int i = 0; i < kClassesH; i++) {
    const TapClass& down = d.classes_h[i];
    t.class_h[i] = {down.taps, down.tap_first, down.tap_stride};
    f.class_h[i] = {down.read_first, read_end(down, kReadStepH, kLatticesH, c.out_height, c.height)};
  }
  for (int i = 0; i < kClassesW; i++) {
    const TapClass& across = d.classes_w[i];
    t.class_w[i] = {across.taps, across.tap_first, across.tap_stride};
    f.class_w[i] = {across.read_first, read_end(across, kReadStepW, kLatticesW, c.out_width, c.width)};
  }
  winograd_fp16x3_filter<W><<<kGroups * k_tiles * chunks, 256, 0, c.stream>>>(t);
  if (const char* error = failed("winograd_fp16x3_filter")) return error;

  const bool channels_last = c.x_channel < c.x_column;  // the innermost loop is over the contiguous axis
  m.source = c.x, m.largest = of_images;
  m.outer_stride = c.x_batch, m.inner_stride = d.channels * c.x_channel, m.inner_slots = by(kGroups);
  m.elements = u32(d.channels * c.height * c.width);
  const i64 nearest = channels_last ? d.channels : c.width, next_axis = channels_last ? c.width : c.height;
  m.stride[0] = channels_last ? c.x_channel : c.x_column, m.stride[1] = channels_last ? c.x_column : c.x_row;
  m.stride[2] = channels_last ? c.x_row : c.x_channel;
  const bool one_run = m.stride[1] == nearest * m.stride[0] && m.stride[2] == next_axis * m.stride[1];
  m.extent[0] = by(one_run ? m.elements : nearest), m.extent[1] = by(next_axis);
  // Only the absmax of the first slab's images is computed in advance. Trailing blocks of each GEMM compute the parts
  // that the next slab needs, and more in proportion to the planes done.
  const auto parts_until = [&](i64 plane) { return kMagnitudeParts * ceil_div(plane, kLatticesH); };
  const i64 beforehand = parts_until(slab_planes);
  winograd_fp16x3_absmax<<<dim3(kMagnitudeParts, beforehand / kMagnitudeParts * kGroups), 256, 0, c.stream>>>(m);
  if (const char* error = failed("winograd_fp16x3_absmax")) return error;

  Fp16x3GemmParams g{};
  g.v = f.v, g.u = t.u, g.largest_sources = of_images, g.largest_filters = of_filters;
  g.bias = c.bias, g.written = c.y, g.behind = m, g.activates = c.activates;
  g.written_channel = c.out_height * c.out_width, g.written_batch = kGroups * d.outputs * g.written_channel;
  g.written_row = int(c.out_width);
  g.headroom_sources = kHeadroomSources, g.headroom_filters = kHeadroomFilters;
  g.k_tiles = by(k_tiles), g.column_groups = by(column_groups), g.phase_groups = by(cut.phase_groups);
  g.columns = by(columns), g.phases = by(cut.phases), g.stretch = by(columns * W::kOutputs);
  g.rows = cut.rows, g.units = cut.units, g.outputs = d.outputs;
  g.chunks = int(chunks), g.shifts = kShifts, g.taps = taps_h * kShifts, g.pitch = cut.pitch, g.stage = cut.stage;
  g.next_tap_row = cut.pitch - kShifts * cut.phases;
  g.last_tap = (taps_h - 1) * cut.pitch + (kShifts - 1) * cut.phases;
  g.count_h = int(c.out_height), g.count_w = int(c.out_width);
  i64 known = beforehand;
  for (i64 plane = 0; plane < planes; plane += slab_planes) {
    for (i64 first = 0; first < cut.row_groups; first += slab_rows) {
      const i64 last = min(plane + slab_planes, planes), end = min(first + slab_rows, i64(cut.row_groups));
      const i64 n = last - plane, row_groups = end - first, tiles = n * row_groups * column_groups;
      const i64 next_last = end < cut.row_groups ? last : min(last + slab_planes, planes);
      const i64 done = (last - 1) * cut.row_groups + end;
      const i64 in_step = beforehand + ceil_div(kMagnitudeParts * done, i64(kLatticesH) * cut.row_groups);
      const i64 found = min(max(parts_until(next_last), in_step), parts_until(planes)) - known;
      f.first_plane = g.first_plane = int(plane), f.first_row = g.first_row = int(first * cut.rows);
      f.planes = by(n), g.planes = int(n), f.positions = u32(positions(row_groups)), g.positions = int(f.positions);
      g.tiles = int(tiles), g.row_groups = by(row_groups);
      const dim3 of_transform(ceil_div(f.positions, 128) * column_groups, kGroups * n, chunks);
      winograd_fp16x3_input<W><<<of_transform, 128, 0, c.stream>>>(f);
      if (const char* error = failed("winograd_fp16x3_input")) return error;
      g.blocks = u32(ceil_div(tiles, Tile::kTiles) * k_tiles), g.first_part = u32(known);
      const dim3 of_product(g.blocks + found, kGroups);
      winograd_fp16x3_gemm<W, Steps><<<of_product, Tile::kThreads, shared, c.stream>>>(g);
      if (const char* error = failed("winograd_fp16x3_gemm")) return error;
      known += found;
    }
  }
  return nullptr;
}
