#include <algorithm>
#include <cmath>

#include "cleave/units/reference/reference_math.h"

namespace cleave {

namespace {

/// Rows of heads side by side, [batch * tokens, heads * d], normed and turned in place.
class Turn {
 public:
  Turn(const AttentionSpec& spec, const std::optional<mx::array>& norm) : d_(spec.head_dim), eps_(spec.norm_eps) {
    if (norm) {
      norm_.resize(d_);
      unpack_vector(*norm, norm_.data());
    }
    if (spec.rope) {
      frequencies_ = rope_frequencies(*spec.rope);
      traditional_ = spec.rope->traditional;
      amplitude_ = spec.rope->amplitude;
    }
  }
  void operator()(float* head, int64_t position) const {
    if (!norm_.empty()) {
      double sum = 0;
      for (int i = 0; i < d_; ++i) {
        sum += double(head[i]) * head[i];
      }
      const double factor = 1 / std::sqrt(sum / d_ + eps_);
      for (int i = 0; i < d_; ++i) {
        head[i] = static_cast<float>(head[i] * factor * norm_[i]);
      }
    }
    const size_t half = frequencies_.size();
    for (size_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(position) * frequencies_[i]; // in fp32, as models are trained
      float &a = head[traditional_ ? 2 * i : i], &b = head[traditional_ ? 2 * i + 1 : i + half];
      const double c = amplitude_ * std::cos(double(angle)), s = amplitude_ * std::sin(double(angle));
      const double turned = a * c - b * s;
      b = static_cast<float>(a * s + b * c);
      a = static_cast<float>(turned);
    }
  }

 private:
  int d_;
  float eps_, amplitude_ = 1;
  bool traditional_ = false;
  Floats norm_, frequencies_;
};

/// All positions of one key-value head, [past + tokens, d].
Floats with_past(
    const Heads& before,
    int64_t past,
    const Floats& now,
    int64_t batch,
    int64_t head,
    int64_t tokens,
    const AttentionSpec& s) {
  Floats all;
  for (int64_t t = 0; t < past; ++t) {
    const auto row = to_floats({before.row(batch, head, t), before.dtype, 1, s.head_dim, s.head_dim});
    all.insert(all.end(), row.begin(), row.end());
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const float* row = now.data() + ((batch * tokens + t) * s.kv_heads + head) * s.head_dim;
    all.insert(all.end(), row, row + s.head_dim);
  }
  return all;
}

/// softmax(scale * q k^T) v for one query over positions [first, end).
void attend(
    const AttentionSpec& s,
    const float* q,
    const Floats& keys,
    const Floats& values,
    int64_t first,
    int64_t end,
    float* out) {
  const int d = s.head_dim;
  Floats weights(end - first);
  for (int64_t t = first; t < end; ++t) {
    weights[t - first] = s.scale * dot(q, keys.data() + t * d, d);
  }
  const float top = *std::max_element(weights.begin(), weights.end());
  std::vector<double> sums(d);
  double total = 0;
  for (int64_t t = first; t < end; ++t) {
    const double weight = std::exp(double(weights[t - first]) - top);
    total += weight;
    for (int i = 0; i < d; ++i) {
      sums[i] += weight * values[t * d + i];
    }
  }
  for (int i = 0; i < d; ++i) {
    out[i] = static_cast<float>(sums[i] / total);
  }
}

} // namespace

void reference_attention(
    const AttentionSpec& s,
    const std::vector<LinearWeight>& weights,
    const Floats& x,
    int64_t rows,
    const Past& past,
    std::span<const Matrix> outputs) {
  Floats q = multiply(x, rows, weights[0]), k = multiply(x, rows, weights[1]);
  const Floats v = multiply(x, rows, weights[2]);
  const int64_t tokens = rows / past.batch, before = past.before.tokens;
  const int d = s.head_dim, group = s.heads / s.kv_heads;
  const Turn turn_q(s, s.q_norm), turn_k(s, s.k_norm);
  for (int64_t r = 0; r < rows; ++r) {
    for (int h = 0; h < s.heads; ++h) {
      turn_q(q.data() + (r * s.heads + h) * d, before + r % tokens);
    }
    for (int h = 0; h < s.kv_heads; ++h) {
      turn_k(k.data() + (r * s.kv_heads + h) * d, before + r % tokens);
    }
  }
  Floats joined(q.size());
  for (int64_t b = 0; b < past.batch; ++b) {
    for (int h = 0; h < s.kv_heads; ++h) {
      const auto keys = with_past(past.before.keys, before, k, b, h, tokens, s);
      const auto values = with_past(past.before.values, before, v, b, h, tokens, s);
      for (int64_t i = 0; i < tokens * group; ++i) {
        const int64_t t = i / group, at = ((b * tokens + t) * s.heads + h * group + i % group) * d;
        const int64_t end = before + t + 1;
        attend(
            s, q.data() + at, keys, values, s.window ? std::max<int64_t>(0, end - s.window) : 0, end,
            joined.data() + at);
      }
    }
  }
  store(multiply(joined, rows, weights[3]), outputs[0]);
  store(k, outputs[1]);
  store(v, outputs[2]);
}

} // namespace cleave
