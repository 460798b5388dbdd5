// One direction of the convolution: forward reads x and writes y, the input gradient reads y and writes x, both as
// dense correlations on kLatticesH x kLatticesW lattices of positions.
struct Direction {
  const float *source, *bias;
  float* written;
  i64 source_batch, source_channel, source_row, source_column;
  int source_height, source_width, height, width;  // the latter of what is written, which is contiguous
  int channels, outputs;                           // of a group: read and written
  i64 w_output, w_channel;                         // strides of the weight
  const TapClass *classes_h, *classes_w;
};

static Direction forward_direction(const Call& c) {
  Direction d{c.x, c.bias, c.y, c.x_batch, c.x_channel, c.x_row, c.x_column};
  d.source_height = int(c.height), d.source_width = int(c.width);
  d.height = int(c.out_height), d.width = int(c.out_width);
  d.channels = kInChannels / kGroups, d.outputs = kOutChannels / kGroups;
  d.w_output = i64(d.channels) * kKernelH * kKernelW, d.w_channel = kKernelH * kKernelW;
  d.classes_h = kForwardH, d.classes_w = kForwardW;
  return d;
}

static Direction gradient_direction(const Call& c) {
  Direction d{c.y, nullptr, c.x, c.y_batch, c.y_channel, c.y_row, c.y_column};
  d.source_height = int(c.out_height), d.source_width = int(c.out_width);
  d.height = int(c.height), d.width = int(c.width);
  d.channels = kOutChannels / kGroups, d.outputs = kInChannels / kGroups;
  d.w_output = kKernelH * kKernelW, d.w_channel = i64(d.outputs) * kKernelH * kKernelW;
  d.classes_h = kGradientH, d.classes_w = kGradientW;
  return d;
}
