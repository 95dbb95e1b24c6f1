#pragma once

#include "cleave/kernels/convert.h"

namespace cleave::kernels {

/// Rows of a matrix as floats: in place for float32, else through a buffer of its own (one object per thread).
class RowReader {
 public:
  explicit RowReader(const ConstMatrix& m) : m_(m) {
    if (m.dtype != mx::float32) {
      buffer_.resize(m.cols);
    }
  }
  const float* operator()(int64_t r) {
    const char* row = static_cast<const char*>(m_.data) + r * m_.stride * mx::size_of(m_.dtype);
    if (buffer_.empty()) {
      return reinterpret_cast<const float*>(row);
    }
    convert_row(row, m_.dtype, buffer_.data(), mx::float32, m_.cols);
    return buffer_.data();
  }

 private:
  const ConstMatrix& m_;
  std::vector<float> buffer_;
};

/// The same for a row to be written: at(r) is where to write it, done(r) puts it in its place.
class RowWriter {
 public:
  explicit RowWriter(const Matrix& m) : m_(m) {
    if (m.dtype != mx::float32) {
      buffer_.resize(m.cols);
    }
  }
  float* at(int64_t r) {
    return buffer_.empty() ? reinterpret_cast<float*>(row(r)) : buffer_.data();
  }
  void done(int64_t r) {
    if (!buffer_.empty()) {
      convert_row(buffer_.data(), mx::float32, row(r), m_.dtype, m_.cols);
    }
  }

 private:
  char* row(int64_t r) const {
    return static_cast<char*>(m_.data) + r * m_.stride * mx::size_of(m_.dtype);
  }
  const Matrix& m_;
  std::vector<float> buffer_;
};

} // namespace cleave::kernels
