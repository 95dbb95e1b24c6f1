#include "cleave/unit/program.h"

#include <numeric>

namespace cleave {

const char* to_string(SiteKind kind) {
  switch (kind) {
    case SiteKind::linear_group:
      return "linear group";
    case SiteKind::mlp:
      return "mlp";
    case SiteKind::attention:
      return "attention";
  }
  return "";
}

int64_t ProgramSpec::parameters() const {
  if (kind == SiteKind::mlp) {
    return int64_t(hidden) * (2 * int64_t(k) + n[0]);
  }
  if (kind == SiteKind::attention) {
    return int64_t(hidden) * (int64_t(k) + n[0]) + int64_t(k) * (int64_t(n[1]) + n[2]);
  }
  return int64_t(k) * std::accumulate(n.begin(), n.end(), int64_t(0));
}

} // namespace cleave
