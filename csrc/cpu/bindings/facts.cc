// Constants of the kernels that Python needs, as JSON, so that they are defined in one place.
#include <torch/csrc/stable/library.h>

#include <span>
#include <string>

#include "bindings/tensors.h"
#include "common/algorithms.h"
#include "common/convolution.h"

namespace polyconv {
namespace {

// Names of an enumeration's members, in order of their values.
template <class Enumeration>
std::string Names() {
  std::string text;
  for (int value = 0; value < static_cast<int>(Enumeration::kCount); value++) {
    text += std::string(value > 0 ? ", " : "") + '"' + NameOf(static_cast<Enumeration>(value)) + '"';
  }
  return "[" + text + "]";
}

// Schemes in order of their numbers, each as [m and r along H, m and r along W, nested].
std::string Schemes(std::span<const SchemeShape> schemes) {
  std::string text;
  for (const SchemeShape& scheme : schemes) {
    text += text.empty() ? "[" : ", [";
    for (const int number : {scheme.m_h, scheme.r_h, scheme.m_w, scheme.r_w}) text += std::to_string(number) + ", ";
    text += scheme.nested ? "true]" : "false]";
  }
  return "[" + text + "]";
}

std::string FactsOp() {
  std::string text = "{";
  text += "\"lanes\": " + Names<Lanes>();
  text += ", \"borders\": " + Names<Border>();
  text += ", \"activations\": " + Names<Activation>();
  text += ", \"tile_schemes\": " + Schemes(kTileSchemes);
  text += ", \"channel_schemes\": " + Schemes(kChannelSchemes);
  text += ", \"gradient_schemes\": " + Schemes(kGradientSchemes);
  return text + "}";
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyconv_cpu, m) {
  m.def("facts() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CompositeExplicitAutograd, m) {
  m.impl("facts", TORCH_BOX(&FactsOp));
}

}  // namespace polyconv
