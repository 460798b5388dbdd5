// Cut of a convolution's taps into segments, each of which counts as an input channel.
//
// Along one axis, output i reads with tap r the pixel i stride + r dilation - before. The taps of one residue class, r
// = first + q step with step = stride / g and g = gcd(stride, dilation), read the pixels stride u + offset with u = i +
// q dilation / g: a unit-stride correlation on every stride-th pixel, which the fast algorithms compute. Classes with
// more taps than the algorithm takes are cut further. Exact, with proofs: polyconv/algebra/segments.py.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "common/border.h"
#include "common/convolution.h"
#include "common/integers.h"

namespace polyconv {

struct TapSegment {
  int first_tap, taps;
  int offset;  // pixel that output 0 reads with the first tap
};

struct TapAxis {
  int stride;    // pixels between neighbours of the sub-image
  int tap_step;  // taps between neighbours of a segment
  int dilation;  // of the sub-image
  std::vector<TapSegment> segments;

  TapAxis(int taps, int longest, int image_stride, int image_dilation, int before) : stride(image_stride), dilation(1) {
    const int g = std::gcd(stride, image_dilation);
    tap_step = stride / g;
    for (int first = 0; first < std::min(tap_step, taps); first++) {
      for (int tap = first; tap < taps; tap += longest * tap_step) {
        const int count = std::min(longest, CeilDiv(taps - tap, tap_step));
        segments.push_back({tap, count, tap * image_dilation - before});
        if (count > 1) dilation = image_dilation / g;  // single taps have none
      }
    }
  }

  int count() const { return static_cast<int>(segments.size()); }
  // Image pixel at position u of a segment's sub-image; it may lie outside.
  int PixelAt(int segment, int u) const { return stride * u + segments[segment].offset; }
};

// Both axes, and the channels that the products sum over: one per segment and image channel. All segments of
// kChannelsAtATime neighbouring channels come before the next channels, so that image rows are still cached.
struct Taps {
  static constexpr int kChannelsAtATime = 16;

  struct Channel {
    int image_channel, segment_h, segment_w;
  };

  TapAxis h, w;
  int image_channels;

  Taps(const Convolution& conv, int longest_h, int longest_w)
      : h(conv.taps_h, longest_h, conv.stride_h, conv.dilation_h, conv.top),
        w(conv.taps_w, longest_w, conv.stride_w, conv.dilation_w, conv.left),
        image_channels(conv.in_channels) {}

  int segments() const { return h.count() * w.count(); }
  int channels() const { return image_channels * segments(); }

  Channel At(int index) const {
    const int before = index / (kChannelsAtATime * segments()) * kChannelsAtATime;
    const int together = std::min(kChannelsAtATime, image_channels - before);
    const int rest = index - before * segments();
    const int segment = rest / together;
    return {before + rest % together, segment / w.count(), segment % w.count()};
  }

  // Number of channels, from this one on, with the same segment and consecutive image channels.
  int RunFrom(int index) const {
    const int channel = At(index).image_channel;
    return std::min(kChannelsAtATime - channel % kChannelsAtATime, image_channels - channel);
  }
};

}  // namespace polyconv
