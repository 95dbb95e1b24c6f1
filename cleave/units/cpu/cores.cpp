#include "cleave/units/cpu/cores.h"

#include <algorithm>
#include <charconv>
#include <exception>
#include <set>
#include <stdexcept>
#include <thread>

namespace cleave {

namespace {

/// Parses "0-1,4" into {0, 1, 4}; nothing when it is not of that form.
std::vector<int> parse(const std::string& text) {
  std::set<int> cores;
  const char* at = text.data();
  const char* end = at + text.size();
  while (at != end) {
    int first = -1;
    auto number = std::from_chars(at, end, first);
    int last = first;
    if (number.ec == std::errc() && number.ptr != end && *number.ptr == '-') {
      number = std::from_chars(number.ptr + 1, end, last);
    }
    constexpr int most = 4096;
    if (number.ec != std::errc() || first < 0 || last < first || last > most) {
      return {};
    }
    for (int c = first; c <= last; ++c) {
      cores.insert(c);
    }
    at = number.ptr;
    if (at != end && (*at != ',' || ++at == end)) {
      return {};
    }
  }
  return {cores.begin(), cores.end()};
}

} // namespace

CoreGroup::CoreGroup(const std::string& name, const std::string& options) {
  const auto allowed = allowed_cores();
  threads_ = static_cast<int>(allowed.size());
  if (options.empty()) {
    return;
  }
  cores_ = parse(options);
  if (cores_.empty()) {
    throw std::invalid_argument("[make_unit] got '" + name + "' and needs cores such as cpu:0, cpu:0-3 or cpu:0-1,4-5");
  }
  for (int c : cores_) {
    if (!std::binary_search(allowed.begin(), allowed.end(), c)) {
      throw std::runtime_error(
          "[make_unit] got '" + name + "', but this process may not run on core " + std::to_string(c) + "; it has " +
          std::to_string(allowed.size()) + " cores, " + std::to_string(allowed.front()) + " to " +
          std::to_string(allowed.back()));
    }
  }
  threads_ = static_cast<int>(cores_.size());
  bool pinned = false;
  run([&] { pinned = pin_to(cores_); });
  if (!pinned) {
    throw std::runtime_error("[make_unit] got '" + name + "', but this system cannot pin threads to cores: use 'cpu'");
  }
}

void CoreGroup::pin() const {
  if (!cores_.empty()) {
    pin_to(cores_);
  }
}

void CoreGroup::run(const std::function<void()>& work) const {
  std::exception_ptr error;
  std::thread([&] {
    try {
      pin();
      work();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) {
    std::rethrow_exception(error);
  }
}

} // namespace cleave
