#include "cleave/site/attention.h"

#include <gmock/gmock.h>

#include <cmath>
#include <numeric>

#include "cleave/unit/registry.h"
#include "util.h"

namespace cleave::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
using testing::ThrowsMessage;

using Doubles = std::vector<double>;

/// A layer's attention and what it is called with.
struct Case {
  Attention::Weights weights;
  AttentionSpec spec;
  mx::array x;
  std::optional<CachedHeads> past;
};

struct Sizes {
  int k, heads, kv_heads, head_dim, n;
};

Attention::Weights make_weights(Random& random, const Format& format, const Sizes& s, bool bias) {
  const int q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
  return {
      make_weight(random, format, q, s.k, bias), make_weight(random, format, kv, s.k, bias),
      make_weight(random, format, kv, s.k, bias), make_weight(random, format, s.n, q, bias)};
}

/// As a model's cache gives it: the first positions of longer buffers.
CachedHeads make_past(Random& random, int batch, const Sizes& s, int tokens, mx::Dtype dtype) {
  auto cached = [&] {
    auto buffer = normal(random, {batch, s.kv_heads, tokens + 3, s.head_dim}, dtype);
    return mx::slice(buffer, {0, 0, 0, 0}, {batch, s.kv_heads, tokens, s.head_dim});
  };
  auto keys = cached();
  return {keys, cached()};
}

void turn(const AttentionSpec& s, const std::optional<mx::array>& norm, int position, double* head) {
  const int d = s.head_dim;
  if (norm) {
    const auto weight = to_doubles(*norm);
    double sum = 0;
    for (int i = 0; i < d; ++i) {
      sum += head[i] * head[i] / d;
    }
    for (int i = 0; i < d; ++i) {
      head[i] *= weight[i] / std::sqrt(sum + s.norm_eps);
    }
  }
  if (!s.rope) {
    return;
  }
  const auto& r = *s.rope;
  for (int i = 0; i < r.dims / 2; ++i) {
    const double angle = position * r.scale / (!r.base ? r.freqs[i] : std::pow(*r.base, 2.0 * i / r.dims));
    double& a = head[r.traditional ? 2 * i : i];
    double& b = head[r.traditional ? 2 * i + 1 : i + r.dims / 2];
    const double turned = r.amplitude * (a * std::cos(angle) - b * std::sin(angle));
    b = r.amplitude * (a * std::sin(angle) + b * std::cos(angle));
    a = turned;
  }
}

/// [B, S, H * d] and [B, H, T, d] -> [B, H, T + S, d]
Doubles after(const std::optional<mx::array>& past, const Doubles& now, int batch, int heads, int tokens, int d) {
  const int before = past ? past->shape(2) : 0;
  const auto cached = past ? to_doubles(*past) : Doubles{};
  Doubles all;
  for (int bh = 0; bh < batch * heads; ++bh) {
    all.insert(all.end(), cached.begin() + bh * before * d, cached.begin() + (bh + 1) * before * d);
    for (int t = 0; t < tokens; ++t) {
      const auto row = now.begin() + ((bh / heads * tokens + t) * heads + bh % heads) * d;
      all.insert(all.end(), row, row + d);
    }
  }
  return all;
}

/// y [B, S, n], new keys and values [B, kv, S, d].
std::vector<Doubles> exact_attention(const Case& c) {
  const auto& s = c.spec;
  const int batch = c.x.shape(0), tokens = c.x.shape(1), d = s.head_dim, group = s.heads / s.kv_heads;
  const int before = c.past ? c.past->keys.shape(2) : 0, all = before + tokens;
  const auto x = to_doubles(c.x);
  auto q = exact_linear(x, c.weights.q), k = exact_linear(x, c.weights.k);
  const auto v = exact_linear(x, c.weights.v);
  for (int r = 0; r < batch * tokens; ++r) {
    for (int h = 0; h < s.heads; ++h) {
      turn(s, s.q_norm, before + r % tokens, &q[(r * s.heads + h) * d]);
    }
    for (int h = 0; h < s.kv_heads; ++h) {
      turn(s, s.k_norm, before + r % tokens, &k[(r * s.kv_heads + h) * d]);
    }
  }
  const auto keys = after(c.past ? std::optional(c.past->keys) : std::nullopt, k, batch, s.kv_heads, tokens, d);
  const auto values = after(c.past ? std::optional(c.past->values) : std::nullopt, v, batch, s.kv_heads, tokens, d);
  Doubles joined(q.size());
  for (int i = 0; i < batch * tokens * s.heads; ++i) {
    const int h = i % s.heads, t = i / s.heads % tokens, b = i / s.heads / tokens;
    const double* key = &keys[int64_t(b * s.kv_heads + h / group) * all * d];
    const double* value = &values[int64_t(b * s.kv_heads + h / group) * all * d];
    const int end = before + t + 1, first = s.window ? std::max(0, end - s.window) : 0;
    double total = 0;
    for (int p = first; p < end; ++p) {
      const double weight = std::exp(s.scale * std::inner_product(key + p * d, key + (p + 1) * d, &q[i * d], 0.0));
      total += weight;
      for (int j = 0; j < d; ++j) {
        joined[i * d + j] += weight * value[p * d + j];
      }
    }
    for (int j = 0; j < d; ++j) {
      joined[i * d + j] /= total;
    }
  }
  return {
      exact_linear(joined, c.weights.o), after(std::nullopt, k, batch, s.kv_heads, tokens, d),
      after(std::nullopt, v, batch, s.kv_heads, tokens, d)};
}

void expect_as_good(const Attention& site, const Case& c) {
  const auto exact = exact_attention(c);
  const auto split = site(c.x, c.past), original = site.original(c.x, c.past);
  ASSERT_EQ(split.size(), 3u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(as_good_as(split[i], original[i], exact[i])) << "output " << i;
  }
}

AttentionSpec make_spec(const Sizes& s) {
  AttentionSpec spec{s.heads, s.kv_heads, s.head_dim, static_cast<float>(1 / std::sqrt(s.head_dim))};
  spec.rope = RopeSpec{s.head_dim, false, 10000.0f};
  return spec;
}

std::vector<int> rows_of(const Site& site) {
  std::vector<int> rows;
  for (const auto& part : site.report().parts) {
    rows.push_back(part.rows.at(0));
  }
  return rows;
}

class AttentionFormats : public testing::TestWithParam<Format> {};

TEST_P(AttentionFormats, SplitAttentionIsAsGoodAsTheOriginal) {
  static const auto teams =
      available({{"main", "cpu"}, {"main", "cpu:0", "cpu:1"}, {"cpu:0", "cpu:1"}, {"main", "reference"}, {"cpu"}});
  const auto format = GetParam();
  const bool packed = !format.mode.empty();
  for (uint32_t seed = 0; seed < 8; ++seed) {
    Random random(seed * 100 + format.bits);
    Sizes s{
        packed ? std::max(format.group, 64) : uniform(random, 5, 90), 0, uniform(random, 1, 4),
        pick<int>(random, {64, 80, 128}), 24};
    s.heads = s.kv_heads * uniform(random, 1, 3);
    if (packed && s.heads * s.head_dim % format.group != 0) {
      s.head_dim = 128;
    }
    auto spec = make_spec(s);
    spec.rope->traditional = uniform(random, 0, 1);
    spec.rope->dims = pick<int>(random, {s.head_dim, s.head_dim / 2});
    spec.window = pick<int>(random, {0, 0, 6});
    if (uniform(random, 0, 1)) {
      spec.q_norm = normal(random, {s.head_dim}, format.dtype);
      spec.k_norm = normal(random, {s.head_dim}, format.dtype);
      spec.norm_eps = 1e-5f;
    }
    const bool bias = uniform(random, 0, 1);
    const auto units = pick(random, teams);
    Doubles shares(units.size());
    for (auto& share : shares) {
      share = uniform(random, 1, 10);
    }
    const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
    for (auto& share : shares) {
      share /= sum;
    }
    const int batch = uniform(random, 1, 2), tokens = pick<int>(random, {1, 7, 33});
    const int before = pick<int>(random, {0, 1, 40});
    const auto layout = pick(random, all_layouts());
    const SiteOptions options{.tile = pick<int>(random, {8, 512}), .min_rows = 1};
    SCOPED_TRACE(
        testing::Message() << "seed " << seed << ": " << format << " k " << s.k << " heads " << s.heads << '/'
                           << s.kv_heads << " of " << s.head_dim << (bias ? " with bias" : "")
                           << (spec.q_norm ? " with norms" : "") << " rope " << spec.rope->dims
                           << (spec.rope->traditional ? " traditional" : "") << " window " << spec.window << ", units "
                           << testing::PrintToString(units) << " shares " << testing::PrintToString(shares) << ", x "
                           << batch << 'x' << tokens << ' ' << layout << " after " << before << ", tile "
                           << options.tile);
    Case c{make_weights(random, format, s, bias), spec, make_x(random, {batch, tokens}, s.k, format.dtype, layout), {}};
    if (before > 0) {
      c.past = make_past(random, batch, s, before, format.dtype);
    }
    Attention site(c.weights, spec, shares_of(units, shares), options);
    ASSERT_THAT(site.report().refusals, testing::IsEmpty());
    const auto rows = rows_of(site);
    EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), 0), s.kv_heads);
    expect_as_good(site, c);
    EXPECT_EQ(site.stats().engaged, rows.size() - (site.report().parts[0].unit == "main"));
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
    AttentionFormats,
    testing::Values(
        Format{mx::float32},
        Format{mx::float16},
        Format{mx::bfloat16},
        Format{mx::float16, "affine", 4, 32},
        Format{mx::bfloat16, "affine", 8, 64},
        Format{mx::float32, "affine", 4, 128},
        Format{mx::float16, "mxfp4", 4, 32}),
    format_name);

TEST(Attention, LongCallsOverSeveralTilesAndAWindow) {
  Random random(31);
  const Sizes s{32, 4, 2, 64, 16};
  for (int window : {0, 300}) {
    auto spec = make_spec(s);
    spec.window = window;
    Case c{
        make_weights(random, {}, s, false), spec, normal(random, {1, 513, s.k}),
        make_past(random, 1, s, 70, mx::float32)};
    for (const auto& units : available({{"cpu:0", "cpu:1"}, {"main", "reference"}})) {
      Attention site(c.weights, spec, shares_of(units, {0.5, 0.5}), {.tile = 128});
      EXPECT_EQ(rows_of(site), (std::vector<int>{1, 1}));
      expect_as_good(site, c);
    }
  }
}

TEST(Attention, RopeByFrequenciesWithAmplitudeAndWithoutRope) {
  Random random(32);
  const Sizes s{16, 2, 2, 8, 16};
  auto spec = make_spec(s);
  spec.rope = RopeSpec{6, false, std::nullopt, 0.5f, {1.0f, 7.0f, 90.0f}, 1.3f};
  for (int round = 0; round < 2; ++round) {
    Case c{
        make_weights(random, {}, s, false), spec, normal(random, {1, 9, s.k}),
        make_past(random, 1, s, 11, mx::float32)};
    for (const auto& units : available({{"main", "cpu"}, {"main", "reference"}})) {
      Attention site(c.weights, spec, shares_of(units, {0.5, 0.5}), {.min_rows = 1});
      expect_as_good(site, c);
    }
    spec.rope.reset();
  }
}

TEST(Attention, ASequenceReadInPartsIsTheSequenceReadAtOnce) {
  Random random(33);
  const Sizes s{24, 6, 3, 16, 24};
  const auto units = available({{"cpu:0", "cpu:1"}, {"main", "reference"}})[0];
  Attention site(make_weights(random, {}, s, true), make_spec(s), shares_of(units, {0.4, 0.6}), {.min_rows = 1});
  auto x = normal(random, {2, 20, s.k});
  const auto whole = site(x, std::nullopt);
  std::optional<CachedHeads> past;
  std::vector<mx::array> pieces;
  for (auto [begin, end] : {std::pair(0, 13), std::pair(13, 14), std::pair(14, 20)}) {
    auto out = site(mx::slice(x, {0, begin, 0}, {2, end, s.k}), past);
    pieces.push_back(out[0]);
    past = past ? CachedHeads{mx::concatenate({past->keys, out[1]}, 2), mx::concatenate({past->values, out[2]}, 2)}
                : CachedHeads{out[1], out[2]};
  }
  EXPECT_TRUE(mx::allclose(mx::concatenate(pieces, 1), whole[0], 1e-4, 1e-5).item<bool>());
  EXPECT_TRUE(mx::allclose(past->keys, whole[1], 1e-4, 1e-5).item<bool>());
  EXPECT_TRUE(mx::allclose(past->values, whole[2], 1e-4, 1e-5).item<bool>());
}

TEST(Attention, PackedOutputIsCutAtItsGroups) {
  Random random(34);
  const Sizes s{64, 8, 8, 80, 8}; // 64 columns are no multiple of 80 before the fourth head
  const auto weights = make_weights(random, {mx::float16, "affine", 4, 64}, s, false);
  EXPECT_EQ(Attention::block(weights.o, make_spec(s)), 4);
  EXPECT_EQ(Attention::block(make_weight(random, {}, 8, 640), make_spec(s)), 1);
  Attention site(weights, make_spec(s), shares_of({"main", "reference"}, {0.3, 0.7}), {.min_rows = 1});
  EXPECT_EQ(rows_of(site), (std::vector<int>{4, 4}));
  expect_as_good(site, {weights, make_spec(s), normal(random, {1, 5, 64}, mx::float16), {}});
}

TEST(Attention, CutsWellWhereSharesAreNearWholeHeads) {
  Random random(38);
  auto well = [&](int kv_heads, const Format& format, const std::vector<double>& shares) {
    const Sizes s{64, kv_heads, kv_heads, 80, 8};
    std::vector<UnitShare> all;
    for (size_t i = 0; i < shares.size(); ++i) {
      all.push_back({i == 0 ? nullptr : std::make_shared<ProbeUnit>(), shares[i]});
    }
    return Attention::cuts_well(make_weight(random, format, 8, kv_heads * 80), make_spec(s), all);
  };
  const Format packed{mx::float32, "affine", 4, 64}; // cut at every fourth head
  EXPECT_TRUE(well(4, {}, {0.5, 0.5}));
  EXPECT_TRUE(well(8, {}, {0.47, 0.53}));
  EXPECT_TRUE(well(8, packed, {0.5, 0, 0.5}));
  EXPECT_FALSE(well(4, packed, {0.5, 0.5}));
  EXPECT_FALSE(well(3, {}, {0.5, 0.5}));
  EXPECT_FALSE(well(4, {}, {0, 1})) << "a unit alone needs no cut";
}

TEST(Attention, ACallThatAUnitFailsIsFinishedByTheReference) {
  Random random(35);
  const Sizes s{24, 4, 2, 16, 24};
  Case c{
      make_weights(random, {}, s, true), make_spec(s), normal(random, {2, 6, s.k}),
      make_past(random, 2, s, 9, mx::float32)};
  auto shares = shares_of({"main"}, {0.5});
  shares.push_back({make_unit("fault:2"), 0.5});
  Attention site(c.weights, c.spec, shares, {.name = "attention", .min_rows = 1});
  expect_as_good(site, c);
  EXPECT_EQ(site.stats().rescued, 0u);
  const auto before = site(c.x, c.past); // engaged while the unit is well, run when it fails
  mx::eval(before);
  EXPECT_EQ(site.stats().rescued, 1u);
  EXPECT_FALSE(site.engages(c.x));
  const auto exact = exact_attention(c);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(as_good_as(before[i], site.original(c.x, c.past)[i], exact[i])) << "output " << i;
  }
}

TEST(Attention, AUnitThatTakesNoAttentionLeavesItToMain) {
  Random random(36);
  const Sizes s{16, 2, 2, 8, 16};
  Attention site(make_weights(random, {}, s, false), make_spec(s), shares_of({"main", "mlx-cpu"}, {0.5, 0.5}));
  EXPECT_THAT(site.report().refusals, testing::ElementsAre("mlx-cpu: it takes linear groups and mlps, no attention"));
  EXPECT_FALSE(site.report().splits);
  EXPECT_STREQ(to_string(site.report().kind), "attention");
}

TEST(Attention, WhatDoesNotFitIsNamed) {
  Random random(37);
  const Sizes s{16, 4, 2, 8, 12};
  const auto w = make_weights(random, {}, s, false);
  auto says = [](const std::string& part) {
    return ThrowsMessage<std::invalid_argument>(AllOf(StartsWith("[attention] got "), HasSubstr(part)));
  };
  auto make = [&](const Attention::Weights& weights, const AttentionSpec& spec) {
    return [=] { Attention(weights, spec, shares_of({"reference"}, {1})); };
  };
  auto with = [&](auto change) {
    auto spec = make_spec(s);
    change(spec);
    return make(w, spec);
  };
  EXPECT_THAT(with([](auto& a) { a.heads = 3; }), says("3 heads of 8 channels, 2 key-value heads"));
  EXPECT_THAT(with([](auto& a) { a.head_dim = 4; }), says("q [32, 16], k [16, 16], v [16, 16], o [12, 32]"));
  EXPECT_THAT(with([](auto& a) { a.q_norm = mx::ones({9}); }), says("a norm of float32 (9)"));
  EXPECT_THAT(with([](auto& a) { a.rope->dims = 10; }), says("rope over 10 channels"));
  EXPECT_THAT(make({w.q, w.k, w.q, w.o}, make_spec(s)), says("v [32, 16]"));
  Attention site(w, make_spec(s), shares_of({"reference"}, {1}), {.min_rows = 1});
  auto call = [&](mx::array x, std::optional<CachedHeads> past) { return [=, &site] { site(x, past); }; };
  const auto x = mx::ones({1, 3, 16});
  EXPECT_THAT(call(mx::ones({3, 16}), {}), says("x (3,16) and needs x [B, S, 16]"));
  EXPECT_THAT(call(x, make_past(random, 2, s, 5, mx::float32)), says("keys float32 (2,2,5,8)"));
  EXPECT_THAT(call(x, CachedHeads{mx::ones({1, 2, 5, 8}), mx::ones({1, 2, 4, 8})}), says("values float32 (1,2,4,8)"));
}

} // namespace
} // namespace cleave::test
