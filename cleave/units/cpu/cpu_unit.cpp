#include "cleave/units/cpu/cpu_unit.h"

#include <stdexcept>

#include "cleave/units/reference/reference_unit.h"

namespace cleave {

std::shared_ptr<Unit> make_cpu_unit(const std::string& name, const std::string& options) {
  CoreGroup cores(name, options);
  if (auto unit = make_onednn_unit(name, cores)) {
    return unit;
  }
#ifdef __APPLE__
  return make_mlx_cpu_unit(name, options);
#else
  if (!options.empty()) {
    throw std::runtime_error("[make_unit] got '" + name + "', but core groups need a build with oneDNN: use 'cpu'");
  }
  return make_reference_unit(name, {});
#endif
}

} // namespace cleave
