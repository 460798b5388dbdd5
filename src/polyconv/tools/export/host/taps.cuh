// Taps that read the same residue of the source: tap t of position i reads read_first + step * (i + lattices * t), and
// is element tap_first + t * tap_stride of the kernel.
struct TapClass {
  int read_first, taps, tap_first, tap_stride;
};
