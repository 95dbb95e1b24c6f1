// Where no kernels are built: mlx's own.
#include "cleave/ops/fallback.h"
#include "cleave/ops/ops.h"
#include "mlx/fast.h"

namespace cleave::ops {

bool serves(mx::StreamOrDevice) {
  return false;
}

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps, mx::StreamOrDevice s) {
  return mx::fast::rms_norm(x, weight, eps, s);
}

mx::array add(const mx::array& a, const mx::array& b, mx::StreamOrDevice s) {
  return mx::add(a, b, s);
}

mx::array attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    float scale,
    bool causal,
    int window,
    mx::StreamOrDevice s) {
  return mlx_attention(q, k, v, scale, causal, window, s);
}

Rope::Rope(const RopeSpec& spec) : spec_(spec) {
  rope_frequencies(spec_); // checks
}

mx::array Rope::operator()(const mx::array& x, int offset, mx::StreamOrDevice s) const {
  return mlx_rope(spec_, x, offset, s);
}

} // namespace cleave::ops
