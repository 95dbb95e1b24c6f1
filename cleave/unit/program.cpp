#include "cleave/unit/program.h"

#include <array>
#include <numeric>
#include <stdexcept>
#include <utility>

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

namespace {
constexpr std::array<std::pair<Precision, const char*>, 3> precision_names{{
    {Precision::exact, "exact"},
    {Precision::bf16, "bf16"},
    {Precision::int8, "int8"},
}};
}

const char* to_string(Precision precision) {
  return precision_names[static_cast<size_t>(precision)].second;
}

Precision precision_from_string(const std::string& name) {
  for (auto [value, text] : precision_names) {
    if (name == text) {
      return value;
    }
  }
  throw std::invalid_argument("[precision] got '" + name + "' and needs exact, bf16 or int8");
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
