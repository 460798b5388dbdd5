// Taps that read the same residue of the source: tap t of position i reads read_first + step * (i + lattices * t), and
// is element tap_first + t * tap_stride of the kernel.
struct TapClass {
  int read_first, taps, tap_first, tap_stride;
};

// One past the last position of the image that `count` positions of a tap class read.
static int read_end(const TapClass& taps, int step, int lattices, i64 count, i64 extent) {
  return int(max(0ll, min(extent, taps.read_first + step * (count - 1 + lattices * (taps.taps - 1)) + 1)));
}
