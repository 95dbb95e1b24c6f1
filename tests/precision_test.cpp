#include <gmock/gmock.h>

#include <fstream>

#include "cleave/graph/error_probe.h"
#include "cleave/site/attention.h"
#include "cleave/units/reference/reference_unit.h"
#include "sites.h"

namespace cleave::test {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

/// Root of the summed squares of the differences, relative to that of `exact`.
double distance(const Arrays& a, const Arrays& exact) {
  double differences = 0, sizes = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const auto x = to_doubles(a[i]), y = to_doubles(exact[i]);
    for (size_t j = 0; j < x.size(); ++j) {
      differences += (x[j] - y[j]) * (x[j] - y[j]);
      sizes += y[j] * y[j];
    }
  }
  return std::sqrt(differences / sizes);
}

enum Kind { group, mlp, attention };

std::unique_ptr<Site> random_site(
    Random& random, Kind kind, const Format& format, const std::vector<UnitShare>& shares, Precision precision) {
  const SiteOptions options{.name = "site", .tile = 32, .min_rows = 1, .precision = precision};
  if (kind == attention) {
    auto make = [&](int n, int k) { return make_weight(random, format, n, k); };
    Attention::Weights weights{make(128, 128), make(64, 128), make(64, 128), make(64, 128)};
    return std::make_unique<Attention>(std::move(weights), AttentionSpec{4, 2, 32, 0.2f}, shares, options);
  }
  if (kind == mlp) {
    auto gate = make_weight(random, format, 192, 128), up = make_weight(random, format, 192, 128);
    return std::make_unique<Mlp>(
        gate, up, make_weight(random, format, 64, 192, true), Activation::silu, shares, options);
  }
  std::vector<LinearWeight> members{make_weight(random, format, 96, 128, true), make_weight(random, format, 33, 128)};
  return std::make_unique<LinearGroup>(members, shares, options);
}

class Precisions : public testing::TestWithParam<Precision> {};

TEST_P(Precisions, ErrAsLittleAsTheyPromiseAndSayByHowMuch) {
  const auto precision = GetParam();
  // bfloat16 has 8 bits, int8 of normal numbers about 1/127 of the largest of 128: 3 standard deviations.
  const double most = precision == Precision::exact ? 1e-3 : precision == Precision::bf16 ? 1e-2 : 4e-2;
  Random random(71);
  for (const Format& format :
       {Format{mx::float32}, Format{mx::float16}, Format{mx::bfloat16}, Format{mx::float16, "affine", 4, 32}}) {
    for (const Kind kind : {group, mlp, attention}) {
      for (const auto& [names, parts] : std::vector<std::pair<std::vector<std::string>, std::vector<double>>>{
               {{"cpu"}, {1}}, {{"main", "cpu"}, {0.4, 0.6}}, {{"reference"}, {1}}}) {
        SCOPED_TRACE(testing::Message() << format << " kind " << kind << ' ' << names.back() << names.size());
        auto site = random_site(random, kind, format, shares_of(names, parts), precision);
        EXPECT_EQ(site->stats().error, -1);
        const auto x = make_x(random, {1, 65}, 128, format.dtype);
        const double found = distance(evaluated((*site)(x)), evaluated(site->original(x)));
        const double rounding = format.dtype == mx::bfloat16 ? 1e-2 : 1e-3; // of the original's own outputs
        EXPECT_LT(found, most + rounding);
        const auto& part = site->report().parts.back();
        if (precision == Precision::exact) {
          EXPECT_EQ(site->stats().error, -1) << "exact sites pay for no measurement";
          continue;
        }
        EXPECT_LT(site->stats().error, most + rounding);
        EXPECT_GE(site->stats().error, 0);
        if (part.arithmetic == "int8" || (part.arithmetic == "bfloat16" && format.dtype != mx::bfloat16)) {
          EXPECT_GT(site->stats().error, 1e-4) << "it was rounded";
          EXPECT_GT(found, 1e-4);
        }
        const float first = site->stats().error;
        evaluated((*site)(make_x(random, {1, 7}, 128, format.dtype)));
        EXPECT_EQ(site->stats().error, first) << "measured once";
      }
    }
  }
}

TEST_P(Precisions, TakeActivationsOfAnyDtypeOnceRoundingIsAllowed) {
  if (GetParam() == Precision::exact) {
    return;
  }
  Random random(72);
  auto site = random_site(random, mlp, {mx::bfloat16}, shares_of({"cpu"}, {1}), GetParam());
  for (auto dtype : {mx::float32, mx::float16, mx::bfloat16}) {
    EXPECT_TRUE(site->engages(make_x(random, {3}, 128, dtype))) << dtype;
  }
}

TEST_P(Precisions, HoldNoMoreThanTheEstimate) {
  Random random(73);
  std::vector<LinearWeight> members{make_weight(random, {mx::float16}, 64, 128, true)};
  members[0].check("test");
  ProgramSpec spec{SiteKind::linear_group, 128, {64}, 0, 64, mx::float16};
  spec.precision = GetParam();
  EXPECT_LE(unit("cpu")->compile(spec, members)->bytes(), unit("cpu")->memory(spec));
}

TEST_P(Precisions, NumbersThatAreNotFiniteStayVisible) {
  Random random(74);
  auto site = random_site(random, group, {mx::float32}, shares_of({"cpu"}, {1}), GetParam());
  const float inf = std::numeric_limits<float>::infinity();
  for (float bad : {inf, -inf, std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> values(3 * 128, 0.5f);
    values[128 + 5] = bad;
    const auto y = to_doubles(evaluated((*site)(mx::array(values.data(), {3, 128}, mx::float32)))[0]);
    for (size_t i = 0; i < y.size(); ++i) {
      EXPECT_EQ(std::isfinite(y[i]), i / 96 != 1) << bad << " in row 1, output " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, Precisions, testing::Values(Precision::exact, Precision::bf16, Precision::int8), [](const auto& info) {
      return std::string(to_string(info.param));
    });

TEST(Precision, IsUsedWhereTheProcessorIsFasterInIt) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "a sanitizer slows our part of a trial, not oneDNN's";
#endif
  std::ifstream file("/proc/cpuinfo");
  const std::string flags((std::istreambuf_iterator<char>(file)), {});
  Random random(76);
  for (auto [flag, precision, name] :
       {std::tuple{"avx512_vnni", Precision::int8, "int8"}, {"avx512_bf16", Precision::bf16, "bfloat16"}}) {
    if (unit("cpu")->description().starts_with("oneDNN") && flags.find(flag) != std::string::npos) {
      auto site = random_site(random, mlp, {mx::float16}, shares_of({"cpu"}, {1}), precision);
      EXPECT_EQ(site->report().parts[0].arithmetic, name);
    }
  }
}

TEST(Precision, IsNamedOrRefused) {
  for (auto p : {Precision::exact, Precision::bf16, Precision::int8}) {
    EXPECT_EQ(precision_from_string(to_string(p)), p);
  }
  EXPECT_THAT(
      [] { precision_from_string("int4"); }, ThrowsMessage<std::invalid_argument>(HasSubstr("got 'int4' and needs")));
}

TEST(RelativeError, ComparesRowsSpreadOverACall) {
  Random random(75);
  LinearWeight w = make_weight(random, {}, 8, 16);
  w.check("test");
  const auto reference = reference_program({SiteKind::linear_group, 16, {8}, 0, 64, mx::float32}, {w});
  for (int rows : {1, 2, 4, 5, 100}) {
    const auto x = evaluated({make_x(random, {rows, 16}, 16, mx::float32)})[0];
    std::vector<float> out(size_t(rows) * 16 * 8);
    const int64_t m = rows * 16;
    const Matrix to{out.data(), mx::float32, m, 8, 8};
    const ConstMatrix from{x.data<void>(), mx::float32, m, 16, 16};
    reference->run(from, std::span(&to, 1), {});
    EXPECT_EQ(relative_error(*reference, SiteKind::linear_group, from, std::span(&to, 1), {}), 0);
    for (float& v : out) {
      v *= 1.1f;
    }
    EXPECT_NEAR(relative_error(*reference, SiteKind::linear_group, from, std::span(&to, 1), {}), 0.1, 1e-5);
  }
}

} // namespace
} // namespace cleave::test
