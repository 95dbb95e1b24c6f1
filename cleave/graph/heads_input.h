#pragma once

#include <vector>

#include "cleave/element.h"

namespace cleave {

/// An evaluated array [B, H, S, D] in host memory, its last dimension's stride 1.
Heads heads_of(const mx::array& a);

/// An input [B, H, S, D] for a task: as it lies where the elements of a row are adjacent, else by way of a copy.
class HeadsInput {
 public:
  explicit HeadsInput(const mx::array& a);
  /// Call in the task, once; valid while this object lives.
  Heads heads();

 private:
  Heads heads_;
  mx::Shape shape_;
  mx::Strides strides_;
  bool scattered_;
  std::vector<char> copy_;
};

} // namespace cleave
