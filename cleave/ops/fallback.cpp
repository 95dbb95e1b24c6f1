#include "cleave/ops/fallback.h"

#include "mlx/fast.h"

namespace cleave::ops {

namespace {

mx::array from_position(const mx::array& a, int first, mx::StreamOrDevice s) {
  return mx::slice(a, {0, 0, first, 0}, a.shape(), s);
}

/// [S, T]: which positions each of the last S of T sees.
mx::array window_mask(int tokens, int keys, int window, mx::StreamOrDevice s) {
  const auto rows = mx::expand_dims(mx::arange(keys - tokens, keys, s), 1, s);
  const auto columns = mx::expand_dims(mx::arange(keys, s), 0, s);
  return mx::logical_and(
      mx::greater_equal(rows, columns, s), mx::less(rows, mx::add(columns, mx::array(window), s), s), s);
}

} // namespace

mx::array mlx_attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    float scale,
    bool causal,
    int window,
    mx::StreamOrDevice s) {
  const int tokens = q.shape(2), keys = k.shape(2);
  const bool limited = causal && window > 0 && keys > window;
  if (limited && tokens > 1) {
    const auto mask = window_mask(tokens, keys, window, s);
    return mx::fast::scaled_dot_product_attention(q, k, v, scale, "array", mask, {}, false, s);
  }
  const int first = limited ? keys - window : 0; // a single query needs no mask, only the window's keys
  return mx::fast::scaled_dot_product_attention(
      q, from_position(k, first, s), from_position(v, first, s), scale, causal && tokens > 1 ? "causal" : "", {}, {},
      false, s);
}

mx::array mlx_rope(const RopeSpec& r, const mx::array& x, int offset, mx::StreamOrDevice s) {
  auto in = x;
  if (r.amplitude != 1.0f) {
    const auto factor = mx::array(r.amplitude, x.dtype());
    auto stop = x.shape();
    stop.back() = r.dims;
    const mx::Shape start(x.ndim(), 0);
    const auto turned = mx::multiply(mx::slice(x, start, stop, s), factor, s);
    in = r.dims == x.shape(-1) ? turned : mx::slice_update(x, turned, start, stop, s);
  }
  std::optional<mx::array> freqs;
  if (!r.base) {
    freqs.emplace(r.freqs.data(), mx::Shape{r.dims / 2}, mx::float32);
  }
  return mx::fast::rope(in, r.dims, r.traditional, r.base, r.scale, offset, freqs, s);
}

} // namespace cleave::ops
