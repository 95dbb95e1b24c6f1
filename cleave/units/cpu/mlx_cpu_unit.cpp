#include <stdexcept>

#include "cleave/unit/gated.h"
#include "cleave/units/cpu/cpu_unit.h"

namespace cleave {

namespace {

class MlxCpuProgram : public GraphProgram {
 public:
  MlxCpuProgram(const ProgramSpec& spec, const std::vector<LinearWeight>& weights) : spec_(spec) {
    for (const auto& w : weights) {
      weights_.push_back(to_fp32(w));
      bytes_ += weights_.back().weight.nbytes();
    }
  }

  size_t bytes() const override {
    return bytes_;
  }

  std::vector<mx::array> graph(const mx::array& x, const std::vector<mx::Dtype>& out, mx::Stream s) override {
    const auto in = mx::astype(x, mx::float32, s);
    std::vector<mx::array> results;
    if (spec_.kind == SiteKind::mlp) {
      auto hidden = gated(spec_.activation, weights_[0].linear(in, s), weights_[1].linear(in, s), s);
      results.push_back(mx::astype(weights_[2].linear(hidden, s), out[0], s));
      return results;
    }
    for (size_t i = 0; i < weights_.size(); ++i) {
      results.push_back(mx::astype(weights_[i].linear(in, s), out[i], s));
    }
    return results;
  }

 private:
  static LinearWeight to_fp32(const LinearWeight& w) {
    std::vector<float> values(size_t(w.n()) * w.k());
    for (int row = 0; row < w.n(); ++row) {
      unpack_row(w, row, values.data() + size_t(row) * w.k());
    }
    LinearWeight dense{mx::array(values.data(), {w.n(), w.k()}, mx::float32)};
    if (w.bias) {
      std::vector<float> bias(w.n());
      unpack_vector(*w.bias, bias.data());
      dense.bias = mx::array(bias.data(), {w.n()}, mx::float32);
    }
    return dense;
  }

  ProgramSpec spec_;
  std::vector<LinearWeight> weights_;
  size_t bytes_ = 0;
};

class MlxCpuUnit : public Unit {
 public:
  using Unit::Unit;

  std::string description() const override {
    return "mlx's own product in fp32 on a CPU stream";
  }
  std::optional<std::string> refusal(const ProgramSpec& spec) const override {
    if (spec.kind == SiteKind::attention) {
      return "it takes linear groups and mlps, no attention";
    }
    return std::nullopt;
  }
  size_t memory(const ProgramSpec& spec) const override {
    return spec.parameters() * sizeof(float);
  }
  std::shared_ptr<Program> compile(const ProgramSpec& spec, const std::vector<LinearWeight>& weights) override {
    return std::make_shared<MlxCpuProgram>(spec, weights);
  }
};

} // namespace

std::shared_ptr<Unit> make_mlx_cpu_unit(const std::string& name, const std::string& options) {
  if (!options.empty()) {
    throw std::runtime_error("[make_unit] got '" + name + "', but mlx's own product cannot be pinned to cores");
  }
  return std::make_shared<MlxCpuUnit>(name);
}

} // namespace cleave
