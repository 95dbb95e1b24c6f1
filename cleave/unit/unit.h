#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cleave/unit/program.h"

namespace cleave {

/// Anything that multiplies beside the unit MLX itself runs on. Safe to use from several threads.
class Unit {
 public:
  explicit Unit(std::string name);
  virtual ~Unit() = default;
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  const std::string& name() const {
    return name_;
  }
  /// One line on what the unit is and how it multiplies.
  virtual std::string description() const = 0;
  /// The calling thread's stream for this unit (streams belong to a thread since mlx 0.31.2).
  mx::Stream stream() const;

  /// Whether the unit computes on the very cores that a CPU main uses, so that nothing is gained from a second stream.
  virtual bool shares_cores_with_main() const {
    return false;
  }

  /// Why the unit cannot take such a site, as a sentence; nothing when it can.
  virtual std::optional<std::string> refusal(const ProgramSpec& spec) const = 0;
  /// Bytes a program for `spec` would hold, an upper estimate.
  virtual size_t memory(const ProgramSpec& spec) const = 0;
  /// Compiles and loads. weights: the members of a linear group; gate, up, down of an mlp; q, k, v, o of an
  /// attention; already cut to this unit's rows and evaluated. Throws std::runtime_error with a sentence when it fails.
  virtual std::shared_ptr<Program> compile(const ProgramSpec& spec, const std::vector<LinearWeight>& weights) = 0;

  /// Switches the unit off after a failed call; the first is logged in one line. Never throws.
  void report_failure(const std::string& what) noexcept;
  bool failed() const {
    return failures_.load(std::memory_order_relaxed) != 0;
  }
  size_t failures() const {
    return failures_.load();
  }
  std::string failure() const; ///< the first one's text, or empty

 private:
  std::string name_;
  mx::ThreadLocalStream stream_;
  std::atomic<size_t> failures_{0};
  mutable std::mutex mutex_;
  std::string failure_;
};

} // namespace cleave
