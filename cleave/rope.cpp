#include "cleave/rope.h"

#include <cmath>
#include <stdexcept>

namespace cleave {

std::vector<float> to_freqs(const mx::array& freqs) {
  auto f = mx::contiguous(mx::astype(freqs, mx::float32));
  mx::eval(f);
  return {f.data<float>(), f.data<float>() + f.size()};
}

std::vector<float> rope_frequencies(const RopeSpec& r) {
  const bool fits = r.base ? r.freqs.empty() : 2 * r.freqs.size() == static_cast<size_t>(r.dims);
  if (r.dims < 2 || r.dims % 2 != 0 || !fits) {
    throw std::invalid_argument(
        "[rope] got " + std::to_string(r.dims) + " dims and needs an even number, and either a base or dims / 2 freqs");
  }
  std::vector<float> frequencies(r.dims / 2);
  for (int i = 0; i < r.dims / 2; ++i) {
    frequencies[i] =
        r.base ? r.scale * std::exp(static_cast<float>(-i) * (std::log(*r.base) / static_cast<float>(r.dims / 2)))
               : r.scale / r.freqs[i];
  }
  return frequencies;
}

} // namespace cleave
