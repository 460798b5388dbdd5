// Element types of tensors.
#pragma once

#include <cstdint>

namespace polyconv {

enum class Element : int { kFloat = 0, kBfloat16, kFloat16 };

struct Bfloat16 {
  std::uint16_t bits;
};

struct Float16 {
  std::uint16_t bits;
};

// Calls fn(T()) with the type of an element.
template <class Fn>
void WithElement(Element element, const Fn& fn) {
  switch (element) {
    case Element::kBfloat16:
      return fn(Bfloat16());
    case Element::kFloat16:
      return fn(Float16());
    default:
      return fn(float());
  }
}

}  // namespace polyconv
