#include "cleave/unit/unit.h"

#include <cstdio>
#include <map>

namespace cleave {

namespace {

/// Units of one name share their stream: mlx never ends a stream's thread, so a stream for each would pile up with
/// every patching. Two units of one name stand for the same cores anyway.
mx::ThreadLocalStream stream_of(const std::string& name) {
  static std::mutex mutex;
  static std::map<std::string, mx::ThreadLocalStream> streams;
  std::lock_guard lock(mutex);
  auto found = streams.find(name);
  if (found == streams.end()) {
    found = streams.emplace(name, mx::new_thread_local_stream(mx::Device(mx::Device::cpu))).first;
  }
  return found->second;
}

} // namespace

Unit::Unit(std::string name) : name_(std::move(name)), stream_(stream_of(name_)) {}

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
