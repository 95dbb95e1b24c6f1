#pragma once

#include <optional>
#include <vector>

#include "cleave/mlx.h"

namespace cleave {

/// A rotary position embedding (Su et al., "RoFormer", 2021) in the terms of mx::fast::rope.
struct RopeSpec {
  int dims;                                 ///< how many of the last dimension are turned, an even number
  bool traditional = false;                 ///< neighbours are turned together, not values half of dims apart
  std::optional<float> base = std::nullopt; ///< either base or freqs is given
  float scale = 1;                          ///< of positions
  std::vector<float> freqs = {};            ///< [dims / 2]: positions per radian
  float amplitude = 1;                      ///< factor on what is turned (YaRN's attention factor)
};

/// A vector of freqs as numbers; evaluates it.
std::vector<float> to_freqs(const mx::array& freqs);

/// Radians per position of each pair, [dims / 2]. Throws std::invalid_argument when the parts do not fit together.
std::vector<float> rope_frequencies(const RopeSpec& spec);

} // namespace cleave
