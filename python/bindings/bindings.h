// What the parts of the extension share.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>
#include <vector>

#include "cleave/site/shares.h"

namespace cleave {

/// (unit, share); no unit stands for main.
using Shares = std::vector<std::pair<std::shared_ptr<Unit>, double>>;

inline std::vector<UnitShare> to_shares(const Shares& shares) {
  std::vector<UnitShare> out;
  for (const auto& [unit, share] : shares) {
    out.push_back({unit, share});
  }
  return out;
}

/// Decoder, Session and what loads them.
void bind_models(nanobind::module_& m);

} // namespace cleave
