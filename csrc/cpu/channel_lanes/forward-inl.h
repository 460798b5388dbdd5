// Forward pass (and any other correlation) with channels in the lanes: for small images, strides, borders and
// channels_last, which cost nothing extra once pixels are packed.
#if defined(POLYCONV_CPU_CHANNEL_LANES_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_CHANNEL_LANES_FORWARD_INL_H_
#undef POLYCONV_CPU_CHANNEL_LANES_FORWARD_INL_H_
#else
#define POLYCONV_CPU_CHANNEL_LANES_FORWARD_INL_H_
#endif

#include <algorithm>
#include <type_traits>
#include <vector>

#include "channel_lanes/forms-inl.h"
#include "channel_lanes/forward.h"
#include "common/memory.h"
#include "common/stages.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

template <class Form>
class ChannelForward {
 public:
  ChannelForward(const Convolution& conv, const Schedule& schedule, const float* transformed, int threads)
      : conv_(conv),
        weights_(Form::Weights(conv)),
        reader_(Form::Reader(conv)),
        transformed_(transformed),
        form_(conv, schedule.lanes > 0 ? schedule.lanes : ChooseUnits(conv), threads) {}

  void Run(const Runtime& runtime) const {
    const int units = form_.grid().ChunkUnits();
    const int block = std::min(weights_.vectors, Form::kBlockTiles * kTileVectors<Form::kListed>);
    const std::size_t vector_pitch = static_cast<std::size_t>(units) * kLanes;
    const std::size_t matrix_pitch = static_cast<std::size_t>((units * block) | 1) * kLanes;
    const RowUnpacker unpacker(conv_);
    // If there are few chunks, and not equally many for each thread, output channels are cut, too.
    const int chunks = form_.grid().chunks(), threads = runtime.threads;
    const int parts = chunks < kManyChunks * threads && chunks % threads != 0 ? std::min(threads, weights_.tiles()) : 1;
    runtime.parallel_for(static_cast<std::int64_t>(chunks) * parts, [&](std::int64_t begin, std::int64_t end) {
      Carver carver;
      const std::size_t packed_at = carver.Take(form_.packed_size());
      const std::size_t expanded_at = carver.Take(form_.expanded_size());
      const std::size_t sums_at = carver.Take(Form::kMatrices * matrix_pitch);
      const std::size_t outputs_at = carver.Take(form_.outputs_size());
      const std::size_t work_at = carver.Take(form_.work_size());
      const std::size_t weights_at = carver.Take(transformed_ == nullptr ? Form::kMatrices * kFreshPitch : 0);
      float* scratch = Scratch::OfThread().Get(carver.size());
      float* sums = scratch + sums_at;
      const float* x = nullptr;
      std::vector<std::ptrdiff_t> list;
      for (std::int64_t item = begin; item < end; item++) {
        const int chunk = static_cast<int>(item / parts), part = static_cast<int>(item % parts);
        if (item == begin || part == 0) {
          x = form_.Load(chunk, scratch + packed_at, scratch + expanded_at, scratch + work_at);
          list.clear();
          form_.ListUnits(chunk, &list);
        }
        const int end_tile = weights_.tiles() * (part + 1) / parts;
        for (int first = weights_.tiles() * part / parts, last; first < end_tile; first = last) {
          last = std::min(first + Form::kBlockTiles, end_tile);
          if (transformed_ != nullptr) {
            Multiply(x, list, first, last, sums, matrix_pitch, vector_pitch);
          } else if constexpr (!Form::kListed) {
            TransformAndMultiply(x, list, first, last, sums, matrix_pitch, vector_pitch, scratch + weights_at);
          }
          const StageTimer timer(Stage::kInvert);
          const int vector = weights_.starts[first], vectors = weights_.starts[last] - vector;
          form_.Finish(chunk, sums, matrix_pitch, vector_pitch, scratch + outputs_at, vector, vectors, unpacker);
        }
      }
    });
  }

 private:
  // Pitch between the points of weights transformed on the fly: an odd number of vectors, against cache set conflicts.
  static constexpr std::size_t kFreshPitch =
      static_cast<std::size_t>((Form::kFreshTerms * kTileVectors<Form::kListed>) | 1) * kLanes;

  // As many units as keep the transformed input in L2, so that weights are reused often.
  static int ChooseUnits(const Convolution& conv) {
    constexpr double kCache = 1.2 * (1 << 20);
    const double unit = 4.0 * Form::kMatrices * (conv.in_channels + 96);
    return Form::kListed ? 128 : std::clamp(static_cast<int>(kCache / unit), 56, 96);
  }

  void Multiply(const float* x, const std::vector<std::ptrdiff_t>& list, int first, int last, float* sums,
                std::size_t matrix_pitch, std::size_t vector_pitch) const {
    const StageTimer timer(Stage::kProducts);
    // Either some channels of one tap, or all channels of some taps.
    const int vectors = form_.x_vectors();
    const int blocks = CeilDiv(vectors * kLanes, Form::kTerms);
    const int channels_at_a_time = blocks > 1 ? CeilDiv(vectors, blocks) * kLanes : weights_.channels;
    const int taps_at_a_time = std::max(1, Form::kTerms / channels_at_a_time);
    UnitProducts op{};
    op.vector_pitch = form_.vector_pitch();
    for (int matrix = 0; matrix < Form::kMatrices; matrix++) {
      for (int tile = first; tile < last; tile++) {
        const int v = weights_.starts[tile], width = weights_.Width(tile);
        const float* weights = transformed_ + matrix * weights_.matrix_size();
        float* target = sums + matrix * matrix_pitch + (v - weights_.starts[first]) * vector_pitch;
        for (int tap = 0; tap < weights_.taps; tap += taps_at_a_time) {
          op.taps = form_.taps().data() + tap;
          op.tap_count = std::min(taps_at_a_time, weights_.taps - tap);
          for (int channel = 0; channel < weights_.channels; channel += channels_at_a_time) {
            op.x = x + matrix * form_.matrix_pitch() + channel / kLanes * form_.vector_pitch();
            op.channels = std::min(channels_at_a_time, weights_.channels - channel);
            op.weights = weights + weights_.Offset(v, width, v, tap, channel);
            MultiplyUnits(op, list, width, target, vector_pitch, tap + channel > 0);
          }
        }
      }
    }
  }

  // Like Multiply, with weights transformed on the fly, for a tile and some channels at a time.
  void TransformAndMultiply(const float* x, const std::vector<std::ptrdiff_t>& list, int first, int last, float* sums,
                            std::size_t matrix_pitch, std::size_t vector_pitch, float* fresh) const {
    UnitProducts op{};
    op.vector_pitch = form_.vector_pitch();
    op.taps = form_.taps().data();
    op.tap_count = 1;
    for (int tile = first; tile < last; tile++) {
      const int v = weights_.starts[tile], width = weights_.Width(tile);
      for (int channel = 0; channel < weights_.channels; channel += Form::kFreshTerms) {
        op.channels = std::min(Form::kFreshTerms, weights_.channels - channel);
        {
          const StageTimer timer(Stage::kWeights);
          Form::Transform(reader_, v, width, channel, channel + op.channels, fresh, kFreshPitch);
        }
        const StageTimer timer(Stage::kProducts);
        for (int matrix = 0; matrix < Form::kMatrices; matrix++) {
          op.x = x + matrix * form_.matrix_pitch() + channel / kLanes * form_.vector_pitch();
          op.weights = fresh + matrix * kFreshPitch;
          float* target = sums + matrix * matrix_pitch + (v - weights_.starts[first]) * vector_pitch;
          MultiplyUnits(op, list, width, target, vector_pitch, channel > 0);
        }
      }
    }
  }

  // Units are cut into equal register tiles. Each prefetches its share of the next weights, which follow in memory.
  static HWY_INLINE void MultiplyUnits(UnitProducts op, const std::vector<std::ptrdiff_t>& list, int width,
                                       float* target, std::size_t vector_pitch, bool accumulate) {
    constexpr bool kListed = Form::kListed;
    const int count = static_cast<int>(list.size()), tiles = CeilDiv(count, kTileUnits<kListed>[width]);
    const int terms = op.tap_count * op.channels, vectors = op.tap_count * CeilDiv(op.channels, kLanes);
    op.more_ahead = std::max(0, terms * (width - tiles) / (tiles * vectors));
    const float* next = op.weights + terms * width * kLanes;
    const float* x = op.x;
    for (int tile = 0; tile < tiles; tile++) {
      const int unit = count * tile / tiles, end = count * (tile + 1) / tiles;
      op.ahead = next + tile % width * (terms + op.more_ahead * vectors) * kLanes;
      op.units = list.data() + unit;
      if (!kListed) op.x = x + list[unit];
      SumKernelFor<kListed>(end - unit, width)(op, target + unit * kLanes, vector_pitch, accumulate);
    }
  }

  const Convolution& conv_;
  const ForwardWeights weights_;
  const WeightReader reader_;
  const float* transformed_;  // null: transform on the fly
  const Form form_;
};

template <class Form>
void TransformAll(const Convolution& conv, float* transformed, const Runtime& runtime) {
  const StageTimer timer(Stage::kWeights);
  const ForwardWeights weights = Form::Weights(conv);
  const WeightReader reader = Form::Reader(conv);
  runtime.parallel_for(weights.tiles(), [&](std::int64_t begin, std::int64_t end) {
    for (int tile = static_cast<int>(begin); tile < end; tile++) {
      Form::PutWeights(reader, weights, weights.starts[tile], weights.Width(tile), transformed);
    }
  });
}

// Calls fn.template operator()<form>() with `Form`, or with direct summation if `Form` does not serve the problem.
template <class Form, class Fn>
auto WithForm(const Convolution& conv, const Fn& fn) {
  return Form::Serves(conv) ? fn.template operator()<Form>() : fn.template operator()<DirectForward>();
}

template <class Form>
std::size_t ForwardWeightsSize(const Convolution& conv) {
  return WithForm<Form>(conv, [&]<class Chosen>() { return Chosen::Weights(conv).size(); });
}

template <class Form>
void TransformForwardWeights(const Convolution& conv, float* transformed, const Runtime& runtime) {
  WithForm<Form>(conv, [&]<class Chosen>() { TransformAll<Chosen>(conv, transformed, runtime); });
}

template <class Form>
void RunForward(const Convolution& conv, const Schedule& schedule, const float* transformed, const Runtime& runtime) {
  if (conv.batch == 0 || conv.out_height <= 0 || conv.out_width <= 0) return;
  WithForm<Form>(
      conv, [&]<class Chosen>() { ChannelForward<Chosen>(conv, schedule, transformed, runtime.threads).Run(runtime); });
}

template <class Form>
bool TakesPlainForwardWeights(const Convolution& conv) {
  return WithForm<Form>(conv, [&]<class Chosen>() { return Chosen::TakesPlainWeights(conv); });
}

inline int LongestForwardSum(int) {
  return kMostTerms;
}

template <class Form>
inline constexpr SchemeKernels kForwardKernels = {&ForwardWeightsSize<Form>, &TransformForwardWeights<Form>,
                                                  &TakesPlainForwardWeights<Form>, &RunForward<Form>,
                                                  &LongestForwardSum};

template <SchemeShape kShape>
using ForwardOf = std::conditional_t<kShape == kDirect, DirectForward, FastForward<AlongH<kShape>, AlongW<kShape>>>;

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
