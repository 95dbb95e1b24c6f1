// Attention and what comes before it against double precision: one block of queries on every instruction set that this
// processor runs, whole calls in all dtypes and strides.
#include "cleave/kernels/attention.h"

#include <numeric>

#include "cleave/kernels/rope.h"
#include "kernels_util.h"

namespace cleave::test {
namespace {

using kernels::Table;

// ---- attention of one block of queries ----------------------------------------------------------

/// Queries of one head and all its keys and values, as attend() reads them.
struct Head {
  int64_t rows, keys, d, dv, columns;
  Floats q, k, v, panels, padded;

  Head(const Table& t, Random& random, int64_t rows, int64_t keys, int64_t d, int64_t dv)
      : rows(rows), keys(keys), d(d), dv(dv) {
    const int64_t width = 2 * t.lanes;
    columns = (dv + width - 1) / width * width;
    q = random_floats(random, rows * d, 2 / std::sqrt(static_cast<float>(d)));
    k = random_floats(random, keys * d);
    v = random_floats(random, keys * dv);
    pack(t);
  }
  void pack(const Table& t) {
    const int64_t width = 2 * t.lanes;
    panels.assign((keys + width - 1) / width * width * d, nan);
    padded.assign(keys * columns, 0);
    for (int64_t begin = 0; begin < keys; begin += width) {
      t.pack_keys(k.data() + begin * d, d, std::min(width, keys - begin), d, panels.data() + begin * d);
    }
    for (int64_t i = 0; i < keys; ++i) {
      std::copy_n(v.data() + i * dv, dv, padded.data() + i * columns);
    }
  }
  Floats attend(const Table& t, int64_t visible, int64_t step, int64_t window) const {
    Floats out(rows * dv), scratch(kernels::kQueryBlock * (kernels::kKeyBlock + columns), nan);
    t.attend(
        {q.data(), rows, d, dv, panels.data(), padded.data(), visible, step, window, out.data(), dv, scratch.data()});
    return out;
  }
  /// One row over keys [first, last).
  std::vector<double> exact(int64_t row, int64_t first, int64_t last) const {
    std::vector<double> scores, out(dv);
    for (int64_t i = first; i < last; ++i) {
      scores.push_back(std::inner_product(&q[row * d], &q[row * d] + d, &k[i * d], 0.0));
    }
    const double top = *std::max_element(scores.begin(), scores.end());
    double total = 0;
    for (int64_t i = first; i < last; ++i) {
      const double weight = std::exp2(scores[i - first] - top);
      total += weight;
      for (int64_t c = 0; c < dv; ++c) {
        out[c] += weight * v[i * dv + c];
      }
    }
    for (auto& y : out) {
      y /= total;
    }
    return out;
  }
};

using OneBlock = EachTarget;
INSTANTIATE_TEST_SUITE_P(Kernels, OneBlock, testing::ValuesIn(all_tables()), name_of);

TEST_P(OneBlock, IsAsExact) {
  struct Size {
    int64_t rows, keys, d, dv;
  };
  constexpr int64_t all = std::numeric_limits<int64_t>::max();
  for (auto [rows, keys, d, dv] : std::vector<Size>{
           {1, 1, 1, 1}, {1, 700, 64, 64}, {7, 31, 5, 9}, {13, 257, 24, 33}, {60, 600, 64, 17}, {59, 100, 80, 128}}) {
    const Head head(t, random, rows, keys, d, dv);
    for (int64_t step : {0, 1}) {
      for (int64_t window : {all, int64_t{1}, int64_t{20}, int64_t{300}}) {
        if (step == 0 && window != all) {
          continue;
        }
        SCOPED_TRACE(
            testing::Message() << rows << " queries, " << keys << " keys, step " << step << ", window " << window);
        const int64_t visible = step ? keys - rows + 1 : keys;
        const auto out = head.attend(t, visible, step, window);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t last = visible + r * step;
          const auto exact = head.exact(r, std::max<int64_t>(0, last - window), last);
          for (int64_t c = 0; c < dv; ++c) {
            ASSERT_TRUE(near(out[r * dv + c], exact[c], 1e-5, 0.3)) << "row " << r;
          }
        }
      }
    }
  }
}

TEST_P(OneBlock, NumbersThatAreNotFiniteReachThoseWhoSeeThem) {
  const int64_t rows = 20, keys = 300, d = 8, dv = 4, poisoned = 290;
  Head head(t, random, rows, keys, d, dv);
  constexpr int64_t all = std::numeric_limits<int64_t>::max();
  for (float bad : {nan, inf, -inf}) {
    Head changed = head;
    changed.k[poisoned * d + 3] = bad;
    changed.pack(t);
    const auto out = changed.attend(t, keys - rows + 1, 1, all);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t last = keys - rows + 1 + r;
      const bool sees = last > poisoned;
      // Of an infinite score softmax makes NaN; one of -infinity is a key without weight.
      const bool lost = sees && (std::isnan(bad) || bad * changed.q[r * d + 3] > 0);
      const auto exact = head.exact(r, 0, last);
      for (int64_t c = 0; c < dv; ++c) {
        ASSERT_EQ(std::isnan(out[r * dv + c]), lost) << bad << ", row " << r;
        if (!sees) {
          ASSERT_TRUE(near(out[r * dv + c], exact[c], 1e-5, 0.3)) << "a key that row " << r << " does not see";
        }
      }
    }
  }
  head.q[5 * d] = nan;
  const auto out = head.attend(t, keys, 0, all);
  for (int64_t i = 0; i < rows * dv; ++i) {
    EXPECT_EQ(std::isnan(out[i]), i / dv == 5) << "one query that is not a number";
  }
}

TEST_P(OneBlock, ScoresFarApartGiveTheLargestOne) {
  Head head(t, random, 3, 520, 4, 4);
  for (float size : {1e4f, 1e30f}) {
    for (auto& q : head.q) {
      q = size;
    }
    for (int64_t i = 0; i < head.keys; ++i) {
      std::fill_n(&head.k[i * 4], 4, i == 400 ? 1.0f : -1.0f);
    }
    head.pack(t);
    const auto out = head.attend(t, head.keys, 0, head.keys);
    for (int64_t i = 0; i < 12; ++i) {
      EXPECT_EQ(out[i], head.v[400 * 4 + i % 4]);
    }
  }
}

// ---- heads -----------------------------------------------------------------------------------------

/// [batch, heads, tokens, d], or the same with tokens before heads in memory, as projections give it.
struct HeadsBlock {
  mx::array a;
  int batch, heads, tokens, d;
  bool tokens_first;
  std::vector<double> values;

  HeadsBlock(Random& random, mx::Dtype dtype, int batch, int heads, int tokens, int d, bool tokens_first)
      : a(normal(
            random, tokens_first ? mx::Shape{batch, tokens, heads, d} : mx::Shape{batch, heads, tokens, d}, dtype)),
        batch(batch),
        heads(heads),
        tokens(tokens),
        d(d),
        tokens_first(tokens_first),
        values(to_doubles(a)) {}
  int64_t at(int b, int h, int i) const {
    return tokens_first ? ((int64_t(b) * tokens + i) * heads + h) * d : ((int64_t(b) * heads + h) * tokens + i) * d;
  }
  Heads view() {
    const int64_t batch_stride = int64_t(heads) * tokens * d;
    return {
        a.data<void>(), a.dtype(), batch_stride, tokens_first ? d : int64_t(tokens) * d,
        tokens_first ? int64_t(heads) * d : d};
  }
};

class HeadDtypes : public testing::TestWithParam<std::tuple<mx::Dtype, mx::Dtype>> {
 protected:
  Random random{13};
  mx::Dtype from = std::get<0>(GetParam()), to = std::get<1>(GetParam());
};
INSTANTIATE_TEST_SUITE_P(Kernels, HeadDtypes, testing::Combine(testing::ValuesIn(dtypes), testing::ValuesIn(dtypes)));

TEST_P(HeadDtypes, AreNormedAndTurned) {
  const int batch = 2, heads = 3, tokens = 5, d = 14, half = 5, offset = 253; // over the edge of a block of angles
  const auto norm = random_floats(random, d);
  Floats frequencies(half);
  for (int j = 0; j < half; ++j) {
    frequencies[j] = std::pow(100.0f, -j / float(half));
  }
  auto angles = std::make_shared<kernels::RopeAngles>(frequencies, 1.5f);
  for (int form = 0; form < 8; ++form) {
    const bool normed = form & 1, turned = form & 2, traditional = form & 4;
    SCOPED_TRACE(testing::Message() << "normed " << normed << ", turned " << turned << ", traditional " << traditional);
    HeadsBlock in(random, from, batch, heads, tokens, d, true), out(random, to, batch, heads, tokens, d, false);
    kernels::transform_heads(
        {normed ? norm.data() : nullptr, 1e-5f, turned ? angles : nullptr, traditional}, {batch, heads, tokens, d},
        offset, in.view(), out.view());
    const auto got = to_doubles(out.a);
    for (int row = 0; row < batch * heads * tokens; ++row) {
      const int b = row / (heads * tokens), h = row / tokens % heads, i = row % tokens;
      std::vector<double> x(in.values.begin() + in.at(b, h, i), in.values.begin() + in.at(b, h, i) + d);
      const double factor = normed ? rms_factor(Floats(x.begin(), x.end()), 1e-5) : 1;
      for (int c = 0; c < d; ++c) {
        x[c] *= factor * (normed ? norm[c] : 1);
      }
      for (int j = 0; turned && j < half; ++j) {
        double &p = x[traditional ? 2 * j : j], &q = x[traditional ? 2 * j + 1 : j + half];
        const double angle = float(offset + i) * frequencies[j], c = 1.5 * std::cos(angle), s = 1.5 * std::sin(angle);
        std::tie(p, q) = std::pair(p * c - q * s, q * c + p * s);
      }
      for (int c = 0; c < d; ++c) {
        // fp32 angles of some hundred radians are known to 1e-5.
        ASSERT_TRUE(near(got[out.at(b, h, i) + c], x[c], step_of(to) + 3e-5, 1)) << "row " << row << ", " << c;
      }
    }
  }
}

TEST(Heads, MayBeTransformedInPlace) {
  Random random(5);
  auto angles = std::make_shared<kernels::RopeAngles>(Floats{1, 0.1f}, 1.0f);
  HeadsBlock in(random, mx::float16, 1, 2, 3, 4, true), out(random, mx::float16, 1, 2, 3, 4, true);
  kernels::transform_heads({nullptr, 0, angles, false}, {1, 2, 3, 4}, 9, in.view(), out.view());
  kernels::transform_heads({nullptr, 0, angles, false}, {1, 2, 3, 4}, 9, in.view(), in.view());
  EXPECT_TRUE(same_bits(in.a, out.a));
}

/// Attention of one query over keys and values given as rows.
std::vector<double> attend(
    const double* q,
    int d,
    int dv,
    double scale,
    const std::vector<const double*>& keys,
    const std::vector<const double*>& values) {
  std::vector<double> weights, out(dv);
  for (auto* k : keys) {
    weights.push_back(scale * std::inner_product(q, q + d, k, 0.0));
  }
  const double top = *std::max_element(weights.begin(), weights.end());
  double total = 0;
  for (auto& w : weights) {
    total += w = std::exp(w - top);
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    for (int c = 0; c < dv; ++c) {
      out[c] += weights[i] / total * values[i][c];
    }
  }
  return out;
}

TEST_P(HeadDtypes, AttendToSegments) {
  struct Size {
    int batch, heads, kv_heads, tokens, past, d, dv, window;
    bool causal;
  };
  for (auto s : std::vector<Size>{
           {1, 1, 1, 1, 0, 1, 1, 0, true},
           {2, 6, 2, 65, 30, 24, 9, 0, true},
           {1, 4, 1, 3, 300, 33, 40, 0, false},
           {2, 3, 3, 130, 0, 16, 16, 0, true},
           {1, 2, 1, 70, 40, 8, 8, 33, true}}) {
    SCOPED_TRACE(testing::Message() << s.tokens << " queries, " << s.past << " keys before them");
    HeadsBlock q(random, from, s.batch, s.heads, s.tokens, s.d, true);
    HeadsBlock old_k(random, from, s.batch, s.kv_heads, s.past + 1, s.d, false);
    HeadsBlock old_v(random, to, s.batch, s.kv_heads, s.past + 1, s.dv, false);
    HeadsBlock k(random, to, s.batch, s.kv_heads, s.tokens, s.d, true);
    HeadsBlock v(random, from, s.batch, s.kv_heads, s.tokens, s.dv, true);
    HeadsBlock out(random, to, s.batch, s.heads, s.tokens, s.dv, true);
    const std::vector<KeysValues> segments{{old_k.view(), old_v.view(), s.past}, {k.view(), v.view(), s.tokens}};
    const auto scale = 1.7f / std::sqrt(float(s.d));
    kernels::attention(
        {s.batch, s.heads, s.kv_heads, s.tokens, s.d, s.dv, scale, s.causal, s.window}, q.view(), segments, out.view());
    const auto got = to_doubles(out.a);
    for (int row = 0; row < s.batch * s.heads * s.tokens; ++row) {
      const int b = row / (s.heads * s.tokens), h = row / s.tokens % s.heads, i = row % s.tokens;
      const int kv = h / (s.heads / s.kv_heads), end = s.causal ? s.past + i + 1 : s.past + s.tokens;
      std::vector<const double*> keys, values;
      for (int j = s.window ? std::max(0, end - s.window) : 0; j < end; ++j) {
        const bool old = j < s.past;
        keys.push_back(old ? &old_k.values[old_k.at(b, kv, j)] : &k.values[k.at(b, kv, j - s.past)]);
        values.push_back(old ? &old_v.values[old_v.at(b, kv, j)] : &v.values[v.at(b, kv, j - s.past)]);
      }
      const auto exact = attend(&q.values[q.at(b, h, i)], s.d, s.dv, scale, keys, values);
      for (int c = 0; c < s.dv; ++c) {
        ASSERT_TRUE(near(got[out.at(b, h, i) + c], exact[c], step_of(to) + 1e-5, 0.3)) << "row " << row;
      }
    }
  }
}

} // namespace
} // namespace cleave::test
