#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "cleave/graph/site_stats.h"
#include "cleave/unit/unit.h"

namespace cleave {

/// A program with all that its calls need.
struct UnitProgram {
  std::shared_ptr<Unit> unit;
  std::shared_ptr<Program> program;
  std::shared_ptr<KernelProgram> rescue; ///< finishes a call that the unit failed
  std::shared_ptr<SiteStats> stats;
  SiteKind kind;
  std::vector<int> n; ///< output channels per output
  bool alone = false; ///< no other unit, nor main, has rows of the site
};

/// Shared with queued tasks, so that a site may die before its last call has run.
using SharedProgram = std::shared_ptr<const UnitProgram>;

/// A column range of an uninitialised joint buffer (graph/join.h) in which an output is to be written.
struct Slot {
  mx::array buffer;
  int column;
};

/// Cached keys (normed and turned) and values [B, Hkv, T, D] of a program's heads.
struct CachedHeads {
  mx::array keys, values;
};

/// One call of one program as a lazy node, on the unit's own stream; on main's where the unit does the whole site with
/// main's own cores, which saves crossing over and back. x: [..., k] -> one array [..., n_i] per output,
/// of dtype out_i. An attention program takes x [B, S, k] and, unless the sequences begin with it, `past`. With
/// `slots`, one per output, the outputs are views into those buffers; graph programs ignore them. Right under
/// mx.compile (also shapeless) and async_eval; vjp, jvp and vmap throw a sentence.
std::vector<mx::array> unit_call(
    const SharedProgram& program,
    const mx::array& x,
    const std::vector<mx::Dtype>& out,
    const std::vector<Slot>& slots = {},
    const std::optional<CachedHeads>& past = std::nullopt);

} // namespace cleave
