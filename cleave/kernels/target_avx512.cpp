#include <immintrin.h> // its functions are inlined everywhere

#include "cleave/kernels/table.h"

namespace cleave::kernels::avx512 {

constexpr int kLanes = 16;
constexpr const char* kName = "avx512";

extern const Table table;
#include "cleave/kernels/target.inl"

} // namespace cleave::kernels::avx512
