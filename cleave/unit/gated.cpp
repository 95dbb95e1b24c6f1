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

using Formula = std::function<std::vector<mx::array>(const std::vector<mx::array>&)>;

/// Whether mlx can compile for a device. Its CPU compiler runs the system's g++ on headers of its own, which some
/// versions reject (g++ 13 does with mlx-cpu 0.32.4), and only a trial shows it.
bool can_compile(mx::Device device) {
  if (device == mx::Device::gpu) {
    return true;
  }
  static const bool works = [] {
    try {
      Formula trial = [](const std::vector<mx::array>& in) {
        return std::vector<mx::array>{mx::multiply(mx::sigmoid(in[0]), in[1])};
      };
      auto x = mx::ones({2});
      mx::eval(mx::compile(trial, true)({x, x}));
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }();
  return works;
}

} // namespace

mx::array gated(Activation activation, const mx::array& gate, const mx::array& up, mx::StreamOrDevice s) {
  // mlx keeps what it compiled per thread, and streams belong to a thread too.
  static thread_local std::map<std::pair<Activation, int>, Formula> formulas;
  const auto stream = mx::to_stream(s);
  auto& formula = formulas[{activation, stream.index}];
  if (!formula) {
    formula = [activation, stream](const std::vector<mx::array>& in) {
      return std::vector<mx::array>{mx::multiply(activate(activation, in[0], stream), in[1], stream)};
    };
    if (can_compile(stream.device)) {
      formula = mx::compile(formula, true);
    }
  }
  return formula({gate, up})[0];
}

} // namespace cleave
