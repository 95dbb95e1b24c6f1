#include "cleave/rope.h"

#include <cmath>
#include <stdexcept>

namespace cleave {

std::vector<float> rope_frequencies(const RopeSpec& r) {
  if (r.dims < 2 || r.dims % 2 != 0 || r.base.has_value() == r.freqs.has_value() ||
      (r.freqs && r.freqs->size() != r.dims / 2u)) {
    throw std::invalid_argument(
        "[rope] got " + std::to_string(r.dims) + " dims and needs an even number, and either a base or dims / 2 freqs");
  }
  std::vector<float> frequencies(r.dims / 2);
  if (r.freqs) {
    auto f = mx::contiguous(mx::astype(*r.freqs, mx::float32));
    mx::eval(f);
    for (int i = 0; i < r.dims / 2; ++i) {
      frequencies[i] = r.scale / f.data<float>()[i];
    }
  } else {
    for (int i = 0; i < r.dims / 2; ++i) {
      frequencies[i] =
          r.scale * std::exp(static_cast<float>(-i) * (std::log(*r.base) / static_cast<float>(r.dims / 2)));
    }
  }
  return frequencies;
}

} // namespace cleave
