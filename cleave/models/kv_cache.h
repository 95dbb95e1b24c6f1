#pragma once

#include <optional>

#include "cleave/mlx.h"

namespace cleave {

/// Keys and values of one layer, [B, Hkv, T, D], in buffers that grow in steps and are written in place.
class KvCache {
 public:
  static constexpr int step = 256;

  struct View {
    mx::array keys, values; ///< [B, Hkv, T, D], of all positions so far
  };

  /// Adds positions. keys, values [B, Hkv, S, D] -> all of them. `reserve`: positions expected in the end, so that
  /// a long prompt is not copied at each chunk. Lazy. In place only while nobody else holds an earlier View.
  View append(const mx::array& keys, const mx::array& values, int reserve = 0);

  /// All positions so far; nothing before the first append.
  std::optional<View> view() const;

  int length() const {
    return length_;
  }
  int capacity() const {
    return keys_ ? keys_->shape(2) : 0;
  }
  /// The buffers, for evaluation; empty before the first append.
  std::vector<mx::array> arrays() const;

 private:
  std::optional<mx::array> keys_, values_;
  int length_ = 0;
};

/// Positions for which memory is taken: at least `positions`, a multiple of KvCache::step.
int rounded_capacity(int positions);

} // namespace cleave
