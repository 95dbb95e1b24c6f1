#include "cleave/unit/program.h"

#include <numeric>

namespace cleave {

const char* to_string(SiteKind kind) {
  return kind == SiteKind::mlp ? "mlp" : "linear group";
}

int64_t ProgramSpec::parameters() const {
  if (kind == SiteKind::mlp) {
    return int64_t(hidden) * (2 * int64_t(k) + n[0]);
  }
  return int64_t(k) * std::accumulate(n.begin(), n.end(), int64_t(0));
}

} // namespace cleave
