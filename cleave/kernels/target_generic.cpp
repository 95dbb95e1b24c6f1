#include "cleave/kernels/table.h"

namespace cleave::kernels::generic {

constexpr int kLanes = 4;
constexpr const char* kName = "generic";

extern const Table table;
#include "cleave/kernels/target.inl"

} // namespace cleave::kernels::generic
