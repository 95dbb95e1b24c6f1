#pragma once

#include <functional>
#include <string>
#include <vector>

namespace cleave {

/// The cores a CPU unit may use. Without a list: all that the process may run on, unpinned.
class CoreGroup {
 public:
  /// `options`: "" (all), "3", "0-3" or "0-1,4-5". Throws std::invalid_argument when it does not parse, and
  /// std::runtime_error when this process may not run on one of the cores or the system cannot pin threads.
  CoreGroup(const std::string& name, const std::string& options);

  int threads() const {
    return threads_;
  }
  const std::vector<int>& cores() const {
    return cores_;
  }
  /// Pins the calling thread to the group; threads it starts afterwards inherit that. Nothing to do without a list.
  void pin() const;
  /// Runs `work` on a thread of its own that has entered the group, and rethrows what it throws. Memory that it touches
  /// first is local to the group on NUMA machines.
  void run(const std::function<void()>& work) const;

 private:
  std::vector<int> cores_;
  int threads_;
};

/// Cores this process may run on, ascending.
std::vector<int> allowed_cores();
/// False on failure or where the system has no such call.
bool pin_to(const std::vector<int>& cores);

} // namespace cleave
