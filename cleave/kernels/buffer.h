#pragma once

#include <cstddef>
#include <memory>

namespace cleave::kernels {

/// Uninitialised floats that grow and stay: but the first, a call that uses them costs no page faults.
class Buffer {
 public:
  float* at_least(size_t count) {
    if (size_ < count) {
      data_.reset(new float[count]);
      size_ = count;
    }
    return data_.get();
  }

 private:
  std::unique_ptr<float[]> data_;
  size_t size_ = 0;
};

} // namespace cleave::kernels
