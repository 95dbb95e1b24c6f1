#pragma once

#include "cleave/unit/program.h"
#include "cleave/units/cpu/onednn_gemm.h"

namespace cleave::onednn {

/// Columns [begin, begin + cols) of a matrix.
inline ConstMatrix columns(const Matrix& m, int64_t begin, int64_t cols) {
  return {
      static_cast<char*>(m.data) + begin * static_cast<int64_t>(mx::size_of(m.dtype)), m.dtype, m.rows, cols, m.stride};
}

/// What the programs of the unit have in common: products with scratch memory on the unit's cores.
class CpuProgram {
 public:
  CpuProgram(std::shared_ptr<Workshop> workshop, const ProgramSpec& spec)
      : workshop_(std::move(workshop)), spec_(spec) {}

 protected:
  /// Slots of the scratch memory; an operand takes two.
  enum Scratch { input, input_scales, middle, middle_scales, result, wide };

  Matrix scratch(Scratch slot, int64_t rows, int64_t cols, mx::Dtype dtype = mx::float32) {
    return {workshop_->scratch(slot, rows * cols * mx::size_of(dtype)), dtype, rows, cols, cols};
  }
  /// The product into any matrix, by way of scratch memory where oneDNN cannot write it.
  void multiply(Gemm& gemm, const dnnl::stream& stream, const Operand& x, const Matrix& y);

  std::shared_ptr<Workshop> workshop_;
  ProgramSpec spec_;
};

std::shared_ptr<Program> linear_program(
    std::shared_ptr<Workshop> workshop,
    const ProgramSpec& spec,
    const Arithmetic& arithmetic,
    const std::vector<LinearWeight>& weights);

std::shared_ptr<Program> mlp_program(
    std::shared_ptr<Workshop> workshop,
    const ProgramSpec& spec,
    const Arithmetic& arithmetic,
    const std::vector<LinearWeight>& weights);

std::shared_ptr<Program> attention_program(
    std::shared_ptr<Workshop> workshop,
    const ProgramSpec& spec,
    const Arithmetic& arithmetic,
    const std::vector<LinearWeight>& weights);

/// False for activations that an arithmetic chosen as exact for spec.dtype could overflow on, or would round.
inline bool accepts_dtype(mx::Dtype x, const ProgramSpec& spec, const Arithmetic& arithmetic) {
  if (spec.precision != Precision::exact || arithmetic.dtype == mx::float32 || x == spec.dtype) {
    return is_activation_dtype(x);
  }
  return is_activation_dtype(x) && arithmetic.products > 1 && x != mx::float32;
}

} // namespace cleave::onednn
