#pragma once

#include <omp.h>

#include <memory>
#include <mutex>
#include <vector>

#include "cleave/units/cpu/cores.h"

namespace cleave {

/// What the programs of a CPU unit share: its cores, and scratch memory that one call at a time may use.
class Workshop {
 public:
  explicit Workshop(CoreGroup cores) : cores_(std::move(cores)) {}

  const CoreGroup& cores() const {
    return cores_;
  }
  std::mutex& mutex() {
    return mutex_;
  }
  /// Makes the calling thread one of the group.
  void enter() {
    static thread_local const Workshop* entered = nullptr;
    if (entered != this) {
      cores_.pin();
      omp_set_num_threads(cores_.threads());
      entered = this;
    }
  }
  /// The slot's buffer, at least `bytes` long, uninitialised.
  void* scratch(size_t slot, size_t bytes) {
    if (buffers_.size() <= slot) {
      buffers_.resize(slot + 1);
    }
    auto& [data, size] = buffers_[slot];
    if (size < bytes) {
      data.reset(); // before the new one, so that both are never held
      data.reset(static_cast<char*>(::operator new(bytes, alignment)));
      size = bytes;
    }
    return data.get();
  }

 private:
  static constexpr std::align_val_t alignment{64};
  struct Free {
    void operator()(char* p) const {
      ::operator delete(p, alignment);
    }
  };
  CoreGroup cores_;
  std::mutex mutex_;
  std::vector<std::pair<std::unique_ptr<char, Free>, size_t>> buffers_;
};

} // namespace cleave
