// The epilogue in vectors, applied when an element is stored for the last time.
#if defined(POLYCONV_CPU_COMMON_EPILOGUE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_COMMON_EPILOGUE_INL_H_
#undef POLYCONV_CPU_COMMON_EPILOGUE_INL_H_
#else
#define POLYCONV_CPU_COMMON_EPILOGUE_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>

#include "common/epilogue.h"
#include "common/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// Like torch's: NaN and -0 pass, because neither is less than zero.
HWY_INLINE Floats Relu(Floats v) {
  return hn::IfThenZeroElse(hn::Lt(v, hn::Zero(kFloats)), v);
}

// v / (1 + exp(-v)), within 2.5 ulp. Below -88.7 the exponential overflows and the result is -0, as in torch; the exact
// value is below 3e-37 there. Highway's exponential is defined up to 104.
HWY_INLINE Floats Silu(Floats v) {
  const Floats exponential = hn::Exp(kFloats, hn::Min(hn::Neg(v), Broadcast(104.0f)));
  return hn::Div(v, hn::Add(Broadcast(1.0f), exponential));
}

// Applies residual and activation to a sum before it is stored. The residual has the layout of y, so the offset of an
// element in y is its offset in the residual.
template <Activation kActivation, bool kResidual>
struct Finisher {
  const float* y;
  const float* residual;

  // `target`: address in y of the vector.
  HWY_INLINE Floats Whole(Floats sum, const float* target) const {
    if constexpr (kResidual) sum = hn::Add(sum, Load(residual + (target - y)));
    return Activate(sum);
  }

  // Only the lanes [first, last) will be stored: no residual elements outside of them are read.
  HWY_INLINE Floats Between(Floats sum, const float* target, int first, int last) const {
    if constexpr (kResidual) sum = hn::Add(sum, LoadBetween(residual + (target - y), first, last));
    return Activate(sum);
  }

  HWY_INLINE float One(float sum, const float* target) const {
    if constexpr (kResidual) sum += residual[target - y];
    return hn::GetLane(Activate(Broadcast(sum)));
  }

 private:
  static HWY_INLINE Floats Activate(Floats v) {
    if constexpr (kActivation == Activation::kRelu) return Relu(v);
    if constexpr (kActivation == Activation::kSilu) return Silu(v);
    return v;
  }
};

template <Activation kActivation, class Fn>
HWY_INLINE void WithActivation(const Epilogue<float>& epilogue, const float* y, const Fn& fn) {
  if (epilogue.residual == nullptr) {
    fn(Finisher<kActivation, false>{y, nullptr});
  } else {
    fn(Finisher<kActivation, true>{y, epilogue.residual});
  }
}

// Calls fn(finisher) with the Finisher for an output `y`. Outside of all loops.
template <class Fn>
HWY_INLINE void WithFinisher(const Epilogue<float>& epilogue, const float* y, const Fn& fn) {
  switch (epilogue.activation) {
    case Activation::kRelu:
      return WithActivation<Activation::kRelu>(epilogue, y, fn);
    case Activation::kSilu:
      return WithActivation<Activation::kSilu>(epilogue, y, fn);
    default:
      return WithActivation<Activation::kNone>(epilogue, y, fn);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
