#include "cleave/units/reference/reference_unit.h"

#include <cmath>
#include <stdexcept>

namespace cleave {

namespace {

/// Sixteen partial sums: the compiler may vectorise, and the error grows slower than that of one long chain.
float dot(const float* a, const float* b, int64_t n) {
  constexpr int lanes = 16;
  float sums[lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    for (int l = 0; l < lanes; ++l) {
      sums[l] += a[i + l] * b[i + l];
    }
  }
  double total = 0;
  for (float s : sums) {
    total += s;
  }
  for (; i < n; ++i) {
    total += double(a[i]) * b[i];
  }
  return static_cast<float>(total);
}

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

using Floats = std::vector<float>;

Floats to_floats(const ConstMatrix& x) {
  Floats out(x.rows * x.cols);
  with_type(x.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t r = 0; r < x.rows; ++r) {
      const T* from = static_cast<const T*>(x.data) + r * x.stride;
      for (int64_t c = 0; c < x.cols; ++c) {
        out[r * x.cols + c] = static_cast<float>(from[c]);
      }
    }
  });
  return out;
}

void store(const Floats& values, const Matrix& to) {
  with_type(to.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t r = 0; r < to.rows; ++r) {
      T* row = static_cast<T*>(to.data) + r * to.stride;
      for (int64_t c = 0; c < to.cols; ++c) {
        row[c] = static_cast<T>(values[r * to.cols + c]);
      }
    }
  });
}

/// x [m, k] -> [m, n]
Floats multiply(const Floats& x, int64_t m, const LinearWeight& w) {
  const int64_t n = w.n(), k = w.k();
  Floats y(m * n), row(k), bias(n);
  if (w.bias) {
    unpack_vector(*w.bias, bias.data());
  }
  for (int64_t j = 0; j < n; ++j) {
    unpack_row(w, static_cast<int>(j), row.data());
    for (int64_t i = 0; i < m; ++i) {
      y[i * n + j] = dot(x.data() + i * k, row.data(), k) + bias[j];
    }
  }
  return y;
}

class ReferenceProgram : public KernelProgram {
 public:
  ReferenceProgram(const ProgramSpec& spec, std::vector<LinearWeight> weights)
      : spec_(spec), weights_(std::move(weights)) {}

  size_t bytes() const override {
    return 0;
  }

  void run(const ConstMatrix& x, std::span<const Matrix> outputs) override {
    const Floats in = to_floats(x);
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
