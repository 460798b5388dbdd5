// Cook-Toom schemes that kernels are compiled for, by engine and number. Python reads them through bindings/facts.cc.
#pragma once

#include "common/cook_toom.h"

namespace polyconv {

// F(m, r) along H and along W. Nested: two segments of taps along W, combined by F(2, 2).
struct SchemeShape {
  int m_h, r_h, m_w, r_w;
  bool nested = false;

  bool operator==(const SchemeShape&) const = default;
};

inline constexpr SchemeShape kDirect{1, 1, 1, 1};               // direct multiplication, any number of taps
inline constexpr SchemeShape kF45xF45Nested{4, 5, 4, 5, true};  // up to 5 x 9 taps
inline constexpr SchemeShape kF45xF45{4, 5, 4, 5};              // 5 x 5
inline constexpr SchemeShape kF43xF43{4, 3, 4, 3};              // 3 x 3
inline constexpr SchemeShape kF63xF63{6, 3, 6, 3};              // 3 x 3, fewer products, larger tiles
inline constexpr SchemeShape kF23xF23{2, 3, 2, 3};              // 3 x 3, smallest error
inline constexpr SchemeShape kF11xF45Nested{1, 1, 4, 5, true};  // 1 x 9
inline constexpr SchemeShape kF11xF45{1, 1, 4, 5};              // 1 x 5
inline constexpr SchemeShape kF45xF11{4, 5, 1, 1};              // 5 x 1
inline constexpr SchemeShape kF43xF45{4, 3, 4, 5};              // 3 x 5
inline constexpr SchemeShape kF43xF45Nested{4, 3, 4, 5, true};  // 3 x 9
inline constexpr SchemeShape kF11xF63{1, 1, 6, 3};              // 1 x 3
inline constexpr SchemeShape kF63xF11{6, 3, 1, 1};              // 3 x 1

// Operators number schemes by their position in these lists. First, forward passes with tiles in the lanes. A long
// kernel is cut into segments, and each segment counts as an input channel, as does each tap of direct multiplication.
inline constexpr SchemeShape kTileSchemes[] = {
    kF45xF45Nested, kF45xF45, kF43xF43,       kF63xF63, kF23xF23, kF11xF45Nested, kF11xF45,
    kF45xF11,       kF43xF45, kF43xF45Nested, kF11xF63, kF63xF11, kDirect,
};

// Forward passes with channels in the lanes. With strides or more than 3 x 3 taps, all of them sum directly.
inline constexpr SchemeShape kChannelSchemes[] = {kDirect, kF43xF43, kF63xF63, kF23xF23};

// Weight gradients. Direct summation takes every problem, the other schemes every problem of unit stride.
inline constexpr SchemeShape kGradientSchemes[] = {
    kDirect,  kF45xF45Nested, kF45xF45, kF43xF43,       kF63xF63, kF23xF23, kF11xF45Nested,
    kF11xF45, kF45xF11,       kF43xF45, kF43xF45Nested, kF11xF63, kF63xF11,
};

template <SchemeShape kShape>
using AlongH = CookToom<kShape.m_h, kShape.r_h>;
template <SchemeShape kShape>
using AlongW = CookToom<kShape.m_w, kShape.r_w>;

// Returns kernels.template operator()<scheme>(), a pointer, for the wanted scheme if the template arguments include it,
// otherwise null. Kernels are compiled in such groups of schemes.
template <SchemeShape kFirst, SchemeShape... kOthers, class Kernels>
auto FindAmong(const SchemeShape& wanted, const Kernels& kernels) {
  if (wanted == kFirst) return kernels.template operator()<kFirst>();
  if constexpr (sizeof...(kOthers) > 0) {
    return FindAmong<kOthers...>(wanted, kernels);
  } else {
    return decltype(kernels.template operator()<kFirst>())(nullptr);
  }
}

}  // namespace polyconv
