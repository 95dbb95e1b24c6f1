#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "cleave/element.h"

namespace cleave::kernels {

/// How many of each dimension.
struct HeadCounts {
  int64_t batch, heads, tokens;
  int d;
};

/// Cosines and sines of rotary position embedding (Su et al., "RoFormer", 2021), computed once per position and kept.
/// Safe for concurrent use.
class RopeAngles {
 public:
  /// frequencies: radians per position for each pair; `amplitude` multiplies cosine and sine (YaRN's attention factor).
  RopeAngles(std::vector<float> frequencies, float amplitude);
  /// One for all who turn alike, such as the layers of a model.
  static std::shared_ptr<RopeAngles> shared(const std::vector<float>& frequencies, float amplitude);

  int half() const {
    return static_cast<int>(frequencies_.size());
  }
  /// The angles of positions from `first` on: table[i] is [cosine(half), sine(half)] of position first + i.
  std::vector<const float*> table(int64_t first, int64_t count);

 private:
  std::vector<float> frequencies_;
  float amplitude_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<float[]>> blocks_;
};

/// What is done to queries or keys before attention: RMSNorm over d where `norm` is given, then rotation of the first
/// 2 * half of d, pairs (i, i + half), or (2i, 2i + 1) when `traditional`.
struct HeadTransform {
  const float* norm = nullptr; ///< [d]
  float eps = 0;
  std::shared_ptr<RopeAngles> angles; ///< null: no rotation
  bool traditional = false;
};

/// Token i is at position offset + i. `from` and `to` may be the same.
void transform_heads(
    const HeadTransform& t, const HeadCounts& counts, int64_t offset, const Heads& from, const Heads& to);

} // namespace cleave::kernels
