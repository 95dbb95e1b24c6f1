#include <immintrin.h> // its functions are inlined everywhere

#include "cleave/kernels/table.h"

namespace cleave::kernels::avx2 {

constexpr int kLanes = 8;
constexpr const char* kName = "avx2";

extern const Table table;
#include "cleave/kernels/target.inl"

} // namespace cleave::kernels::avx2
