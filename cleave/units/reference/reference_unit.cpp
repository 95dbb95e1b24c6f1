#include "cleave/units/reference/reference_unit.h"

#include <cmath>
#include <stdexcept>

#include "cleave/units/reference/reference_math.h"

namespace cleave {

namespace {

float activate(Activation activation, float v) {
  switch (activation) {
    case Activation::silu:
      return v / (1.0f + std::exp(-v));
    case Activation::gelu:
      return 0.5f * v * (1.0f + std::erf(v * 0.70710678f));
    case Activation::gelu_tanh: // the tanh form of Hendrycks & Gimpel, "Gaussian Error Linear Units"
      return 0.5f * v * (1.0f + std::tanh(0.79788456f * (v + 0.044715f * v * v * v)));
    case Activation::relu:
      return v > 0 ? v : 0;
  }
  return v;
}

class ReferenceProgram : public KernelProgram {
 public:
  ReferenceProgram(const ProgramSpec& spec, std::vector<LinearWeight> weights)
      : spec_(spec), weights_(std::move(weights)) {}

  size_t bytes() const override {
    return 0;
  }

  void run(const ConstMatrix& x, std::span<const Matrix> outputs, const Past& past) override {
    const Floats in = to_floats(x);
    if (spec_.kind == SiteKind::attention) {
      reference_attention(*spec_.attention, weights_, in, x.rows, past, outputs);
      return;
    }
    if (spec_.kind == SiteKind::linear_group) {
      for (size_t i = 0; i < outputs.size(); ++i) {
        store(multiply(in, x.rows, weights_[i]), outputs[i]);
      }
      return;
    }
    Floats hidden = multiply(in, x.rows, weights_[0]);
    const Floats up = multiply(in, x.rows, weights_[1]);
    for (size_t i = 0; i < hidden.size(); ++i) {
      hidden[i] = activate(spec_.activation, hidden[i]) * up[i];
    }
    store(multiply(hidden, x.rows, weights_[2]), outputs[0]);
  }

 private:
  ProgramSpec spec_;
  std::vector<LinearWeight> weights_;
};

class ReferenceUnit : public Unit {
 public:
  using Unit::Unit;

  std::string description() const override {
    return "plain loops in fp32, the oracle";
  }
  std::optional<std::string> refusal(const ProgramSpec&) const override {
    return std::nullopt;
  }
  size_t memory(const ProgramSpec&) const override {
    return 0;
  }
  std::shared_ptr<Program> compile(const ProgramSpec& spec, const std::vector<LinearWeight>& weights) override {
    return reference_program(spec, weights);
  }
};

} // namespace

std::shared_ptr<KernelProgram> reference_program(const ProgramSpec& spec, std::vector<LinearWeight> weights) {
  return std::make_shared<ReferenceProgram>(spec, std::move(weights));
}

std::shared_ptr<Unit> make_reference_unit(const std::string& name, const std::string& options) {
  if (!options.empty()) {
    throw std::invalid_argument("[make_unit] got '" + name + "' and needs 'reference' without options");
  }
  return std::make_shared<ReferenceUnit>(name);
}

} // namespace cleave
