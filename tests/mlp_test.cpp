#include "cleave/site/mlp.h"

#include <gmock/gmock.h>

#include <cmath>
#include <numbers>

#include "util.h"

namespace cleave::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
using testing::ThrowsMessage;

const std::vector<Activation> activations{Activation::silu, Activation::gelu, Activation::gelu_tanh, Activation::relu};

struct Weights {
  LinearWeight gate, up, down;
};

Weights make_mlp(Random& random, const Format& format, int k, int hidden, int n, bool bias) {
  return {
      make_weight(random, format, hidden, k, bias), make_weight(random, format, hidden, k, bias),
      make_weight(random, format, n, hidden, bias)};
}

double activate(Activation activation, double v) {
  switch (activation) {
    case Activation::silu:
      return v / (1 + std::exp(-v));
    case Activation::gelu:
      return v / 2 * (1 + std::erf(v / std::numbers::sqrt2));
    case Activation::gelu_tanh:
      return v / 2 * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (v + 0.044715 * v * v * v)));
    case Activation::relu:
      return std::max(v, 0.0);
  }
  return v;
}

std::vector<double> exact_mlp(const mx::array& x, const Weights& w, Activation activation) {
  auto hidden = exact_linear(to_doubles(x), w.gate);
  const auto up = exact_linear(to_doubles(x), w.up);
  for (size_t i = 0; i < hidden.size(); ++i) {
    hidden[i] = activate(activation, hidden[i]) * up[i];
  }
  return exact_linear(hidden, w.down);
}

std::vector<int> rows_of(const Site& site, const std::string& unit) {
  for (const auto& part : site.report().parts) {
    if (part.unit == unit) {
      return part.rows;
    }
  }
  return {};
}

class MlpFormats : public testing::TestWithParam<Format> {};

TEST_P(MlpFormats, SplitMlpIsAsGoodAsTheOriginal) {
  static const auto teams = available(
      {{"main", "cpu"},
       {"main", "cpu:0", "cpu:1"},
       {"main", "mlx-cpu"},
       {"main", "reference"},
       {"cpu"},
       {"mlx-cpu"},
       {"cpu:0", "reference"},
       {"main", "cpu", "reference", "mlx-cpu"}});
  const auto format = GetParam();
  const int step = std::max(format.group, 32);
  for (uint32_t seed = 0; seed < 12; ++seed) {
    Random random(seed * 100 + format.bits);
    const bool packed = !format.mode.empty();
    const int k = packed ? step * uniform(random, 1, 128 / step) : uniform(random, 1, 150);
    const int hidden = packed ? step * uniform(random, 2, 4) : uniform(random, 4, 200);
    const int n = uniform(random, 1, 80);
    const bool bias = uniform(random, 0, 1);
    const auto activation = activations[seed % activations.size()];
    const auto units = pick(random, teams);
    std::vector<double> shares(units.size());
    double sum = 0;
    for (auto& s : shares) {
      sum += s = uniform(random, 1, 10);
    }
    for (auto& s : shares) {
      s /= sum;
    }
    SiteOptions options;
    options.tile = pick<int>(random, {8, 64, 512});
    options.align = pick<int>(random, {1, 16});
    options.min_rows = 1;
    const int m = pick<int>(random, {1, 7, 8, 9, 33, packed ? 20 : 120});
    const auto leading = pick<mx::Shape>(random, {{m}, {1, m}, {2, m}, {1, 1, m}});
    const auto layout = pick(random, all_layouts());
    SCOPED_TRACE(
        testing::Message() << "seed " << seed << ": " << format << ' ' << to_string(activation) << " k " << k
                           << " hidden " << hidden << " n " << n << (bias ? " with bias" : "") << ", units "
                           << testing::PrintToString(units) << " shares " << testing::PrintToString(shares) << ", x "
                           << leading << ' ' << layout << ", tile " << options.tile << " align " << options.align);
    const auto w = make_mlp(random, format, k, hidden, n, bias);
    Mlp site(w.gate, w.up, w.down, activation, shares_of(units, shares), options);
    ASSERT_THAT(site.report().refusals, testing::IsEmpty());
    int rows = 0, partners = 0;
    for (const auto& part : site.report().parts) {
      rows += part.rows.at(0);
      partners += part.unit != "main";
      EXPECT_TRUE(!packed || part.rows[0] % format.group == 0) << part.unit << " has " << part.rows[0];
    }
    EXPECT_EQ(rows, hidden);
    const auto x = make_x(random, leading, k, format.dtype, layout);
    const auto out = site(x);
    ASSERT_EQ(out.size(), 1u);
    EXPECT_TRUE(as_good_as(out[0], site.original(x)[0], exact_mlp(x, w, activation)));
    EXPECT_EQ(site.stats().engaged, static_cast<uint64_t>(partners));
    EXPECT_EQ(site.stats().rescued, 0u);
  }
}

std::string format_name(const testing::TestParamInfo<Format>& info) {
  std::ostringstream s;
  s << info.param;
  return s.str();
}
INSTANTIATE_TEST_SUITE_P(
    All,
    MlpFormats,
    testing::Values(
        Format{mx::float32},
        Format{mx::float16},
        Format{mx::bfloat16},
        Format{mx::float32, "affine", 4, 64},
        Format{mx::float16, "affine", 2, 32},
        Format{mx::float16, "affine", 3, 32},
        Format{mx::bfloat16, "affine", 4, 64},
        Format{mx::float16, "affine", 5, 64},
        Format{mx::bfloat16, "affine", 6, 32},
        Format{mx::float16, "affine", 8, 64},
        Format{mx::float16, "mxfp4", 4, 32},
        Format{mx::bfloat16, "mxfp8", 8, 32},
        Format{mx::bfloat16, "nvfp4", 4, 16}),
    format_name);

TEST(Mlp, EveryActivationIsRightOnEveryUnit) {
  Random random(21);
  const auto w = make_mlp(random, {}, 24, 40, 12, true);
  auto x = normal(random, {9, 24}, mx::float32, 3);
  for (auto activation : activations) {
    const auto exact = exact_mlp(x, w, activation);
    for (const auto& units : available({{"main", "cpu"}, {"main", "reference"}, {"main", "mlx-cpu"}})) {
      Mlp site(w.gate, w.up, w.down, activation, shares_of(units, {0.25, 0.75}), {.min_rows = 1});
      EXPECT_TRUE(as_good_as(site(x)[0], site.original(x)[0], exact)) << to_string(activation) << " on " << units[1];
    }
  }
}

TEST(Mlp, CallsBelowMinRowsAreTheOriginalBitForBit) {
  Random random(22);
  const auto w = make_mlp(random, {mx::float16}, 24, 40, 12, true);
  Mlp site(w.gate, w.up, w.down, Activation::silu, shares_of({"main", "reference"}, {0.5, 0.5}), {.min_rows = 8});
  auto x = normal(random, {7, 24}, mx::float16);
  EXPECT_TRUE(same_bits(site(x)[0], site.original(x)[0]));
  EXPECT_EQ(site.stats().engaged, 0u);
  EXPECT_EQ(site.stats().original, 1u);
}

TEST(Mlp, FormatsMayDifferBetweenItsWeights) {
  Random random(23);
  Weights w{
      make_weight(random, {mx::float16, "affine", 4, 64}, 128, 64), make_weight(random, {mx::float16}, 128, 64, true),
      make_weight(random, {mx::float16, "affine", 8, 32}, 20, 128, true)};
  for (const auto& units : available({{"main", "cpu"}, {"main", "reference"}, {"main", "mlx-cpu"}})) {
    Mlp site(w.gate, w.up, w.down, Activation::silu, shares_of(units, {0.3, 0.7}), {.min_rows = 1});
    EXPECT_EQ(rows_of(site, "main"), std::vector<int>{32});
    auto x = normal(random, {5, 64}, mx::float16);
    EXPECT_TRUE(as_good_as(site(x)[0], site.original(x)[0], exact_mlp(x, w, Activation::silu))) << units[1];
  }
}

TEST(Mlp, PackedDownIsCutAtItsGroups) {
  Random random(24);
  const auto w = make_mlp(random, {mx::float16, "affine", 4, 128}, 128, 512, 8, false);
  auto shares = shares_of({"main", "reference"}, {0.4, 0.6});
  shares.push_back({std::make_shared<ProbeUnit>(), 0});
  Mlp site(w.gate, w.up, w.down, Activation::silu, shares, {.min_rows = 1, .align = 48});
  EXPECT_EQ(rows_of(site, "main"), std::vector<int>{128}) << "one block is lcm(48, 128) rows, and 512 hold one";
  EXPECT_EQ(rows_of(site, "reference"), std::vector<int>{384});
}

TEST(Mlp, PartialSumsAreAddedInFp32) {
  Random random(25);
  for (auto dtype : {mx::float16, mx::bfloat16}) {
    // The two halves of the intermediate channels nearly cancel: each partial sum is large and the result is small.
    auto half = mx::abs(normal(random, {128, 32}, dtype, 0.2f));
    auto columns = mx::abs(normal(random, {16, 128}, dtype, 0.1f));
    auto rest = normal(random, {16, 128}, dtype, 0.001f);
    Weights w{
        {mx::concatenate({half, half}, 0)},
        {mx::concatenate({half, half}, 0)},
        {mx::concatenate({columns, mx::subtract(rest, columns)}, 1)}};
    auto x = mx::abs(normal(random, {40, 32}, dtype));
    std::vector<UnitShare> shares;
    for (int i = 0; i < 8; ++i) {
      shares.push_back({std::make_shared<ProbeUnit>(), 0.125});
    }
    Mlp site(w.gate, w.up, w.down, Activation::relu, shares, {.min_rows = 1});
    const auto y = to_doubles(site(x)[0]);
    auto positive = w;
    positive.down = {mx::abs(w.down.weight)};
    const auto exact = exact_mlp(x, w, Activation::relu), size = exact_mlp(x, positive, Activation::relu);
    const double ulp = dtype == mx::float16 ? 0x1p-10 : 0x1p-7;
    for (size_t i = 0; i < y.size(); ++i) {
      ASSERT_LT(std::abs(exact[i]) * ulp, size[i] * 1e-3) << "the case is what it says";
      ASSERT_NEAR(y[i], exact[i], std::abs(exact[i]) * ulp + size[i] * 1e-6) << dtype << " at " << i;
    }
  }
}

TEST(Mlp, NamesWhatDoesNotFit) {
  Random random(26);
  auto says = [](const std::string& part) {
    return ThrowsMessage<std::invalid_argument>(AllOf(StartsWith("[mlp] got gate"), HasSubstr(part)));
  };
  auto mlp = [&](LinearWeight gate, LinearWeight up, LinearWeight down) {
    return [=] { Mlp(gate, up, down, Activation::silu, {{unit("reference"), 1}}); };
  };
  auto a = make_weight(random, {}, 8, 16), b = make_weight(random, {}, 9, 16), down = make_weight(random, {}, 4, 8);
  EXPECT_THAT(mlp(a, b, down), says("gate [8, 16], up [9, 16], down [4, 8]"));
  EXPECT_THAT(mlp(b, b, down), says("down [4, 8]"));
  EXPECT_THAT(mlp(a, make_weight(random, {}, 8, 17), down), says("up [8, 17]"));
}

TEST(Activation, NamesRoundTripAndAnUnknownOneIsNamed) {
  for (auto activation : activations) {
    EXPECT_EQ(activation_from_string(to_string(activation)), activation);
  }
  EXPECT_THAT(
      [] { activation_from_string("swish"); },
      ThrowsMessage<std::invalid_argument>(AllOf(StartsWith("[activation] got 'swish'"), HasSubstr("gelu_tanh"))));
}

} // namespace
} // namespace cleave::test
