// Where no kernels are built: mlx's own.
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
    const mx::array& q, const mx::array& k, const mx::array& v, float scale, bool causal, mx::StreamOrDevice s) {
  return mx::fast::scaled_dot_product_attention(q, k, v, scale, causal ? "causal" : "", {}, {}, false, s);
}

Rope::Rope(int dims, bool traditional, std::optional<float> base, float scale, const std::optional<mx::array>& freqs)
    : dims_(dims), traditional_(traditional), base_(base), scale_(scale), freqs_(freqs) {}

mx::array Rope::operator()(const mx::array& x, int offset, mx::StreamOrDevice s) const {
  return mx::fast::rope(x, dims_, traditional_, base_, scale_, offset, freqs_, s);
}

} // namespace cleave::ops
