#include "cleave/kernels/packed.h"

#include <cmath>
#include <limits>
#include <span>

#include "cleave/kernels/kernels.h"
#include "cleave/kernels/table.h"
#include "cleave/units/cpu/in_place.h"
#include "util.h"

namespace cleave::test {
namespace {

const std::vector<mx::Dtype> dtypes{mx::float32, mx::float16, mx::bfloat16};

std::vector<Format> formats() {
  std::vector<Format> out;
  for (auto dtype : dtypes) {
    out.push_back({dtype});
    for (int bits : {2, 3, 4, 5, 6, 8}) {
      for (int group : {32, 64, 128}) {
        out.push_back({dtype, "affine", bits, group});
      }
    }
  }
  return out;
}

LinearWeight evaluated(LinearWeight w) {
  w.check("test");
  return w;
}

std::vector<double> unpacked(const LinearWeight& w) {
  std::vector<float> row(w.k());
  std::vector<double> out;
  for (int r = 0; r < w.n(); ++r) {
    unpack_row(w, r, row.data());
    out.insert(out.end(), row.begin(), row.end());
  }
  return out;
}

/// y against x W^T + bias in double precision, within what fp32 sums of that many terms may lose.
void expect_product(
    const LinearWeight& w, const std::vector<double>& x, int m, const std::function<double(int, int)>& y, double step) {
  const auto values = unpacked(w);
  std::vector<float> bias(w.n());
  if (w.bias) {
    unpack_vector(*w.bias, bias.data());
  }
  const int n = w.n(), k = w.k();
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double sum = bias[j], size = std::abs(bias[j]);
      for (int c = 0; c < k; ++c) {
        sum += x[i * k + c] * values[j * k + c];
        size += std::abs(x[i * k + c]) * (std::abs(values[j * k + c]) + 0.5);
      }
      ASSERT_NEAR(y(i, j), sum, 4e-7 * size + step * std::abs(sum)) << "row " << i << ", channel " << j;
    }
  }
}

class PackedRows : public testing::TestWithParam<Format> {
 protected:
  Random random{91};
  const Format format = GetParam();
  /// Dense rows may end anywhere, packed ones at a group's end.
  int some_k() {
    return format.bits == 0 ? uniform(random, 1, 150) : format.group * uniform(random, 1, 9);
  }
};

TEST_P(PackedRows, MultiplyAsTheirNumbersDo) {
  for (int m = 1; m <= 9; ++m) {
    const int n = uniform(random, 1, 90), k = some_k();
    const auto x_dtype = pick(random, dtypes), y_dtype = pick(random, dtypes);
    SCOPED_TRACE(testing::Message() << m << " x " << k << " -> " << n << ", " << x_dtype << " to " << y_dtype);
    const auto w = make_weight(random, format, n, k, m % 2 == 0);
    const InPlace in_place({w});
    ASSERT_TRUE(in_place.serves());
    auto x = normal(random, {m, k + 3}, x_dtype), out = mx::zeros({m, n + 2}, y_dtype);
    mx::eval(x, out);
    const Matrix y{out.data<void>(), y_dtype, m, n, n + 2};
    ASSERT_TRUE(in_place.multiply({x.data<void>(), x_dtype, m, k, k + 3}, {&y, 1}));
    const auto got = to_doubles(out);
    const double step = y_dtype == mx::float32 ? 0 : y_dtype == mx::float16 ? 0x1p-11 : 0x1p-8;
    expect_product(
        w, to_doubles(mx::slice(x, {0, 0}, {m, k})), m, [&](int i, int j) { return got[i * (n + 2) + j]; }, step);
    for (int i = 0; i < m; ++i) {
      EXPECT_EQ(got[i * (n + 2) + n], 0) << "in the gap";
    }
  }
}

TEST_P(PackedRows, MayBeViewsOfALargerWeight) {
  const int step = format.bits == 0 ? 7 : format.group, k = 3 * step;
  const auto whole = make_weight(random, format, 40, k);
  for (const auto& part : {whole.rows(30, 40), whole.rows(0, 11), whole.columns(step, 3 * step)}) {
    const auto w = evaluated(part);
    const InPlace in_place({w});
    ASSERT_TRUE(in_place.serves());
    auto x = normal(random, {2, w.k()}), out = mx::zeros({2, w.n()});
    mx::eval(x, out);
    const Matrix y{out.data<void>(), mx::float32, 2, w.n(), w.n()};
    ASSERT_TRUE(in_place.multiply({x.data<void>(), mx::float32, 2, w.k(), w.k()}, {&y, 1}));
    const auto got = to_doubles(out);
    expect_product(
        w, to_doubles(x), 2, [&](int i, int j) { return got[i * w.n() + j]; }, 0);
  }
}

TEST_P(PackedRows, UnpackAsUnpackRowDoes) {
  const int n = 21, k = some_k();
  const auto w = make_weight(random, format, n, k);
  const auto expected = unpacked(w);
  const InPlace in_place({w});
  for (auto [begin, end] : {std::pair{0, n}, {3, 4}, {5, n}}) {
    std::vector<float> got((end - begin) * k + 1, 7.0f);
    kernels::unpack_rows(in_place.rows()[0], begin, end, got.data());
    for (int i = 0; i < (end - begin) * k; ++i) {
      // One rounding or two.
      ASSERT_NEAR(got[i], expected[begin * k + i], 1e-6) << i;
    }
    EXPECT_EQ(got.back(), 7.0f) << "behind the end";
  }
}

TEST_P(PackedRows, LeaveAnXThatIsNotFiniteToOthers) {
  const int k = format.bits == 0 ? 45 : 2 * format.group;
  const InPlace in_place({make_weight(random, format, 5, k)});
  for (float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), std::nanf("")}) {
    for (int at : {0, k - 1, k + k / 2}) {
      std::vector<float> x(2 * k, 1.0f), out(10, 7.0f);
      x[at] = bad;
      const Matrix y{out.data(), mx::float32, 2, 5, 5};
      EXPECT_FALSE(in_place.multiply({x.data(), mx::float32, 2, k, k}, {&y, 1}));
      EXPECT_EQ(out, std::vector<float>(10, 7.0f));
    }
  }
}

/// An array's bytes with room behind, which kernels may read.
std::vector<uint8_t> padded(const mx::array& a) {
  const auto* from = a.data<uint8_t>();
  std::vector<uint8_t> out(from, from + a.nbytes());
  out.resize(a.nbytes() + kernels::kReadable, 0xff); // NaN, were it taken for numbers
  return out;
}

TEST_P(PackedRows, AreTheSameOnEveryTarget) {
  for (auto* at = kernels::tables(); *at; ++at) {
    const auto* target = *at;
    for (int m : {1, 2, 3, 7}) {
      const int n = 6, k = some_k();
      SCOPED_TRACE(testing::Message() << target->name << ", " << m << " x " << k);
      const auto w = make_weight(random, format, n, k);
      auto x = normal(random, {m, k});
      mx::eval(x);
      const auto size = target->arranged(format.bits, format.group, k);
      std::vector<float> arranged(m * size.columns), sums(m * size.groups), y(m * n), rows(n * k);
      for (int i = 0; i < m; ++i) {
        ASSERT_TRUE(target->arrange(
            x.data<float>() + i * k, format.bits, format.group, k, arranged.data() + i * size.columns,
            sums.data() + i * size.groups));
      }
      kernels::WeightTask t{};
      const bool packed = format.bits != 0;
      const auto data = padded(w.weight), scales = padded(packed ? *w.scales : w.weight),
                 biases = padded(packed ? *w.biases : w.weight);
      t.data = data.data();
      t.scales = scales.data();
      t.biases = biases.data();
      t.stride = w.weight.strides(0) * w.weight.itemsize();
      t.scale_stride = packed ? w.scales->strides(0) * w.scales->itemsize() : 0;
      t.number = format.dtype == mx::float32   ? kernels::Number::f32
                 : format.dtype == mx::float16 ? kernels::Number::f16
                                               : kernels::Number::bf16;
      t.bits = format.bits;
      t.group = format.group;
      t.rows = n;
      t.k = k;
      t.x = arranged.data();
      t.x_stride = size.columns;
      t.sums = sums.data();
      t.sums_stride = size.groups;
      t.m = m;
      t.y = y.data();
      t.y_stride = n;
      target->dot(t);
      expect_product(
          w, to_doubles(x), m, [&](int i, int j) { return y[i * n + j]; }, 0);
      if (packed) {
        t.y = rows.data();
        t.y_stride = k;
        target->unpack(t);
        const auto expected = unpacked(w);
        for (int i = 0; i < n * k; ++i) {
          ASSERT_NEAR(rows[i], expected[i], 1e-6) << i;
        }
      }
    }
  }
}

std::string format_name(const testing::TestParamInfo<Format>& info) {
  std::ostringstream s;
  s << info.param;
  auto name = s.str();
  std::replace_if(
      name.begin(), name.end(), [](char c) { return !std::isalnum(c); }, '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Formats, PackedRows, testing::ValuesIn(formats()), format_name);

TEST(PackedRowsTogether, OneCallServesWeightsOfSeveralFormats) {
  Random random(92);
  const std::vector<LinearWeight> weights{
      make_weight(random, {mx::float16, "affine", 4, 32}, 70, 128, true),
      make_weight(random, {mx::float16, "affine", 4, 32}, 9, 128), make_weight(random, {mx::bfloat16}, 33, 128, true),
      make_weight(random, {mx::float32, "affine", 6, 64}, 40, 128)};
  const InPlace in_place(weights);
  auto x = normal(random, {3, 128}, mx::float16);
  std::vector<std::vector<float>> out;
  std::vector<Matrix> y;
  for (const auto& w : weights) {
    out.emplace_back(3 * w.n());
  }
  for (size_t i = 0; i < out.size(); ++i) {
    y.push_back({out[i].data(), mx::float32, 3, weights[i].n(), weights[i].n()});
  }
  ASSERT_TRUE(in_place.multiply({x.data<void>(), mx::float16, 3, 128, 128}, y));
  for (size_t w = 0; w < out.size(); ++w) {
    SCOPED_TRACE(testing::Message() << "weight " << w);
    expect_product(
        weights[w], to_doubles(x), 3, [&](int i, int j) { return out[w][i * weights[w].n() + j]; }, 0);
  }
}

TEST(PackedRowsTogether, WhatKernelsDoNotReadIsNotServed) {
  Random random(93);
  auto transposed = make_weight(random, {}, 6, 8);
  transposed.weight = mx::transpose(transposed.weight);
  EXPECT_FALSE(InPlace({evaluated(transposed)}).serves());
  const InPlace fp({make_weight(random, {mx::float32, "mxfp4", 4, 32}, 6, 64)});
  EXPECT_FALSE(fp.serves());
  float x[64] = {}, y[6];
  const Matrix to{y, mx::float32, 1, 6, 6};
  EXPECT_FALSE(fp.multiply({x, mx::float32, 1, 64, 64}, {&to, 1}));
}

} // namespace
} // namespace cleave::test
