#pragma once

#include "cleave/site/site.h"

namespace cleave {

/// Linear layers that share one input (q,k,v; gate,up; o alone): one call per unit gives its rows of every member, and
/// each member's rows are joined by a concatenation. Main's rows are the original ops on row views of the weights.
class LinearGroup : public Site {
 public:
  /// Throws std::invalid_argument when members do not share k, a weight is malformed, or shares are not legal.
  LinearGroup(std::vector<LinearWeight> members, const std::vector<UnitShare>& shares, const SiteOptions& options = {});

  /// One array [..., n_i] per member.
  std::vector<mx::array> original(const mx::array& x) const override;

  /// The largest difference between main's rows computed from the slices and the same rows of the unsplit ops, over
  /// random x [tokens, k]; 0 means bit-identical. Nothing when main has no rows beside a partner's.
  std::optional<float> main_rows_difference(int tokens) const;

 protected:
  std::vector<std::vector<int>> cut(const std::vector<double>& shares) const override;
  Request request(const std::vector<int>& begin, const std::vector<int>& rows, bool alone) const override;
  std::vector<mx::array> split(const mx::array& x) const override;

 private:
  std::vector<LinearWeight> members_;
  std::vector<std::optional<LinearWeight>> main_; ///< main's rows of each member
};

} // namespace cleave
