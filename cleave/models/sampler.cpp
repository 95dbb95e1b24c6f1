#include "cleave/models/sampler.h"

#include <cmath>
#include <limits>

#include "cleave/models/error.h"

namespace cleave {

namespace {
mx::array minus_infinity(mx::Dtype dtype) {
  return mx::array(-std::numeric_limits<float>::infinity(), dtype);
}
mx::array last(const mx::array& a, int begin, int end) {
  mx::Shape start(a.ndim(), 0);
  auto stop = a.shape();
  start.back() = begin;
  stop.back() = end;
  return mx::slice(a, start, stop);
}
} // namespace

void Sampling::check(int vocab) const {
  if (!(temperature >= 0) || !std::isfinite(temperature)) {
    refuse("sample", "a temperature of " + std::to_string(temperature), "a finite number of at least 0");
  }
  if (!(top_p >= 0 && top_p <= 1)) {
    refuse("sample", "top_p " + std::to_string(top_p), "a number from 0 to 1");
  }
  if (top_k < 0 || top_k >= vocab) {
    refuse("sample", "top_k " + std::to_string(top_k), "a number from 0 to " + std::to_string(vocab - 1));
  }
}

mx::array keep_top_k(const mx::array& logits, int k) {
  const auto order = mx::argpartition(mx::negative(logits), k - 1, -1);
  const auto others = last(order, k, logits.shape(-1));
  return mx::put_along_axis(logits, others, minus_infinity(logits.dtype()), -1);
}

mx::array keep_top_p(const mx::array& log_probabilities, float p) {
  const auto sorted = mx::sort(log_probabilities, -1);
  const auto probabilities = mx::exp(mx::astype(sorted, mx::float32));
  const auto above = mx::cumsum(probabilities, -1, true, false);
  const auto total = mx::add(last(above, 0, 1), last(probabilities, 0, 1));
  const auto dropped = mx::sum(mx::greater_equal(above, mx::multiply(mx::array(p), total)), -1, true);
  const auto threshold = mx::take_along_axis(sorted, dropped, -1);
  return mx::where(
      mx::less(log_probabilities, threshold), minus_infinity(log_probabilities.dtype()), log_probabilities);
}

Sampler::Sampler(const Sampling& sampling) : sampling_(sampling), keys_(sampling.seed) {}

mx::array Sampler::operator()(const mx::array& logits) {
  if (sampling_.temperature == 0) {
    return mx::argmax(logits, -1);
  }
  auto kept = mx::subtract(logits, mx::logsumexp(logits, -1, true));
  if (sampling_.top_p > 0 && sampling_.top_p < 1) {
    kept = keep_top_p(kept, sampling_.top_p);
  }
  if (sampling_.top_k > 0) {
    kept = keep_top_k(kept, sampling_.top_k);
  }
  const auto inverse = mx::array(static_cast<float>(1.0 / sampling_.temperature), kept.dtype());
  return mx::random::categorical(mx::multiply(kept, inverse), -1, keys_.next());
}

} // namespace cleave
