#include "cleave/activation.h"

#include <array>
#include <stdexcept>
#include <utility>

namespace cleave {

namespace {
constexpr std::array<std::pair<Activation, const char*>, 4> activation_names{{
    {Activation::silu, "silu"},
    {Activation::gelu, "gelu"},
    {Activation::gelu_tanh, "gelu_tanh"},
    {Activation::relu, "relu"},
}};
}

const char* to_string(Activation activation) {
  return activation_names[static_cast<size_t>(activation)].second;
}

Activation activation_from_string(const std::string& name) {
  for (auto [value, text] : activation_names) {
    if (name == text) {
      return value;
    }
  }
  throw std::invalid_argument("[activation] got '" + name + "' and needs silu, gelu, gelu_tanh or relu");
}

} // namespace cleave
