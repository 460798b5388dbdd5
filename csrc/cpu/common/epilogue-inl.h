// The epilogue in vectors, applied when an element is stored for the last time.
#if defined(POLYCONV_CPU_COMMON_EPILOGUE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_COMMON_EPILOGUE_INL_H_
#undef POLYCONV_CPU_COMMON_EPILOGUE_INL_H_
#else
#define POLYCONV_CPU_COMMON_EPILOGUE_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>

#include <limits>

#include "common/epilogue.h"
#include "common/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// As torch's: NaN passes, and so does -0 if the bound is 0, because x86 returns the second operand in both cases.
HWY_INLINE Floats Clamp(Floats v, Floats low, Floats high) {
#if HWY_TARGET == HWY_NEON  // Highway's return the operand that is not NaN
  return Floats(vminq_f32(high.raw, vmaxq_f32(low.raw, v.raw)));
#else
  return hn::Min(high, hn::Max(low, v));
#endif
}

// factor / (1 + exp(-v)), within 2 ulp down to v = -87, and zero times the factor below. NaN passes.
//
// The exponential is 2^n exp(r), exp(r) = 1 + r + r^2 P(r) with a minimax fit of relative error 4e-9. The sum that
// rounds to n has the exponent of 2^n in its last bits. Above v = 30 the exponential adds nothing to 1.
HWY_INLINE Floats TimesSigmoid(Floats factor, Floats v) {
  constexpr float kExp[] = {0.00836874544620514f, 0.04166838899254799f, 0.1666652113199234f, 0.4999999403953552f, 1, 1};
  constexpr float kLowest = HWY_TARGET <= HWY_AVX3 ? -87.3f : -89.0f, kRound = 12582912.0f + 127;
  const Floats one = Broadcast(1.0f), bounded = Clamp(v, Broadcast(kLowest), Broadcast(30.0f));
  const Floats rounded = hn::NegMulAdd(bounded, Broadcast(1.44269504f), Broadcast(kRound));
  const Floats n = hn::Sub(rounded, Broadcast(kRound));
  const Floats power = hn::BitCast(kFloats, hn::ShiftLeft<23>(hn::BitCast(hn::RebindToSigned<FloatTag>(), rounded)));
  // log(2) in two parts, the first so short that n times it is exact
  const Floats near = hn::NegMulSub(n, Broadcast(0.693145752f), bounded);
  const Floats r = hn::NegMulAdd(n, Broadcast(1.42860677e-6f), near);
  Floats sum = Broadcast(0.0013814540579915047f);
  POLYCONV_UNROLL
  for (const float coefficient : kExp) sum = hn::MulAdd(sum, r, Broadcast(coefficient));
  const Floats divisor = hn::MulAdd(sum, power, one);
#if HWY_TARGET <= HWY_AVX3  // a division of 512-bit vectors takes as long as ten products
  const Floats guess{_mm512_rcp14_ps(divisor.raw)};
  const Floats quotient = hn::MulAdd(guess, hn::NegMulAdd(divisor, guess, one), guess);
  return hn::Mul(factor, hn::IfThenZeroElse(hn::Lt(v, Broadcast(kLowest)), quotient));
#else
  return hn::Div(factor, divisor);  // by infinity below -88.4
#endif
}

// v times the normal distribution's cumulative probability, which is (1 + erf(v / sqrt(2))) / 2. With d = |v|, its tail
// is exp(-d^2 / 2) P(1 / (1 + 0.6 d / sqrt(2))). The polynomial P is a minimax fit of relative error 4e-8. In float the
// probability is within 1.8e-7, and the tail within 6e-7 of itself down to v = -3 and 2e-6 down to v = -8.
HWY_INLINE Floats Gelu(Floats v) {
  constexpr float kTail[] = {0.03249789774417877f,  -0.15713098645210266f, 0.2770255208015442f, -0.16260959208011627f,
                             -0.06678629666566849f, 0.031206319108605385f, 0.066436268389225f,  0.14106862246990204f,
                             0.1690259426832199f,   0.16926632821559906f};
  const Floats one = Broadcast(1.0f);
  const Floats t = hn::Div(one, hn::MulAdd(hn::Abs(v), Broadcast(0.42426406871192851f), one));
  Floats sum = hn::Zero(kFloats);
  POLYCONV_UNROLL
  for (const float coefficient : kTail) sum = hn::MulAdd(sum, t, Broadcast(coefficient));
  const Floats tail = hn::Mul(hn::Mul(sum, t), hn::Exp(kFloats, hn::Mul(hn::Mul(v, v), Broadcast(-0.5f))));
  return hn::Mul(v, hn::IfThenElse(hn::Lt(v, hn::Zero(kFloats)), tail, hn::Sub(one, tail)));
}

HWY_INLINE Floats Silu(Floats v) {
  return TimesSigmoid(v, v);
}

// Any activation, selected at run time. One copy per source: the branch and the call are cheap beside most of them.
inline HWY_NOINLINE Floats ActivateAny(const Epilogue<float>& epilogue, Floats v) {
  const Floats zero = hn::Zero(kFloats), three = Broadcast(3.0f), six = Broadcast(6.0f), sixth = Broadcast(1 / 6.0f);
  switch (epilogue.activation) {
    case Activation::kSilu:
      return Silu(v);
    case Activation::kHardswish:
      return hn::Mul(hn::Mul(v, Clamp(hn::Add(v, three), zero, six)), sixth);
    case Activation::kHardsigmoid:
      return hn::Mul(Clamp(hn::Add(v, three), zero, six), sixth);
    case Activation::kGelu:
      return Gelu(v);
    case Activation::kGeluTanh: {
      const Floats slope = hn::MulAdd(hn::Mul(v, v), Broadcast(static_cast<float>(kGeluCubic)),
                                      Broadcast(static_cast<float>(kGeluLinear)));
      return TimesSigmoid(v, hn::Mul(v, slope));
    }
    case Activation::kLeakyRelu:
      return hn::IfThenElse(hn::Gt(v, zero), v, hn::Mul(v, Broadcast(epilogue.a)));
    case Activation::kSigmoid:
      return TimesSigmoid(Broadcast(1.0f), v);
    default:
      return v;
  }
}

// How a kernel is compiled for an activation. ReLU is a clamp to [0, infinity].
enum class Activate { kNone, kClamp, kSilu, kAny };

// Applies residual and activation to a sum before it is stored. The residual has the layout of y, so the offset of an
// element in y is its offset in the residual.
template <Activate kActivate, bool kResidual>
struct Finisher {
  const float* y;
  const Epilogue<float>& epilogue;
  float low, high;  // of a clamp

  // `target`: address in y of the vector.
  HWY_INLINE Floats Whole(Floats sum, const float* target) const {
    if constexpr (kResidual) sum = hn::Add(sum, Load(epilogue.residual + (target - y)));
    return Activated(sum);
  }

  // Only the lanes [first, last) will be stored, maybe all: no residual elements outside of them are read.
  HWY_INLINE Floats Between(Floats sum, const float* target, int first, int last) const {
    if constexpr (kResidual) {
      const float* residual = epilogue.residual + (target - y);
      sum = hn::Add(sum, last - first == kLanes ? Load(residual) : LoadBetween(residual, first, last));
    }
    return Activated(sum);
  }

  HWY_INLINE float One(float sum, const float* target) const {
    if constexpr (kResidual) sum += epilogue.residual[target - y];
    return hn::GetLane(Activated(Broadcast(sum)));
  }

 private:
  HWY_INLINE Floats Activated(Floats v) const {
    if constexpr (kActivate == Activate::kClamp) return Clamp(v, Broadcast(low), Broadcast(high));
    if constexpr (kActivate == Activate::kSilu) return Silu(v);
    if constexpr (kActivate == Activate::kAny) return ActivateAny(epilogue, v);
    return v;
  }
};

template <Activate kActivate, class Fn>
HWY_INLINE void WithActivation(const Epilogue<float>& epilogue, const float* y, const Fn& fn, float low = 0,
                               float high = 0) {
  if (epilogue.residual == nullptr) {
    fn(Finisher<kActivate, false>{y, epilogue, low, high});
  } else {
    fn(Finisher<kActivate, true>{y, epilogue, low, high});
  }
}

// Calls fn(finisher) with the Finisher for an output `y`. Outside of all loops.
template <class Fn>
HWY_INLINE void WithFinisher(const Epilogue<float>& epilogue, const float* y, const Fn& fn) {
  switch (epilogue.activation) {
    case Activation::kNone:
      return WithActivation<Activate::kNone>(epilogue, y, fn);
    case Activation::kRelu:
      return WithActivation<Activate::kClamp>(epilogue, y, fn, 0.0f, std::numeric_limits<float>::infinity());
    case Activation::kClamp:
      return WithActivation<Activate::kClamp>(epilogue, y, fn, epilogue.a, epilogue.b);
    case Activation::kSilu:
      return WithActivation<Activate::kSilu>(epilogue, y, fn);
    default:
      return WithActivation<Activate::kAny>(epilogue, y, fn);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
