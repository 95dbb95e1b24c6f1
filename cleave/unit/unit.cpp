#include "cleave/unit/unit.h"

#include <cstdio>

namespace cleave {

Unit::Unit(std::string name)
    : name_(std::move(name)), stream_(mx::new_thread_local_stream(mx::Device(mx::Device::cpu))) {}

mx::Stream Unit::stream() const {
  return mx::stream_from_thread_local_stream(stream_);
}

void Unit::report_failure(const std::string& what) noexcept {
  if (failures_.fetch_add(1) != 0) {
    return;
  }
  std::fprintf(stderr, "cleave: unit %s failed and is switched off: %s\n", name_.c_str(), what.c_str());
  try {
    std::lock_guard lock(mutex_);
    failure_ = what;
  } catch (...) {
  }
}

std::string Unit::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

} // namespace cleave
