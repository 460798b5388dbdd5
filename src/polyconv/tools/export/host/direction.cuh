// The forward convolution, or its input gradient as an exchanged call: both are dense correlations on
// kLatticesH x kLatticesW lattices of positions, which read x and write y.
struct Direction {
  int channels, outputs;  // per group: read and written
  const TapClass *classes_h, *classes_w;
  const char* (*direct)(const Call&);  // fallback for calls that the kernels do not support
};

constexpr Direction kForward = {kGroupInputs, kGroupOutputs, kForwardH, kForwardW, direct_forward};

static const char* direct_exchanged(const Call& c) {
  return direct_input_gradient(exchanged(c));
}
constexpr Direction kGradient = {kGroupOutputs, kGroupInputs, kGradientH, kGradientW, direct_exchanged};
