#include "cleave/site/linear_group.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "util.h"

namespace cleave::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
using testing::ThrowsMessage;

struct Case {
  Format format;
  std::vector<int> n;
  int k = 0;
  bool bias = true;
  std::vector<std::string> units;
  std::vector<double> shares;
  mx::Shape leading;
  Layout layout = Layout::contiguous;
  SiteOptions options;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.format << " n " << testing::PrintToString(c.n) << " k " << c.k << (c.bias ? " with bias" : "")
             << ", units " << testing::PrintToString(c.units) << " shares " << testing::PrintToString(c.shares)
             << ", x " << c.leading << ' ' << c.layout << ", tile " << c.options.tile << " min_rows "
             << c.options.min_rows << " align " << c.options.align;
}

int tokens(const mx::Shape& leading) {
  int product = 1;
  for (auto d : leading) {
    product *= d;
  }
  return product;
}

mx::Shape random_leading(Random& random, int tile) {
  const int m =
      std::clamp(pick<int>(random, {1, 2, tile - 1, tile, tile + 1, 2 * tile + 3, uniform(random, 1, 300)}), 1, 300);
  switch (uniform(random, 0, 5)) {
    case 0:
      return {};
    case 1:
      return {1, 1, m};
    case 2:
      return {1, m};
    case 3:
      return {2, std::max(1, m / 2)};
    case 4:
      return {2, 3, std::max(1, m / 6)};
    default:
      return {m};
  }
}

std::vector<double> random_shares(Random& random, size_t count) {
  std::vector<double> shares(count, 0);
  if (uniform(random, 0, 7) == 0) {
    shares[uniform(random, 0, static_cast<int>(count) - 1)] = 1;
    return shares;
  }
  double sum = 0;
  for (auto& s : shares) {
    s = uniform(random, 0, 9) == 0 ? 0 : uniform(random, 1, 100);
    sum += s;
  }
  if (sum == 0) {
    shares[0] = sum = 1;
  }
  for (auto& s : shares) {
    s /= sum;
  }
  return shares;
}

Case random_case(Random& random, const Format& family) {
  static const auto teams = available(
      {{"cpu"},
       {"cpu:0"},
       {"reference"},
       {"mlx-cpu"},
       {"cpu:0", "cpu:1"},
       {"cpu:0", "reference"},
       {"mlx-cpu", "reference"},
       {"cpu", "reference", "mlx-cpu"}});
  Case c;
  c.format = family;
  const bool packed = !family.mode.empty();
  if (packed) {
    c.format.dtype = pick<mx::Dtype>(random, {mx::float32, mx::float16, mx::bfloat16});
    c.format.group = family.group ? family.group : pick<int>(random, {32, 64, 128});
    const int step = std::max(c.format.group, 32); // mx::quantize asks for 32 even in groups of 16
    c.k = step * uniform(random, 1, 256 / step);
  } else {
    c.k = uniform(random, 1, 300);
  }
  c.bias = uniform(random, 0, 1);
  c.units = pick(random, teams);
  if (uniform(random, 0, 3)) {
    c.units.insert(c.units.begin(), "main");
  }
  c.shares = random_shares(random, c.units.size());
  c.options.tile = pick<int>(random, {16, 64, 512});
  c.options.align = pick<int>(random, {1, 1, 8, 16});
  c.leading = random_leading(random, c.options.tile);
  c.layout = pick(random, all_layouts());
  const int m = tokens(c.leading);
  c.options.min_rows = pick<int>(random, {0, 1, m - 1, m, m, m + 1});
  // Stock mlx makes about 25 million quantised products a second.
  const int64_t most = packed ? 1000000 : 4000000;
  const int members = uniform(random, 1, 3);
  for (int i = 0; i < members; ++i) {
    c.n.push_back(uniform(random, 1, std::clamp<int>(most / members / m / c.k, 3, 300)));
  }
  return c;
}

void expect_split_is_right(const Case& c, uint32_t seed) {
  Random random(seed);
  std::vector<LinearWeight> members;
  for (int n : c.n) {
    members.push_back(make_weight(random, c.format, n, c.k, c.bias));
  }
  LinearGroup site(members, shares_of(c.units, c.shares), c.options);
  ASSERT_THAT(site.report().refusals, testing::IsEmpty());
  std::vector<int> rows(c.n.size());
  std::vector<int> main_rows(c.n.size());
  for (const auto& part : site.report().parts) {
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i] += part.rows[i];
      main_rows[i] += part.unit == "main" ? part.rows[i] : 0;
    }
  }
  EXPECT_EQ(rows, c.n);

  const auto x = make_x(random, c.leading, c.k, c.format.dtype, c.layout);
  const auto out = site(x);
  const auto original = site.original(x);
  ASSERT_EQ(out.size(), members.size());
  mx::eval(out);
  const size_t partners =
      std::count_if(site.report().parts.begin(), site.report().parts.end(), [](auto& p) { return p.unit != "main"; });
  const bool enough = partners > 0 && tokens(c.leading) >= c.options.min_rows;
  EXPECT_EQ(site.stats().engaged, enough ? partners : 0);
  EXPECT_EQ(site.stats().original, enough ? 0u : 1u);
  EXPECT_EQ(site.stats().rescued, 0u);

  const auto exact_x = to_doubles(x);
  for (size_t i = 0; i < members.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "member " << i);
    EXPECT_TRUE(as_good_as(out[i], original[i], exact_linear(exact_x, members[i])));
    auto main_part = [&](const mx::array& y) {
      mx::Shape start(y.ndim(), 0);
      auto stop = y.shape();
      stop.back() = enough ? main_rows[i] : c.n[i];
      return mx::slice(y, start, stop);
    };
    EXPECT_TRUE(same_bits(main_part(out[i]), main_part(original[i]))) << "in main's rows";
  }
  if (partners > 0) {
    EXPECT_EQ(site.main_rows_difference(3).value_or(0), 0);
  }
}

class LinearGroupFormats : public testing::TestWithParam<Format> {};

TEST_P(LinearGroupFormats, SplitIsAsGoodAsTheOriginal) {
  for (uint32_t seed = 0; seed < 14; ++seed) {
    Random random(seed * 100 + GetParam().bits * 7 + GetParam().mode.size());
    const auto c = random_case(random, GetParam());
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << c);
    expect_split_is_right(c, seed);
    if (HasFailure()) {
      return;
    }
  }
}

TEST_P(LinearGroupFormats, SplitIsRightAroundMinRowsAndTileEdges) {
  Case c;
  c.format = GetParam();
  c.n = {37, 5};
  c.k = 128;
  c.units = {"main", "reference"};
  c.shares = {0.5, 0.5};
  c.format.group = c.format.group ? c.format.group : 64;
  if (unit("cpu:0")) {
    c.units = {"main", "cpu:0", "reference"};
    c.shares = {0.3, 0.4, 0.3};
  }
  c.options.tile = 16;
  c.options.min_rows = 15;
  for (int m : {1, 14, 15, 16, 17, 31, 32, 33}) {
    c.leading = {m};
    SCOPED_TRACE(testing::Message() << c);
    expect_split_is_right(c, m);
  }
}

std::string format_name(const testing::TestParamInfo<Format>& info) {
  std::ostringstream s;
  info.param.mode.empty() ? s << info.param.dtype : s << info.param.mode << info.param.bits;
  return s.str();
}
INSTANTIATE_TEST_SUITE_P(
    All,
    LinearGroupFormats,
    testing::Values(
        Format{mx::float32},
        Format{mx::float16},
        Format{mx::bfloat16},
        Format{mx::float16, "affine", 2},
        Format{mx::float16, "affine", 3},
        Format{mx::float16, "affine", 4},
        Format{mx::float16, "affine", 5},
        Format{mx::float16, "affine", 6},
        Format{mx::float16, "affine", 8},
        Format{mx::float16, "mxfp4", 4, 32},
        Format{mx::float16, "mxfp8", 8, 32},
        Format{mx::float16, "nvfp4", 4, 16}),
    format_name);

class LinearGroupLayouts : public testing::TestWithParam<Layout> {};

TEST_P(LinearGroupLayouts, XMayLieInMemoryInAnyWay) {
  for (const auto& units : available({{"main", "cpu"}, {"main", "reference", "cpu:0"}, {"main", "mlx-cpu"}})) {
    for (auto dtype : {mx::float32, mx::float16}) {
      for (mx::Shape leading : {mx::Shape{1}, {9}, {2, 5}, {2, 1}, {1, 1, 6}, {2, 3, 4}, {}}) {
        const std::vector<double> shares = units.size() == 3 ? std::vector{0.25, 0.25, 0.5} : std::vector{0.5, 0.5};
        Case c;
        c.format.dtype = dtype;
        c.n = {33, 8};
        c.k = 24;
        c.units = units;
        c.shares = shares;
        c.leading = leading;
        c.layout = GetParam();
        c.options.min_rows = 0;
        SCOPED_TRACE(testing::Message() << c);
        expect_split_is_right(c, 5);
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(
    All, LinearGroupLayouts, testing::ValuesIn(all_layouts()), [](const testing::TestParamInfo<Layout>& info) {
      auto name = testing::PrintToString(info.param);
      std::replace(name.begin(), name.end(), ' ', '_');
      return name;
    });

TEST(LinearGroup, XOfAnotherDtypeGivesThePromotedDtype) {
  Random random(12);
  const std::vector<mx::Dtype> dtypes{mx::float32, mx::float16, mx::bfloat16};
  for (auto w_dtype : dtypes) {
    for (auto x_dtype : dtypes) {
      for (const auto& units : available({{"main", "cpu"}, {"main", "reference"}, {"main", "mlx-cpu"}})) {
        for (bool bias : {false, true}) {
          SCOPED_TRACE(
              testing::Message() << w_dtype << " times " << x_dtype << " on " << units[1] << ", bias " << bias);
          auto w = make_weight(random, {w_dtype}, 20, 40, bias);
          LinearGroup site({w}, shares_of(units, {0.4, 0.6}), {.min_rows = 1});
          auto x = normal(random, {6, 40}, x_dtype);
          EXPECT_TRUE(as_good_as(site(x)[0], site.original(x)[0], exact_linear(to_doubles(x), w)));
        }
      }
    }
  }
}

TEST(LinearGroup, OneSiteServesXOfEveryLayoutAndDtypeInTurn) {
  Random random(17);
  for (const auto& units : available({{"main", "cpu"}, {"main", "cpu:0", "reference"}})) {
    std::vector<LinearWeight> members{make_weight(random, {mx::float16}, 24, 40, true)};
    const std::vector<double> shares = units.size() == 2 ? std::vector{0.5, 0.5} : std::vector{0.4, 0.3, 0.3};
    LinearGroup site(members, shares_of(units, shares), {.tile = 16, .min_rows = 1});
    for (int turn = 0; turn < 2; ++turn) {
      for (auto dtype : {mx::float16, mx::float32, mx::bfloat16}) {
        for (auto layout : all_layouts()) {
          auto x = make_x(random, {9}, 40, dtype, layout);
          EXPECT_TRUE(as_good_as(site(x)[0], site.original(x)[0], exact_linear(to_doubles(x), members[0])))
              << dtype << ' ' << layout << " on " << units[1];
        }
      }
    }
  }
}

TEST(LinearGroup, XOfADtypeThatNoUnitTakesRunsTheOriginal) {
  Random random(18);
  LinearGroup site({make_weight(random, {}, 20, 40)}, shares_of({"main", "reference"}, {0.4, 0.6}), {.min_rows = 1});
  auto x = mx::astype(normal(random, {6, 40}, mx::float32, 5), mx::int32);
  EXPECT_FALSE(site.engages(x));
  EXPECT_TRUE(same_bits(site(x)[0], site.original(x)[0]));
  EXPECT_EQ(site.stats().engaged, 0u);
  EXPECT_EQ(site.stats().original, 1u);
  EXPECT_GE(site.stats().wrong_dtype, 1u);
}

TEST(LinearGroup, OneChannelAndOneTokenAreEnough) {
  Random random(19);
  for (const auto& name : {"cpu", "reference", "mlx-cpu"}) {
    for (auto [n, k] : {std::pair{1, 1}, {2, 1}, {1, 3}}) {
      auto w = make_weight(random, {}, n, k, true);
      LinearGroup site({w}, {{unit(name), 1}}, {.min_rows = 0});
      for (const auto& leading : {mx::Shape{1}, {5}, {}}) {
        auto x = make_x(random, leading, k, mx::float32);
        EXPECT_TRUE(as_good_as(site(x)[0], site.original(x)[0], exact_linear(to_doubles(x), w))) << name << n << k;
      }
      EXPECT_EQ(site.stats().engaged, 3u);
      auto none = mx::zeros({0, k});
      EXPECT_FALSE(site.engages(none));
      EXPECT_TRUE(same_bits(site(none)[0], site.original(none)[0]));
    }
  }
}

TEST(LinearGroup, TransposedDenseWeightsAreSplitRight) {
  Random random(13);
  for (const auto& units : available({{"main", "cpu"}, {"main", "reference"}, {"main", "mlx-cpu"}})) {
    LinearWeight w{mx::transpose(normal(random, {40, 20}, mx::float32, 0.2f))};
    LinearGroup site({w}, shares_of(units, {0.4, 0.6}), {.min_rows = 1});
    auto x = normal(random, {6, 40});
    EXPECT_TRUE(as_good_as(site(x)[0], site.original(x)[0], exact_linear(to_doubles(x), w))) << units[1];
  }
}

TEST(LinearGroup, AUnitsBytesAreReportedAndShareZeroHoldsNone) {
  Random random(14);
  auto cpu = unit("cpu");
  auto probe = std::make_shared<ProbeUnit>();
  auto w = make_weight(random, {mx::float16, "affine", 4, 64}, 64, 128);
  LinearGroup site({w}, {{nullptr, 0.5}, {cpu, 0.5}, {probe, 0}}, {.name = "q", .min_rows = 1});
  ASSERT_EQ(site.report().parts.size(), 2u);
  EXPECT_EQ(site.report().name, "q");
  EXPECT_EQ(site.report().format, "affine 4-bit group 64");
  EXPECT_EQ(site.report().parts[0].unit, "main");
  EXPECT_EQ(site.report().parts[0].bytes, 0u);
  EXPECT_EQ(site.report().parts[1].unit, "cpu");
  if (cpu->description().starts_with("oneDNN")) {
    EXPECT_GE(site.report().parts[1].bytes, 32u * 128 * 2) << "unpacked to 2 or 4 bytes each";
  }
  EXPECT_EQ(probe->probe().compiled, 0);
}

TEST(LinearGroup, AUnitsEstimateOfItsMemoryIsAnUpperOne) {
  Random random(20);
  for (const auto& name : {"cpu", "mlx-cpu", "reference"}) {
    for (auto dtype : {mx::float32, mx::float16}) {
      std::vector<LinearWeight> members{
          make_weight(random, {dtype}, 64, 128, true), make_weight(random, {dtype}, 192, 128, true)};
      for (const auto& w : members) {
        w.check("test");
      }
      const ProgramSpec spec{SiteKind::linear_group, 128, {64, 192}, 0, 64, dtype};
      EXPECT_LE(unit(name)->compile(spec, members)->bytes(), unit(name)->memory(spec)) << name << ' ' << dtype;
    }
  }
}

TEST(LinearGroup, NamesWhatDoesNotFit) {
  Random random(15);
  auto group = [](std::vector<LinearWeight> members, SiteOptions options = {}) {
    return [=] { LinearGroup(members, {{nullptr, 0.5}, {unit("reference"), 0.5}}, options); };
  };
  auto says = [](const std::string& start, const std::string& part) {
    return ThrowsMessage<std::invalid_argument>(AllOf(StartsWith(start), HasSubstr(part)));
  };
  auto a = make_weight(random, {}, 8, 16), b = make_weight(random, {}, 8, 17);
  EXPECT_THAT(group({}), says("[linear_group] got no weight", "at least one"));
  EXPECT_THAT(group({a, b}), says("[linear_group] got", "16 and 17"));
  EXPECT_THAT(group({a}, {.tile = 0}), says("[site] got tile 0", "at least 1"));
  EXPECT_THAT(group({a}, {.min_rows = -1}), says("[site] got", "min_rows -1"));
  EXPECT_THAT(group({a}, {.align = 0}), says("[site] got", "align 0"));
  LinearGroup site({a}, {{unit("reference"), 1}}, {.min_rows = 1});
  EXPECT_THROW(mx::eval(site(normal(random, {4, 17}))), std::invalid_argument) << "mlx names the shapes";
}

} // namespace
} // namespace cleave::test
