#include "cleave/unit/gated.h"

#include <cmath>
#include <map>

namespace cleave {

namespace {

mx::array activate(Activation activation, const mx::array& v, mx::Stream s) {
  const auto constant = [&](float c) { return mx::array(c, v.dtype()); };
  const auto times = [&](const mx::array& a, const mx::array& b) { return mx::multiply(a, b, s); };
  const auto plus = [&](const mx::array& a, const mx::array& b) { return mx::add(a, b, s); };
  switch (activation) {
    case Activation::silu:
      return times(v, mx::sigmoid(v, s));
    case Activation::gelu: {
      auto e = mx::erf(mx::divide(v, constant(std::sqrt(2.0f)), s), s);
      return mx::divide(times(v, plus(constant(1), e)), constant(2), s);
    }
    case Activation::gelu_tanh: { // constants of Hendrycks & Gimpel, "Gaussian Error Linear Units"
      auto cube = times(times(v, v), v);
      auto t = mx::tanh(times(constant(0.79788456f), plus(v, times(constant(0.044715f), cube))), s);
      return times(times(constant(0.5f), v), plus(constant(1), t));
    }
    case Activation::relu:
      return mx::maximum(v, constant(0), s);
  }
  return v;
}

} // namespace

mx::array gated(Activation activation, const mx::array& gate, const mx::array& up, mx::StreamOrDevice s) {
  // mlx keeps what it compiled per thread, and streams belong to a thread too.
  using Node = std::function<std::vector<mx::array>(const std::vector<mx::array>&)>;
  static thread_local std::map<std::pair<Activation, int>, Node> nodes;
  const auto stream = mx::to_stream(s);
  auto& node = nodes[{activation, stream.index}];
  if (!node) {
    std::function<std::vector<mx::array>(const std::vector<mx::array>&)> formula =
        [activation, stream](const std::vector<mx::array>& in) {
          return std::vector<mx::array>{mx::multiply(activate(activation, in[0], stream), in[1], stream)};
        };
    node = mx::compile(formula, true);
  }
  return node({gate, up})[0];
}

} // namespace cleave
