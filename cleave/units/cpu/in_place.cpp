#include "cleave/units/cpu/in_place.h"

#include <bit>

#include "cleave/kernels/team.h"

namespace cleave {

namespace {

/// Rows of a matrix have adjacent columns.
bool adjacent(const mx::array& a) {
  return a.strides(1) == 1 || a.shape(1) == 1;
}

int64_t bytes_between_rows(const mx::array& a) {
  return a.strides(0) * static_cast<int64_t>(a.itemsize());
}

std::optional<kernels::WeightRows> rows_of(const LinearWeight& w) {
  kernels::WeightRows r{w.weight.data<void>(), w.weight.dtype(), w.n(), w.k(), bytes_between_rows(w.weight)};
  bool serves = adjacent(w.weight);
  if (w.packed()) {
    serves = serves && w.mode == "affine" && w.group_size >= 32 && std::has_single_bit(unsigned(w.group_size)) &&
             adjacent(*w.scales) && adjacent(*w.biases) && w.scales->strides(0) == w.biases->strides(0);
    if (!serves) {
      return std::nullopt;
    }
    r.dtype = w.scales->dtype();
    r.bits = w.bits;
    r.group = w.group_size;
    r.scales = w.scales->data<void>();
    r.biases = w.biases->data<void>();
    r.scale_stride = bytes_between_rows(*w.scales);
  }
  if (w.bias) {
    serves = serves && (w.bias->strides(0) == 1 || w.n() == 1);
    r.bias = w.bias->data<void>();
    r.bias_dtype = w.bias->dtype();
  }
  return serves ? std::optional(r) : std::nullopt;
}

} // namespace

InPlace::InPlace(std::vector<LinearWeight> weights) : weights_(std::move(weights)) {
  for (const auto& w : weights_) {
    const auto rows = rows_of(w);
    if (!rows) {
      rows_.clear();
      return;
    }
    rows_.push_back(*rows);
  }
}

void unpack_rows(const LinearWeight& w, int64_t begin, int64_t end, float* out) {
  if (const auto rows = rows_of(w)) {
    kernels::unpack_rows(*rows, begin, end, out);
    return;
  }
  kernels::on_team_for(end - begin, [&](int64_t i) { unpack_row(w, static_cast<int>(begin + i), out + i * w.k()); });
}

} // namespace cleave
