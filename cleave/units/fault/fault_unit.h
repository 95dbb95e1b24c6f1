#pragma once

#include "cleave/unit/unit.h"

namespace cleave {

/// A unit for tests: computes like the reference, and from call N (counted from 1 over all its programs) on fails.
std::shared_ptr<Unit> make_fault_unit(const std::string& name, const std::string& options);

} // namespace cleave
