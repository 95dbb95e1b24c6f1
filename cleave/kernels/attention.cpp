#include "cleave/kernels/attention.h"

#include <algorithm>

#include "cleave/kernels/buffer.h"
#include "cleave/kernels/convert.h"
#include "cleave/kernels/table.h"
#include "cleave/kernels/team.h"

namespace cleave::kernels {

namespace {

int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}

/// Keys in panels and values in padded rows, as table().attend reads them.
struct Packed {
  int64_t width, columns, panels;
  float *keys, *values;

  float* keys_of(int64_t head, int d) const {
    return keys + head * panels * width * d;
  }
  float* values_of(int64_t head) const {
    return values + head * panels * width * columns;
  }
};

/// One panel of one head, gathered from the segments.
void pack_panel(
    const AttentionShape& s,
    std::span<const KeysValues> segments,
    const Packed& p,
    int64_t head,
    int64_t panel,
    float* rows) {
  const int64_t begin = panel * p.width, batch = head / s.kv_heads, h = head % s.kv_heads;
  float* values = p.values_of(head) + begin * p.columns;
  int64_t filled = 0, start = 0;
  for (const auto& segment : segments) {
    for (int64_t i = begin + filled; filled < p.width && i < start + segment.tokens; ++i, ++filled) {
      convert_row(segment.keys.row(batch, h, i - start), segment.keys.dtype, rows + filled * s.d, mx::float32, s.d);
      float* to = values + filled * p.columns;
      convert_row(segment.values.row(batch, h, i - start), segment.values.dtype, to, mx::float32, s.dv);
      std::fill(to + s.dv, to + p.columns, 0.0f);
    }
    start += segment.tokens;
  }
  table().pack_keys(rows, s.d, filled, s.d, p.keys_of(head, s.d) + begin * s.d);
}

/// `tokens` of a head's keys or values as a task's weight.
WeightTask rows_of(const Heads& heads, int64_t batch, int64_t head, int64_t first, int64_t tokens, int64_t k) {
  WeightTask t{};
  t.data = static_cast<const uint8_t*>(heads.row(batch, head, first));
  t.stride = heads.token_stride * static_cast<int64_t>(mx::size_of(heads.dtype));
  t.number = heads.dtype == mx::float32 ? Number::f32 : heads.dtype == mx::float16 ? Number::f16 : Number::bf16;
  t.rows = tokens;
  t.k = k;
  return t;
}

/// Attention of one query per head, which reads keys and values once, where they lie.
void attention_of_one(
    const AttentionShape& s, const Heads& q, std::span<const KeysValues> segments, int64_t keys, const Heads& out) {
  const int64_t group = s.heads / s.kv_heads, lanes = table().lanes, d = round_up(s.d, lanes);
  const int64_t hidden = s.causal && s.window > 0 ? std::max<int64_t>(0, keys - s.window) : 0;
  constexpr float log2_e = 1.44269504f;
  on_team_for(s.batch * s.kv_heads, [&](int64_t i) {
    static thread_local Buffer buffer;
    const int64_t b = i / s.kv_heads, h = i % s.kv_heads;
    float* queries = buffer.at_least(group * (d + s.dv + keys + 1));
    float* result = queries + group * d;
    float* scores = result + group * s.dv;
    float* totals = scores + group * keys;
    for (int64_t g = 0; g < group; ++g) {
      float* row = queries + g * d;
      convert_row(q.row(b, h * group + g, 0), q.dtype, row, mx::float32, s.d);
      std::transform(row, row + s.d, row, [&](float x) { return x * s.scale * log2_e; });
      std::fill(row + s.d, row + d, 0.0f);
    }
    std::fill_n(result, group * s.dv, 0.0f);
    auto each_segment = [&](auto heads_of, int64_t k, auto kernel) {
      int64_t start = 0;
      for (const auto& segment : segments) {
        const int64_t first = std::clamp<int64_t>(hidden - start, 0, segment.tokens);
        auto t = rows_of(heads_of(segment), b, h, first, segment.tokens - first, k);
        t.m = group;
        kernel(t, scores + start + first);
        start += segment.tokens;
      }
    };
    each_segment(
        [](const KeysValues& kv) { return kv.keys; }, s.d,
        [&](WeightTask& t, float* to) {
          t.x = queries;
          t.x_stride = d;
          t.y = to;
          t.y_stride = keys;
          table().dot(t);
        });
    for (int64_t g = 0; g < group; ++g) {
      totals[g] = table().soften(scores + g * keys + hidden, keys - hidden);
    }
    each_segment(
        [](const KeysValues& kv) { return kv.values; }, s.dv,
        [&](WeightTask& t, float* from) {
          t.x = from;
          t.x_stride = keys;
          t.y = result;
          t.y_stride = s.dv;
          table().mix(t);
        });
    for (int64_t g = 0; g < group; ++g) {
      float* row = result + g * s.dv;
      std::transform(row, row + s.dv, row, [&](float x) { return x / totals[g]; });
      convert_row(row, mx::float32, out.row(b, h * group + g, 0), out.dtype, s.dv);
    }
  });
}

} // namespace

void attention(const AttentionShape& s, const Heads& q, std::span<const KeysValues> segments, const Heads& out) {
  static thread_local Buffer key_buffer, value_buffer;
  int64_t keys = 0;
  for (const auto& segment : segments) {
    keys += segment.tokens;
  }
  if (s.tokens == 1 && s.dv % table().lanes == 0) {
    attention_of_one(s, q, segments, keys, out);
    return;
  }
  Packed p;
  p.width = 2 * table().lanes;
  p.columns = round_up(s.dv, p.width);
  p.panels = round_up(keys, p.width) / p.width;
  const int64_t kv = s.batch * s.kv_heads;
  p.keys = key_buffer.at_least(kv * p.panels * p.width * s.d);
  p.values = value_buffer.at_least(kv * p.panels * p.width * p.columns);
  const int64_t blocks = round_up(s.tokens, kQueryBlock) / kQueryBlock;
  const int64_t group = s.heads / s.kv_heads;
  constexpr float log2_e = 1.44269504f;
  on_team([&](Fence& fence) {
    static thread_local Buffer scratch_buffer;
    float* scratch = scratch_buffer.at_least(kQueryBlock * (kKeyBlock + p.columns + s.d + s.dv) + p.width * s.d);
    float* queries = scratch + kQueryBlock * (kKeyBlock + p.columns);
    float* result = queries + kQueryBlock * s.d;
#pragma omp for collapse(2) schedule(static) nowait
    for (int64_t head = 0; head < kv; ++head) {
      for (int64_t panel = 0; panel < p.panels; ++panel) {
        pack_panel(s, segments, p, head, panel, result + kQueryBlock * s.dv);
      }
    }
    fence.barrier();
    // Late blocks see the most keys: they go first, so that no thread is left with a long one at the end.
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = 0; i < s.batch * s.heads * blocks; ++i) {
      const int64_t block = blocks - 1 - i / (s.batch * s.heads);
      const int64_t b = i % (s.batch * s.heads) / s.heads, h = i % s.heads;
      const int64_t first = block * kQueryBlock, rows = std::min<int64_t>(kQueryBlock, s.tokens - first);
      for (int64_t r = 0; r < rows; ++r) {
        float* row = queries + r * s.d;
        convert_row(q.row(b, h, first + r), q.dtype, row, mx::float32, s.d);
        std::transform(row, row + s.d, row, [&](float x) { return x * s.scale * log2_e; });
      }
      const int64_t head = b * s.kv_heads + h / group;
      const int64_t visible = s.causal ? keys - s.tokens + first + 1 : keys;
      table().attend(
          {queries, rows, s.d, s.dv, p.keys_of(head, s.d), p.values_of(head), visible, s.causal ? 1 : 0,
           s.causal && s.window > 0 ? s.window : keys, result, s.dv, scratch});
      for (int64_t r = 0; r < rows; ++r) {
        convert_row(result + r * s.dv, mx::float32, out.row(b, h, first + r), out.dtype, s.dv);
      }
    }
  });
}

} // namespace cleave::kernels
