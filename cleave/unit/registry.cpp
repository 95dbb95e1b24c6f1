#include "cleave/unit/registry.h"

#include <stdexcept>

#include "cleave/units/cpu/cpu_unit.h"
#include "cleave/units/fault/fault_unit.h"
#include "cleave/units/reference/reference_unit.h"

namespace cleave {

const std::vector<UnitEntry>& unit_table() {
  static const std::vector<UnitEntry> table{
      {"cpu", "all cores, or a core group such as cpu:0 or cpu:0-3", true, make_cpu_unit},
      {"mlx-cpu", "mlx's own product in fp32 on a CPU stream; what cpu is on macOS", false, make_mlx_cpu_unit},
      {"reference", "plain loops, the oracle", false, make_reference_unit},
      {"fault", "for tests: reference until call N of fault:N, then every call fails", false, make_fault_unit},
  };
  return table;
}

std::shared_ptr<Unit> make_unit(const std::string& name) {
  auto colon = name.find(':');
  auto family = name.substr(0, colon);
  auto options = colon == std::string::npos ? std::string() : name.substr(colon + 1);
  std::string known;
  for (const auto& entry : unit_table()) {
    if (entry.family == family) {
      if (colon != std::string::npos && options.empty()) {
        throw std::invalid_argument("[make_unit] got '" + name + "' and needs something after the colon");
      }
      return entry.make(name, options);
    }
    known += (known.empty() ? "" : ", ") + entry.family;
  }
  if (is_main_unit(name)) {
    throw std::invalid_argument(
        "[make_unit] got '" + name + "', which is the unit MLX itself runs on, and needs a partner: " + known);
  }
  throw std::invalid_argument("[make_unit] got unit '" + name + "' and knows only: main, " + known);
}

bool is_main_unit(const std::string& name) {
  return name == "main" || (name == "gpu" && mx::default_device() == mx::Device::gpu);
}

std::vector<Availability> available_units() {
  std::vector<Availability> all;
  for (const auto& entry : unit_table()) {
    if (entry.family == "fault") {
      continue;
    }
    try {
      auto unit = entry.make(entry.family, {});
      all.push_back({entry.family, unit->description(), true});
    } catch (const std::exception& e) {
      all.push_back({entry.family, e.what(), false});
    }
  }
  return all;
}

} // namespace cleave
