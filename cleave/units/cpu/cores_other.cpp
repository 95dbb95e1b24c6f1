#include <algorithm>
#include <numeric>
#include <thread>

#include "cleave/units/cpu/cores.h"

namespace cleave {

std::vector<int> allowed_cores() {
  std::vector<int> cores(std::max(1u, std::thread::hardware_concurrency()));
  std::iota(cores.begin(), cores.end(), 0);
  return cores;
}

bool pin_to(const std::vector<int>&) {
  return false;
}

} // namespace cleave
