#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

#include "cleave/activation.h"
#include "cleave/kernels/table.h"
#include "util.h"

// What the tests of kernels/ share: numbers, and what they should become in double precision.
namespace cleave::test {

using Floats = std::vector<float>;

inline constexpr float inf = std::numeric_limits<float>::infinity();
inline const float nan = std::nanf("");
inline const std::vector<mx::Dtype> dtypes{mx::float32, mx::float16, mx::bfloat16};
inline const std::vector<Activation> activations{
    Activation::silu, Activation::gelu, Activation::gelu_tanh, Activation::relu};

inline Floats random_floats(Random& random, int64_t n, float scale = 1) {
  std::normal_distribution<float> distribution(0, scale);
  Floats out(n);
  for (auto& x : out) {
    x = distribution(random);
  }
  return out;
}

/// |got - expected| within `relative` of the expected or of `least`, whichever is larger.
inline testing::AssertionResult near(double got, double expected, double relative, double least = 1e-3) {
  if (std::isnan(got) || std::isnan(expected) || std::isinf(got) || std::isinf(expected)) {
    if (got == expected || (std::isnan(got) && std::isnan(expected))) {
      return testing::AssertionSuccess();
    }
  } else if (std::abs(got - expected) <= relative * std::max(std::abs(expected), least)) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << got << " is not " << expected;
}

inline double activate(Activation activation, double v) {
  switch (activation) {
    case Activation::silu:
      return v / (1 + std::exp(-v));
    case Activation::gelu:
      return 0.5 * v * (1 + std::erf(v / std::numbers::sqrt2));
    case Activation::gelu_tanh:
      return 0.5 * v * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (v + 0.044715 * v * v * v)));
    case Activation::relu:
      return std::isnan(v) ? v : std::max(v, 0.0);
  }
  return 0;
}

inline double rms_factor(const Floats& x, double eps) {
  double sum = 0;
  for (double v : x) {
    sum += v * v;
  }
  return 1 / std::sqrt(sum / static_cast<double>(x.size()) + eps);
}

inline float widened(uint16_t bfloat) {
  const uint32_t word = uint32_t(bfloat) << 16;
  float out;
  std::memcpy(&out, &word, sizeof(out));
  return out;
}

/// Relative error of a result in a dtype.
inline double step_of(mx::Dtype dtype) {
  return dtype == mx::float32 ? 3e-6 : dtype == mx::float16 ? 0x1p-11 * 1.01 : 0x1p-8 * 1.01;
}

/// A test that runs once per target.
class EachTarget : public testing::TestWithParam<const kernels::Table*> {
 protected:
  const kernels::Table& t = *GetParam();
  Random random{static_cast<unsigned>(t.lanes)};
};

inline std::vector<const kernels::Table*> all_tables() {
  std::vector<const kernels::Table*> out;
  for (auto* t = kernels::tables(); *t; ++t) {
    out.push_back(*t);
  }
  return out;
}
inline std::string name_of(const testing::TestParamInfo<const kernels::Table*>& info) {
  return info.param->name;
}

} // namespace cleave::test
