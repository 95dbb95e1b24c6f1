#include "cleave/graph/heads_input.h"

#include "cleave/graph/gather.h"

namespace cleave {

Heads heads_of(const mx::array& a) {
  return {const_cast<void*>(a.data<void>()), a.dtype(), a.strides(0), a.strides(1), a.strides(2)};
}

HeadsInput::HeadsInput(const mx::array& a)
    : heads_(heads_of(a)), shape_(a.shape()), strides_(a.strides()), scattered_(a.strides(3) != 1 && a.shape(3) != 1) {}

Heads HeadsInput::heads() {
  if (!scattered_) {
    return heads_;
  }
  copy_ = gather(heads_.data, mx::size_of(heads_.dtype), shape_, strides_);
  const int64_t h = shape_[1], s = shape_[2], d = shape_[3];
  return {copy_.data(), heads_.dtype, h * s * d, s * d, d};
}

} // namespace cleave
