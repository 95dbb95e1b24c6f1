#include "cleave/unit/program.h"

#include <array>
#include <numeric>
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

const char* to_string(SiteKind kind) {
  return kind == SiteKind::mlp ? "mlp" : "linear group";
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

int64_t ProgramSpec::parameters() const {
  if (kind == SiteKind::mlp) {
    return int64_t(hidden) * (2 * int64_t(k) + n[0]);
  }
  return int64_t(k) * std::accumulate(n.begin(), n.end(), int64_t(0));
}

} // namespace cleave
