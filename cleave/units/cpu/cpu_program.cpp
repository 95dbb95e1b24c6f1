#include "cleave/units/cpu/cpu_program.h"

#include <array>

#include "cleave/kernels/convert.h"
#include "cleave/kernels/kernels.h"
#include "cleave/units/cpu/in_place.h"

namespace cleave::onednn {

void CpuProgram::multiply(Gemm& gemm, const dnnl::stream& stream, const Operand& x, const Matrix& y) {
  const bool direct = gemm.takes(y);
  const auto to = direct ? y : scratch(result, y.rows, y.cols);
  gemm.run(stream, x, to);
  if (const auto rest = gemm.rest(x); rest.scales) {
    kernels::scale_rows(columns(to, 0, to.cols), rest, y);
  } else if (!direct) {
    convert(columns(to, 0, to.cols), y);
  }
}

namespace {

/// Up to so many tokens the reading of the weights decides, and packed ones are the fewest bytes.
constexpr int64_t kFewRows = 8;

/// A program that works tile by tile: scratch stays small and in cache, and few primitives serve every length.
class TiledProgram : public KernelProgram, protected CpuProgram {
 public:
  using CpuProgram::CpuProgram;

  void run(const ConstMatrix& x, std::span<const Matrix> outputs, const Past&) override {
    std::lock_guard lock(workshop_->mutex());
    workshop_->enter();
    dnnl::stream stream(cpu_engine());
    std::vector<Matrix> to(outputs.begin(), outputs.end());
    for (int64_t begin = 0; begin < x.rows; begin += spec_.tile) {
      const int64_t rows = std::min<int64_t>(spec_.tile, x.rows - begin);
      for (size_t i = 0; i < outputs.size(); ++i) {
        to[i] = slice(outputs[i], begin, rows);
      }
      run_tile(stream, slice(x, begin, rows), to);
    }
  }

 private:
  virtual void run_tile(const dnnl::stream& stream, const ConstMatrix& x, std::span<const Matrix> outputs) = 0;
};

class LinearProgram : public TiledProgram {
 public:
  LinearProgram(
      std::shared_ptr<Workshop> workshop,
      const ProgramSpec& spec,
      const Arithmetic& arithmetic,
      const std::vector<LinearWeight>& weights)
      : TiledProgram(std::move(workshop), spec), in_place_(weights) {
    for (const auto& w : weights) {
      gemms_.emplace_back(std::vector<LinearWeight>{w}, arithmetic, spec.tile, spec.packed);
    }
  }
  size_t bytes() const override {
    size_t total = 0;
    for (const auto& g : gemms_) {
      total += g.bytes();
    }
    return total;
  }
  bool accepts(mx::Dtype x) const override {
    return accepts_dtype(x, spec_, gemms_[0].arithmetic());
  }
  std::string arithmetic() const override {
    return gemms_[0].arithmetic().name();
  }

 private:
  void run_tile(const dnnl::stream& stream, const ConstMatrix& x, std::span<const Matrix> outputs) override {
    if (x.rows <= kFewRows && in_place_.multiply(x, outputs)) {
      return;
    }
    const auto operand = gemms_[0].prepare(x, *workshop_, input);
    for (size_t i = 0; i < gemms_.size(); ++i) {
      multiply(gemms_[i], stream, operand, outputs[i]);
    }
  }

  InPlace in_place_;
  std::vector<Gemm> gemms_;
};

class MlpProgram : public TiledProgram {
 public:
  MlpProgram(
      std::shared_ptr<Workshop> workshop,
      const ProgramSpec& spec,
      const Arithmetic& arithmetic,
      const std::vector<LinearWeight>& weights)
      : TiledProgram(std::move(workshop), spec),
        gate_up_({weights[0], weights[1]}, arithmetic, spec.tile, spec.packed),
        down_({weights[2]}, arithmetic, spec.tile, spec.packed),
        gate_up_in_place_({weights[0], weights[1]}),
        down_in_place_({weights[2]}) {}

  size_t bytes() const override {
    return gate_up_.bytes() + down_.bytes();
  }
  bool accepts(mx::Dtype x) const override {
    return accepts_dtype(x, spec_, gate_up_.arithmetic());
  }
  std::string arithmetic() const override {
    return gate_up_.arithmetic().name();
  }

 private:
  void run_tile(const dnnl::stream& stream, const ConstMatrix& x, std::span<const Matrix> outputs) override {
    const int64_t h = spec_.hidden;
    auto both = scratch(wide, x.rows, 2 * h);
    const std::array<Matrix, 2> halves{
        Matrix{both.data, both.dtype, x.rows, h, both.stride},
        Matrix{static_cast<float*>(both.data) + h, both.dtype, x.rows, h, both.stride}};
    const bool few = x.rows <= kFewRows;
    kernels::GateUp gate_up{columns(both, 0, h), columns(both, h, h)};
    if (!few || !gate_up_in_place_.multiply(x, halves)) {
      const auto operand = gate_up_.prepare(x, *workshop_, input);
      gate_up_.run(stream, operand, both);
      gate_up.rest = gate_up_.rest(operand);
    }
    const auto dtype = down_.arithmetic().dtype;
    if (!few && dtype == mx::int8) {
      const auto codes = scratch(middle, x.rows, h, dtype), scales = scratch(middle_scales, x.rows, 1);
      kernels::gated(spec_.activation, gate_up, static_cast<int8_t*>(codes.data), static_cast<float*>(scales.data));
      multiply(down_, stream, {columns(codes, 0, h), nullptr, static_cast<float*>(scales.data)}, outputs[0]);
      return;
    }
    // In place where down takes float32: an element of gate is read before it is written.
    const bool narrow = !few && down_.arithmetic().products == 1 && dtype != mx::float32;
    const Matrix hidden = narrow ? scratch(middle, x.rows, h, dtype) : halves[0];
    kernels::gated(spec_.activation, gate_up, hidden);
    if (!few || !down_in_place_.multiply(columns(hidden, 0, h), outputs)) {
      multiply(down_, stream, down_.prepare(columns(hidden, 0, h), *workshop_, middle), outputs[0]);
    }
  }

  Gemm gate_up_, down_;
  InPlace gate_up_in_place_, down_in_place_;
};

} // namespace

std::shared_ptr<Program> linear_program(
    std::shared_ptr<Workshop> workshop,
    const ProgramSpec& spec,
    const Arithmetic& arithmetic,
    const std::vector<LinearWeight>& weights) {
  return std::make_shared<LinearProgram>(std::move(workshop), spec, arithmetic, weights);
}

std::shared_ptr<Program> mlp_program(
    std::shared_ptr<Workshop> workshop,
    const ProgramSpec& spec,
    const Arithmetic& arithmetic,
    const std::vector<LinearWeight>& weights) {
  return std::make_shared<MlpProgram>(std::move(workshop), spec, arithmetic, weights);
}

} // namespace cleave::onednn
