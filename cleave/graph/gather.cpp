#include "cleave/graph/gather.h"

#include <cstring>

namespace cleave {

std::vector<char> gather(const void* data, size_t itemsize, const mx::Shape& shape, const mx::Strides& strides) {
  size_t size = itemsize;
  for (auto d : shape) {
    size *= d;
  }
  std::vector<char> out(size);
  const auto* from = static_cast<const char*>(data);
  char* to = out.data();
  std::vector<int64_t> index(shape.size(), 0);
  for (size_t done = 0; done < size; done += itemsize, to += itemsize) {
    int64_t offset = 0;
    for (size_t d = 0; d < shape.size(); ++d) {
      offset += index[d] * strides[d];
    }
    std::memcpy(to, from + offset * itemsize, itemsize);
    for (size_t d = shape.size(); d-- > 0 && ++index[d] == shape[d];) {
      index[d] = 0;
    }
  }
  return out;
}

} // namespace cleave
