// Kernels over rows against double precision: one row on every instruction set that this processor runs, matrices in
// all dtypes and strides.
#include "cleave/kernels/kernels.h"

#include <cfloat>

#include "kernels_util.h"

namespace cleave::test {
namespace {

namespace portable {
constexpr int kLanes = 4;
#include "cleave/kernels/simd.inl"
} // namespace portable

using kernels::Table;

const std::vector<int64_t> odd_sizes{1, 3, 4, 7, 8, 15, 16, 17, 31, 33, 64, 100, 257};

auto gate_of(const Table& t, Activation activation) {
  switch (activation) {
    case Activation::silu:
      return t.gated_silu;
    case Activation::gelu:
      return t.gated_gelu;
    case Activation::gelu_tanh:
      return t.gated_gelu_tanh;
    case Activation::relu:
      return t.gated_relu;
  }
  return t.gated_relu;
}

// ---- 2^x ----------------------------------------------------------------------------------------

float exp2_of(float x) {
  return portable::exp2(portable::all(x))[0];
}

TEST(Exp2, StaysWithinItsErrorBound) {
  double worst = 0;
  for (int i = -126 * 1024; i < 128 * 1024; ++i) {
    for (float x : {i / 1024.0f, i / 1024.0f + 0.000371f}) {
      const double exact = std::exp2(static_cast<double>(x));
      if (x >= -126 && exact <= FLT_MAX) {
        worst = std::max(worst, std::abs(exp2_of(x) / exact - 1));
      }
    }
  }
  EXPECT_LT(worst, 2.5e-7);
  EXPECT_GT(worst, 0);
}

TEST(Exp2, EndsAtZeroInfinityAndNan) {
  for (float x : {-126.01f, -1000.0f, -FLT_MAX, -inf}) {
    EXPECT_EQ(exp2_of(x), 0) << x;
  }
  for (float x : {128.0f, 1000.0f, FLT_MAX, inf}) {
    EXPECT_EQ(exp2_of(x), inf) << x;
  }
  EXPECT_EQ(exp2_of(-126), FLT_MIN);
  EXPECT_EQ(exp2_of(127), 0x1p127f);
  EXPECT_TRUE(std::isnan(exp2_of(nan)));
}

// ---- rows, on each target -----------------------------------------------------------------------

using Rows = EachTarget;
INSTANTIATE_TEST_SUITE_P(Kernels, Rows, testing::ValuesIn(all_tables()), name_of);

TEST(Targets, TheBestOfThemIsInUseAndTheLastRunsAnywhere) {
  const auto all = all_tables();
  EXPECT_EQ(&kernels::table(), all.front());
  EXPECT_STREQ(kernels::instruction_set(), all.front()->name);
  EXPECT_STREQ(all.back()->name, "generic");
}

TEST_P(Rows, Gated) {
  for (auto activation : activations) {
    for (auto n : odd_sizes) {
      const auto gate = random_floats(random, n, 4), up = random_floats(random, n);
      Floats out(n + 1, 5);
      gate_of(t, activation)(gate.data(), up.data(), out.data(), n);
      for (int64_t i = 0; i < n; ++i) {
        // Tanh of fp32 is 1 - 2 / (1 + e^2z): what is left of 1 near -1 has an absolute error.
        EXPECT_TRUE(near(out[i], activate(activation, gate[i]) * up[i], 3e-6, std::abs(gate[i] * up[i])))
            << to_string(activation) << " of " << gate[i];
      }
      EXPECT_EQ(out[n], 5) << "behind the row";
    }
  }
}

TEST_P(Rows, GatedAtTheEndsOfTheNumbers) {
  const Floats gate{inf, FLT_MAX, 1e30f, 200, 89, -89, -200, -1e30f, -FLT_MAX, nan, 0, -0.0f, FLT_MIN};
  const Floats up(gate.size(), 1);
  for (auto activation : activations) {
    Floats out(gate.size());
    gate_of(t, activation)(gate.data(), up.data(), out.data(), static_cast<int64_t>(gate.size()));
    for (size_t i = 0; i < gate.size(); ++i) {
      EXPECT_TRUE(near(out[i], activate(activation, gate[i]), 1e-6)) << to_string(activation) << " of " << gate[i];
    }
    const float low = -inf;
    gate_of(t, activation)(&low, up.data(), out.data(), 1);
    if (activation == Activation::relu) {
      EXPECT_EQ(out[0], 0);
    } else {
      EXPECT_TRUE(std::isnan(out[0])) << to_string(activation); // infinity times 0, as mlx says
    }
  }
}

TEST_P(Rows, RmsNorm) {
  for (auto n : odd_sizes) {
    const auto x = random_floats(random, n), weight = random_floats(random, n);
    const double factor = rms_factor(x, 1e-5);
    for (const float* w : {weight.data(), static_cast<const float*>(nullptr)}) {
      Floats y(n + 1, 5);
      t.rms_norm(x.data(), w, 1e-5f, y.data(), n);
      for (int64_t i = 0; i < n; ++i) {
        EXPECT_TRUE(near(y[i], x[i] * factor * (w ? w[i] : 1), 2e-6)) << n;
      }
      EXPECT_EQ(y[n], 5) << "behind the row";
    }
  }
}

TEST_P(Rows, RmsNormOfNumbersThatAreNotFiniteOrWhoseSquaresAreNot) {
  for (int64_t at : {0, 40}) { // in a vector, and in what is left of the row
    Floats x(41, 1), y(41);
    x[at] = nan;
    t.rms_norm(x.data(), nullptr, 1e-5f, y.data(), 41);
    EXPECT_EQ(std::count_if(y.begin(), y.end(), [](float v) { return std::isnan(v); }), 41);
    x[at] = inf;
    t.rms_norm(x.data(), nullptr, 1e-5f, y.data(), 41);
    EXPECT_TRUE(std::isnan(y[at]));
    EXPECT_EQ(std::count(y.begin(), y.end(), 0.0f), 40);
    x[at] = FLT_MAX; // as in fp32: the mean is infinite
    t.rms_norm(x.data(), nullptr, 1e-5f, y.data(), 41);
    EXPECT_EQ(std::count(y.begin(), y.end(), 0.0f), 41);
  }
}

TEST_P(Rows, AddAndScale) {
  for (auto n : odd_sizes) {
    const auto a = random_floats(random, n), b = random_floats(random, n);
    Floats y(n + 1, 5);
    t.add(a.data(), b.data(), y.data(), n);
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_EQ(y[i], a[i] + b[i]);
    }
    for (const float* bias : {b.data(), static_cast<const float*>(nullptr)}) {
      t.scale(a.data(), y.data(), 0.3f, bias, n);
      for (int64_t i = 0; i < n; ++i) {
        EXPECT_TRUE(near(y[i], double(a[i]) * 0.3f + (bias ? bias[i] : 0.0), 1e-6, 1));
      }
    }
    EXPECT_EQ(y[n], 5) << "behind the row";
  }
}

TEST_P(Rows, RopeTurnsPairs) {
  for (int64_t half : odd_sizes) {
    const auto x = random_floats(random, 2 * half), angles = random_floats(random, half, 3);
    Floats cosine(half), sine(half);
    for (int64_t i = 0; i < half; ++i) {
      cosine[i] = std::cos(angles[i]);
      sine[i] = std::sin(angles[i]);
    }
    for (bool traditional : {false, true}) {
      auto y = x;
      t.rope(y.data(), cosine.data(), sine.data(), half, traditional);
      for (int64_t i = 0; i < half; ++i) {
        const int64_t a = traditional ? 2 * i : i, b = traditional ? 2 * i + 1 : i + half;
        EXPECT_TRUE(near(y[a], double(x[a]) * cosine[i] - double(x[b]) * sine[i], 1e-6, 1));
        EXPECT_TRUE(near(y[b], double(x[b]) * cosine[i] + double(x[a]) * sine[i], 1e-6, 1));
      }
    }
  }
}

TEST_P(Rows, SplitKeepsSixteenBits) {
  for (auto n : odd_sizes) {
    auto x = random_floats(random, n, 100);
    x[0] = n % 2 ? FLT_MAX : -FLT_MAX;
    std::vector<uint16_t> high(n), low(n);
    EXPECT_TRUE(t.split(x.data(), high.data(), low.data(), n));
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_TRUE(near(double(widened(high[i])) + widened(low[i]), x[i], 0x1p-16, 0)) << x[i];
    }
    for (auto& v : x) {
      v = widened(0x4049);
    }
    EXPECT_FALSE(t.split(x.data(), high.data(), low.data(), n)) << "bfloat16 numbers have no rest";
  }
}

TEST_P(Rows, SplitPutsWhatIsNotFiniteIntoHigh) {
  const uint32_t hidden_bits = 0x7f800001; // a NaN that lives in the bits cut off
  float hidden;
  std::memcpy(&hidden, &hidden_bits, sizeof(hidden));
  for (float v : {inf, -inf, nan, hidden}) {
    const Floats x(19, v);
    std::vector<uint16_t> high(19), low(19);
    EXPECT_FALSE(t.split(x.data(), high.data(), low.data(), 19));
    for (auto h : high) {
      EXPECT_TRUE(near(widened(h), v, 0)) << v;
    }
  }
}

TEST_P(Rows, QuantizeErrsByHalfAStep) {
  for (auto n : odd_sizes) {
    for (float size : {1.0f, 1e-30f, 1e30f}) {
      const auto x = random_floats(random, n, size);
      std::vector<int8_t> codes(n + 1, 99);
      const float scale = t.quantize(x.data(), codes.data(), n);
      int top = 0;
      for (int64_t i = 0; i < n; ++i) {
        EXPECT_LE(std::abs(double(codes[i]) * scale - x[i]), 0.5001 * scale) << x[i];
        top = std::max(top, std::abs(int(codes[i])));
      }
      EXPECT_EQ(top, 127);
      EXPECT_EQ(codes[n], 99) << "behind the row";
    }
  }
}

TEST_P(Rows, QuantizeAtTheEndsOfTheNumbers) {
  for (int64_t at : {0, 20}) {
    for (float v : {inf, -inf, nan}) {
      Floats x(21, 1);
      x[at] = v;
      std::vector<int8_t> codes(21);
      EXPECT_TRUE(std::isnan(t.quantize(x.data(), codes.data(), 21))) << v;
    }
  }
  std::vector<int8_t> codes(2);
  EXPECT_EQ(t.quantize(Floats{0, 0}.data(), codes.data(), 2), 0);
  EXPECT_EQ(codes, std::vector<int8_t>(2));
  const float scale = t.quantize(Floats{FLT_MAX, -FLT_MAX}.data(), codes.data(), 2);
  EXPECT_TRUE(near(scale, FLT_MAX / 127.0, 1e-6));
  EXPECT_EQ(codes, (std::vector<int8_t>{127, -127}));
  const float tiny = t.quantize(Floats{1e-40f, -1e-40f}.data(), codes.data(), 2); // 127 / 1e-40 is infinite
  EXPECT_LE(std::abs(codes[0] * tiny - 1e-40f), FLT_MIN);
}

TEST_P(Rows, Bfloat16RoundsToEvenAndKeepsNan) {
  const Floats x{1.0f + 0x1p-8f, 1.0f + 3 * 0x1p-8f, -0.0f, FLT_MAX, inf, -inf, nan, 3.14159f, 1e-40f};
  for (size_t n = 1; n <= x.size(); ++n) {
    std::vector<uint16_t> narrow(n);
    Floats back(n);
    t.round_bf16(x.data(), narrow.data(), static_cast<int64_t>(n));
    t.widen_bf16(narrow.data(), back.data(), static_cast<int64_t>(n));
    for (size_t i = 0; i < n; ++i) {
      EXPECT_TRUE(near(back[i], static_cast<float>(mx::bfloat16_t(x[i])), 0)) << x[i];
    }
  }
}

// ---- matrices of all dtypes and strides ---------------------------------------------------------

/// rows x cols numbers of a wider matrix.
struct Block {
  mx::array a;
  int64_t rows, cols;
  std::vector<double> values;

  Block(Random& random, mx::Dtype dtype, int rows, int cols, int gap)
      : a(normal(random, {rows, cols + gap}, dtype)), rows(rows), cols(cols), values(read()) {}
  std::vector<double> read() const {
    return to_doubles(mx::slice(a, {0, 0}, {int(rows), int(cols)}));
  }
  std::vector<double> gap() const {
    return to_doubles(mx::slice(a, {0, int(cols)}, a.shape()));
  }
  ConstMatrix in() const {
    return {a.data<void>(), a.dtype(), rows, cols, a.shape(1)};
  }
  Matrix out() {
    return {a.data<void>(), a.dtype(), rows, cols, a.shape(1)};
  }
};

class Matrices : public testing::TestWithParam<std::tuple<mx::Dtype, mx::Dtype>> {
 protected:
  static constexpr int rows = 5, cols = 37;
  Random random{12};
  mx::Dtype from = std::get<0>(GetParam()), to = std::get<1>(GetParam());
  Block x{random, from, rows, cols, 3}, other{random, to, rows, cols, 1}, y{random, to, rows, cols, 2};
  std::vector<double> gap = y.gap();

  /// y against expected(row, column), and nothing written between the rows.
  template <typename F>
  void expect(const F& expected) {
    const auto got = y.read();
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < cols; ++c) {
        EXPECT_TRUE(near(got[r * cols + c], expected(r, c), step_of(to), 1)) << "at " << r << ", " << c;
      }
    }
    EXPECT_EQ(y.gap(), gap);
  }
};
INSTANTIATE_TEST_SUITE_P(Kernels, Matrices, testing::Combine(testing::ValuesIn(dtypes), testing::ValuesIn(dtypes)));

TEST_P(Matrices, RmsNorm) {
  const auto weight = random_floats(random, cols);
  kernels::rms_norm(x.in(), weight.data(), 1e-5f, y.out());
  expect([&](int r, int c) {
    const Floats row(x.values.begin() + r * cols, x.values.begin() + (r + 1) * cols);
    return x.values[r * cols + c] * rms_factor(row, 1e-5) * weight[c];
  });
}

TEST_P(Matrices, Add) {
  kernels::add(x.in(), other.in(), y.out());
  expect([&](int r, int c) { return x.values[r * cols + c] + other.values[r * cols + c]; });
}

TEST_P(Matrices, GatedWithAndWithoutScales) {
  const auto scales = random_floats(random, rows), bias = random_floats(random, 2 * cols);
  for (auto activation : activations) {
    for (int form : {0, 1, 2}) {
      kernels::RowScale rest;
      rest.scales = form ? scales.data() : nullptr;
      rest.bias = form == 2 ? bias.data() : nullptr;
      kernels::gated(activation, {x.in(), other.in(), rest}, y.out());
      expect([&](int r, int c) {
        double gate = x.values[r * cols + c], up = other.values[r * cols + c];
        if (form) {
          gate = gate * scales[r] + (form == 2 ? bias[c] : 0);
          up = up * scales[r] + (form == 2 ? bias[cols + c] : 0);
        }
        return activate(activation, gate) * up;
      });
    }
  }
}

TEST_P(Matrices, GatedInCodesIsGatedAndThenQuantized) {
  std::vector<int8_t> codes(rows * cols);
  Floats scales(rows);
  kernels::gated(Activation::silu, {x.in(), other.in()}, codes.data(), scales.data());
  for (int i = 0; i < rows * cols; ++i) {
    const double exact = activate(Activation::silu, x.values[i]) * other.values[i];
    EXPECT_LE(std::abs(codes[i] * double(scales[i / cols]) - exact), 0.501 * scales[i / cols]);
  }
}

TEST_P(Matrices, SplitAndQuantizeRows) {
  std::vector<uint16_t> high(rows * cols), low(rows * cols);
  EXPECT_EQ(kernels::split(x.in(), high.data(), low.data()), from != mx::bfloat16);
  std::vector<int8_t> codes(rows * cols);
  Floats scales(rows);
  kernels::quantize_rows(x.in(), codes.data(), scales.data());
  for (int i = 0; i < rows * cols; ++i) {
    EXPECT_TRUE(near(double(widened(high[i])) + widened(low[i]), x.values[i], 0x1p-16, 0));
    EXPECT_LE(std::abs(codes[i] * double(scales[i / cols]) - x.values[i]), 0.501 * scales[i / cols]);
  }
}

TEST_P(Matrices, ScaleRows) {
  Block floats(random, mx::float32, rows, cols, 4);
  const auto scales = random_floats(random, rows), bias = random_floats(random, cols);
  for (const float* b : {bias.data(), static_cast<const float*>(nullptr)}) {
    kernels::scale_rows(floats.in(), {scales.data(), b}, y.out());
    expect([&](int r, int c) { return floats.values[r * cols + c] * scales[r] + (b ? b[c] : 0); });
  }
}

} // namespace
} // namespace cleave::test
