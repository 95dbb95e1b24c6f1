#include "cleave/linear_weight.h"

#include <gmock/gmock.h>

#include <cmath>

#include "util.h"

namespace cleave::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
using testing::ThrowsMessage;

const std::vector<mx::Dtype> dtypes{mx::float32, mx::float16, mx::bfloat16};

std::vector<Format> packed_formats() {
  std::vector<Format> out;
  for (int bits : {2, 3, 4, 5, 6, 8}) {
    for (int group : {32, 64, 128}) {
      for (auto dtype : dtypes) {
        out.push_back({dtype, "affine", bits, group});
      }
    }
  }
  out.push_back({mx::float32, "mxfp4", 4, 32});
  out.push_back({mx::float32, "mxfp8", 8, 32});
  out.push_back({mx::float32, "nvfp4", 4, 16});
  return out;
}

mx::array unpacked(const LinearWeight& w) {
  std::vector<float> values(size_t(w.n()) * w.k());
  for (int row = 0; row < w.n(); ++row) {
    unpack_row(w, row, values.data() + size_t(row) * w.k());
  }
  return mx::array(values.data(), {w.n(), w.k()}, mx::float32);
}

LinearWeight evaluated(LinearWeight w) {
  w.check("test");
  return w;
}

class PackedFormats : public testing::TestWithParam<Format> {
 protected:
  Random random{3};
  const Format format = GetParam();
  const int n = 7;
  const int k = 3 * std::max(format.group, 32);
  const LinearWeight weight = make_weight(random, format, n, k, true);
};

TEST_P(PackedFormats, UnpacksAsMlxDequantizes) {
  ASSERT_EQ(weight.n(), n);
  ASSERT_EQ(weight.k(), k);
  const bool affine = format.mode == "affine";
  auto wide = [](const mx::array& a) { return mx::astype(a, mx::float32); };
  auto expected = mx::dequantize(
      weight.weight, affine ? wide(*weight.scales) : *weight.scales,
      affine ? std::optional(wide(*weight.biases)) : std::nullopt, format.group, format.bits, format.mode, std::nullopt,
      mx::float32);
  auto got = unpacked(weight);
  if (!affine) {
    EXPECT_TRUE(same_bits(got, expected));
    return;
  }
  // Two roundings in fp32, or one where the compiler fuses.
  auto difference = mx::max(mx::abs(mx::subtract(got, expected))).item<float>();
  EXPECT_LE(difference, 4e-7f * mx::max(mx::abs(wide(*weight.biases))).item<float>() + 1e-12f);
}

TEST_P(PackedFormats, CutRowsAreTheRowsOfTheWhole) {
  auto whole = unpacked(weight);
  for (auto [begin, end] : {std::pair{0, 1}, {0, 3}, {3, 7}, {5, 6}, {0, 7}}) {
    SCOPED_TRACE(testing::Message() << begin << " to " << end);
    auto part = evaluated(weight.rows(begin, end));
    EXPECT_EQ(part.n(), end - begin);
    EXPECT_EQ(part.k(), k);
    EXPECT_TRUE(same_bits(unpacked(part), mx::slice(whole, {begin, 0}, {end, k})));
    EXPECT_TRUE(same_bits(*part.bias, mx::slice(*weight.bias, {begin}, {end})));
  }
}

TEST_P(PackedFormats, CutColumnsAreTheColumnsOfTheWhole) {
  auto whole = unpacked(weight);
  const int step = format.group;
  for (auto [begin, end] : {std::pair{0, step}, {step, 3 * step}, {step, 2 * step}, {0, k}}) {
    SCOPED_TRACE(testing::Message() << begin << " to " << end);
    auto part = evaluated(weight.columns(begin, end));
    EXPECT_EQ(part.k(), end - begin);
    EXPECT_FALSE(part.bias);
    EXPECT_TRUE(same_bits(unpacked(part), mx::slice(whole, {0, begin}, {n, end})));
    auto corner = evaluated(weight.rows(2, 6).columns(begin, end));
    EXPECT_TRUE(same_bits(unpacked(corner), mx::slice(whole, {2, begin}, {6, end})));
  }
}

TEST_P(PackedFormats, MlxMultipliesCutColumnsRight) {
  auto part = evaluated(weight.columns(format.group, 3 * format.group));
  auto x = normal(random, {4, part.k()}, format.dtype);
  auto y = part.linear(x);
  // The same numbers, adjacent: what differs is only where mlx finds them.
  auto copied = part;
  copied.weight = mx::contiguous(part.weight);
  copied.scales = mx::contiguous(*part.scales);
  if (part.biases) {
    copied.biases = mx::contiguous(*part.biases);
  }
  EXPECT_TRUE(same_bits(y, copied.linear(x)));
  EXPECT_TRUE(as_good_as(y, copied.linear(x), exact_linear(to_doubles(x), copied)));
}

std::string format_name(const testing::TestParamInfo<Format>& info) {
  std::ostringstream s;
  s << info.param;
  return s.str();
}
INSTANTIATE_TEST_SUITE_P(All, PackedFormats, testing::ValuesIn(packed_formats()), format_name);

TEST(LinearWeight, UnpacksDenseRowsOfEveryDtypeAndStride) {
  Random random(4);
  for (auto dtype : dtypes) {
    LinearWeight w{normal(random, {5, 12}, dtype)};
    EXPECT_TRUE(same_bits(unpacked(w), mx::astype(w.weight, mx::float32)));
    auto transposed = evaluated({mx::transpose(w.weight)});
    EXPECT_TRUE(same_bits(unpacked(transposed), mx::transpose(mx::astype(w.weight, mx::float32))));
    auto corner = evaluated(w.rows(1, 4).columns(3, 10));
    EXPECT_TRUE(same_bits(unpacked(corner), mx::slice(mx::astype(w.weight, mx::float32), {1, 3}, {4, 10})));
  }
}

TEST(LinearWeight, UnpacksAStridedBias) {
  auto bias = mx::slice(mx::arange(10, mx::float16), {1}, {10}, {3});
  mx::eval(bias);
  std::vector<float> values(3);
  unpack_vector(bias, values.data());
  EXPECT_THAT(values, testing::ElementsAre(1, 4, 7));
}

TEST(LinearWeight, SlicesAreViewsAndAllocateNothing) {
  Random random(5);
  for (const auto& format : {Format{mx::float16}, Format{mx::float16, "affine", 4, 64}}) {
    auto whole = make_weight(random, format, 64, 256, true);
    whole.check("test");
    const auto before = mx::get_active_memory();
    for (const auto& part : {evaluated(whole.rows(17, 50)), evaluated(whole.columns(64, 192))}) {
      auto inside = [](const mx::array& view, const mx::array& of) {
        EXPECT_EQ(view.data_shared_ptr(), of.data_shared_ptr());
        EXPECT_GE(view.data<char>(), of.data<char>());
        EXPECT_LT(view.data<char>(), of.data<char>() + of.nbytes());
      };
      inside(part.weight, whole.weight);
      if (part.packed()) {
        inside(*part.scales, *whole.scales);
        inside(*part.biases, *whole.biases);
      }
      if (part.bias) {
        inside(*part.bias, *whole.bias);
      }
    }
    EXPECT_EQ(mx::get_active_memory(), before);
  }
}

TEST(LinearWeight, NamesItsFormatAndCountsItsBytes) {
  Random random(6);
  auto dense = make_weight(random, {mx::bfloat16}, 8, 64, true);
  EXPECT_EQ(dense.format(), "bfloat16");
  EXPECT_EQ(dense.nbytes(), 8u * 64 * 2 + 8 * 2);
  auto packed = make_weight(random, {mx::float16, "affine", 4, 64}, 8, 128);
  EXPECT_EQ(packed.format(), "affine 4-bit group 64");
  EXPECT_EQ(packed.nbytes(), 8u * 128 / 2 + 2 * 8 * 2 * 2);
}

TEST(LinearWeight, OutputDtypeIsThatOfTheProduct) {
  Random random(7);
  std::vector<Format> formats{{mx::float32}, {mx::float16}, {mx::bfloat16}};
  for (auto dtype : dtypes) {
    formats.push_back({dtype, "affine", 4, 32});
    formats.push_back({dtype, "mxfp4", 4, 32});
    formats.push_back({dtype, "nvfp4", 4, 16});
  }
  for (const auto& format : formats) {
    for (bool bias : {false, true}) {
      auto w = make_weight(random, format, 3, 32, bias);
      for (auto dtype : dtypes) {
        SCOPED_TRACE(testing::Message() << format << " times " << dtype << (bias ? " with bias" : ""));
        EXPECT_EQ(w.output_dtype(dtype), w.linear(normal(random, {2, 32}, dtype)).dtype());
      }
    }
  }
}

void refused(const LinearWeight& weight, const std::string& given) {
  SCOPED_TRACE(given);
  EXPECT_THAT(
      [&] { weight.check("site"); },
      ThrowsMessage<std::invalid_argument>(AllOf(StartsWith("[site] got "), HasSubstr(given), HasSubstr(" needs "))));
}

TEST(LinearWeight, RefusesMalformedDenseWeightsByName) {
  refused({mx::zeros({4})}, "float32 (4)");
  refused({mx::zeros({2, 4, 8})}, "(2,4,8)");
  refused({mx::zeros({0, 8})}, "(0,8)");
  refused({mx::zeros({4, 8}, mx::int32)}, "int32");
  refused({mx::zeros({4, 8}, mx::uint32)}, "uint32");
  LinearWeight w{mx::zeros({4, 8})};
  w.bias = mx::zeros({5});
  refused(w, "a bias of float32 (5)");
  w.bias = mx::zeros({1, 4});
  refused(w, "a bias of float32 (1,4)");
  w.bias = mx::zeros({4}, mx::int32);
  refused(w, "a bias of int32");
}

TEST(LinearWeight, RefusesMalformedPackedWeightsByName) {
  Random random(8);
  const auto good = make_weight(random, {mx::float16, "affine", 4, 32}, 4, 64);
  good.check("site");
  auto with = [&](auto&& change) {
    auto w = good;
    change(w);
    return w;
  };
  refused(with([](auto& w) { w.mode = "awq"; }), "'awq'");
  refused(with([](auto& w) { w.bits = 7; }), "7 bits");
  refused(with([](auto& w) { w.bits = 0; }), "0 bits");
  refused(with([](auto& w) { w.group_size = 0; }), "group size 0");
  refused(with([](auto& w) { w.scales.reset(); }), "packed weight");
  refused(with([](auto& w) { w.biases.reset(); }), "affine scales");
  refused(with([](auto& w) { w.scales = mx::zeros({4, 3}, mx::float16); }), "(4,3)");
  refused(with([](auto& w) { w.biases = mx::zeros({4, 1}, mx::float16); }), "affine scales");
  refused(with([](auto& w) { w.weight = mx::zeros({4, 8}, mx::int32); }), "int32");
  refused(with([](auto& w) { w.bits = 8; }), "scales");
  refused(with([](auto& w) { w.scales = w.biases = mx::zeros({4, 2}, mx::int32); }), "int32");
  refused(
      with([](auto& w) {
        w.weight = mx::zeros({8, 4}, mx::uint32);
        w.scales = w.biases = mx::zeros({2, 8});
      }),
      "(2,8)");
  // The bias and scale arrays are read by one dtype.
  refused(with([](auto& w) { w.biases = mx::astype(*w.biases, mx::float32); }), "float32");
}

TEST(LinearWeight, RefusesMalformedMicroscalingWeightsByName) {
  Random random(9);
  const auto good = make_weight(random, {mx::float16, "mxfp4", 4, 32}, 4, 64);
  good.check("site");
  auto wrong = good;
  wrong.scales = mx::astype(*good.scales, mx::float16);
  refused(wrong, "float16");
  wrong = good;
  wrong.bits = 8;
  wrong.scales = mx::zeros({4, 1}, mx::uint8);
  refused(wrong, "8");
  wrong = good;
  wrong.group_size = 64;
  wrong.scales = mx::zeros({4, 1}, mx::uint8);
  refused(wrong, "64");
}

TEST(LinearWeight, RefusesPackedArraysWithGapsBetweenColumns) {
  Random random(10);
  auto w = make_weight(random, {mx::float16, "affine", 4, 32}, 4, 128);
  w.weight = mx::slice(w.weight, {0, 0}, {4, 16}, {1, 2});
  w.scales = mx::slice(*w.scales, {0, 0}, {4, 2});
  w.biases = mx::slice(*w.biases, {0, 0}, {4, 2});
  refused(w, "gaps");
}

TEST(LinearWeight, RefusesColumnsThatCutAGroup) {
  Random random(11);
  auto w = make_weight(random, {mx::float16, "affine", 4, 32}, 4, 64);
  EXPECT_THAT(
      [&] { w.columns(0, 40); },
      ThrowsMessage<std::invalid_argument>(AllOf(StartsWith("[columns] got [0, 40)"), HasSubstr("32"))));
}

} // namespace
} // namespace cleave::test
