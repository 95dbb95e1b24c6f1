#pragma once

#include <memory>
#include <vector>

#include "cleave/unit/unit.h"

namespace cleave {

/// A unit with its share of a site's rows; no unit stands for main, the one MLX itself runs on.
struct UnitShare {
  std::shared_ptr<Unit> unit;
  double share;
};

/// Throws std::invalid_argument when a share lies outside [0, 1] or they do not sum to 1 (within 1e-6), or when main or
/// a unit is named twice.
void check_shares(const std::vector<UnitShare>& shares);

/// Rows per share: they sum to `total`, differ from share * total by less than `align`, and all but one are multiples
/// of `align`. Largest remainders round up.
std::vector<int> cut_rows(int total, const std::vector<double>& shares, int align = 1);

} // namespace cleave
