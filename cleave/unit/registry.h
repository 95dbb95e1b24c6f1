#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cleave/unit/unit.h"

namespace cleave {

/// A unit's entry in the ordered table: the part of its name before ':', a line of help, and how to make one.
struct UnitEntry {
  std::string family;
  std::string help;
  bool automatic; ///< whether units="auto" may pick it
  /// `options` is the part after ':', or empty. Throws std::runtime_error with the refusal as its sentence when this
  /// machine lacks the unit, std::invalid_argument when the options do not parse.
  std::shared_ptr<Unit> (*make)(const std::string& name, const std::string& options);
};

/// All unit families, the preferred ones first.
const std::vector<UnitEntry>& unit_table();

/// Makes a unit by name: "cpu", "cpu:0", "cpu:0-3", "reference", ... Each call gives a new unit.
/// Throws std::invalid_argument for an unknown name and what UnitEntry::make throws.
std::shared_ptr<Unit> make_unit(const std::string& name);

/// True for the names of the unit MLX itself runs on: "main", "gpu" with a GPU as mlx's default device.
bool is_main_unit(const std::string& name);

struct Availability {
  std::string name;
  std::string text; ///< description, or the refusal
  bool available;
};
/// Tries every family once without options.
std::vector<Availability> available_units();

} // namespace cleave
