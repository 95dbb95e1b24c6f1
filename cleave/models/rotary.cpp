#include "cleave/models/rotary.h"

#include <cmath>

#include "mlx/fast.h"

namespace cleave {

namespace {

/// theta ^ (2 i / dims), i = 0, 1, ...: positions per radian without scaling.
mx::array plain(const RopeConfig& c, int dims, int end) {
  auto exponents = mx::divide(mx::arange(0, end, 2, mx::float32), mx::array(static_cast<float>(dims)));
  return mx::power(mx::array(c.theta), exponents);
}

mx::array scalar(double value) {
  return mx::array(static_cast<float>(value));
}

mx::array llama3(const RopeConfig& c, int dims) {
  auto freqs = plain(c, dims, dims);
  const double low = c.original_context / c.low_freq_factor, high = c.original_context / c.high_freq_factor;
  const auto wavelens = mx::multiply(scalar(2 * M_PI), freqs);
  freqs = mx::where(mx::greater(wavelens, scalar(low)), mx::multiply(freqs, scalar(c.factor)), freqs);
  const auto medium = mx::logical_and(mx::greater(wavelens, scalar(high)), mx::less(wavelens, scalar(low)));
  const auto smooth = mx::divide(
      mx::subtract(mx::divide(scalar(c.original_context), wavelens), scalar(c.low_freq_factor)),
      scalar(c.high_freq_factor - c.low_freq_factor));
  const auto mixed = mx::divide(freqs, mx::add(mx::divide(mx::subtract(scalar(1), smooth), scalar(c.factor)), smooth));
  return mx::where(medium, mixed, freqs);
}

double yarn_mscale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

mx::array yarn(const RopeConfig& c, int dims) {
  auto dim_of = [&](double rotations) {
    return dims * std::log(c.original_context / (rotations * 2 * M_PI)) / (2 * std::log(double(c.theta)));
  };
  const double low = std::max(std::floor(dim_of(c.beta_fast)), 0.0);
  double high = std::min(std::ceil(dim_of(c.beta_slow)), dims - 1.0);
  if (low == high) {
    high += 0.001;
  }
  const auto extra = plain(c, dims, dims);
  const auto inter = mx::multiply(scalar(c.factor), extra);
  const auto ramp = mx::clip(
      mx::divide(mx::subtract(mx::arange(0, dims / 2, 1, mx::float32), scalar(low)), scalar(high - low)), scalar(0),
      scalar(1));
  const auto mask = mx::subtract(scalar(1), ramp);
  return mx::divide(
      mx::multiply(inter, extra),
      mx::add(mx::multiply(inter, mask), mx::multiply(extra, mx::subtract(scalar(1), mask))));
}

mx::array proportional(const RopeConfig& c, int dims) {
  const int turned = static_cast<int>(dims * c.partial_rotary_factor);
  const auto freqs = mx::multiply(scalar(c.factor), plain(c, dims, turned));
  return mx::concatenate({freqs, mx::full({dims / 2 - freqs.shape(0)}, INFINITY, mx::float32)});
}

} // namespace

RopeSpec rope_spec(const RopeConfig& c, int dims, int context) {
  RopeSpec s{dims, c.traditional};
  if (c.type == "linear") {
    s.scale = static_cast<float>(1 / c.factor);
  } else if (c.type == "llama3") {
    s.freqs = to_freqs(llama3(c, dims));
  } else if (c.type == "yarn") {
    s.freqs = to_freqs(yarn(c, dims));
    s.amplitude = static_cast<float>(yarn_mscale(c.factor, c.mscale) / yarn_mscale(c.factor, c.mscale_all_dim));
  } else if (c.type == "proportional") {
    s.freqs = to_freqs(proportional(c, dims));
  } else if (c.type == "longrope" || c.type == "factors") {
    const mx::array factors(c.long_factor.data(), {static_cast<int>(c.long_factor.size())}, mx::float32);
    s.freqs = to_freqs(mx::multiply(factors, plain(c, dims, dims)));
  }
  if (c.type == "longrope") {
    const double factor = static_cast<double>(context ? context : 131072) / c.original_context;
    s.amplitude =
        factor <= 1 ? 1.0f : static_cast<float>(std::sqrt(1 + std::log(factor) / std::log(c.original_context)));
  }
  if (s.freqs.empty()) {
    s.base = c.theta;
  }
  return s;
}

float dynamic_base(const RopeConfig& c, int dims, int context, int end) {
  if (end <= context) {
    return c.theta;
  }
  const double stretch = c.factor * end / context - (c.factor - 1);
  return static_cast<float>(c.theta * std::pow(stretch, dims / (dims - 2.0)));
}

Rotary::Rotary(const RopeConfig& config, int dims, int context)
    : config_(config), dims_(dims), context_(context), spec_(rope_spec(config, dims, context)), rope_(spec_) {}

mx::array Rotary::operator()(const mx::array& x, int offset) const {
  const int end = offset + x.shape(2);
  if (config_.type == "dynamic" && end > context_) { // another base for each length: no angles to keep
    const float base = dynamic_base(config_, dims_, context_, end);
    return mx::fast::rope(x, dims_, config_.traditional, base, 1.0f, offset);
  }
  return rope_(x, offset);
}

const RopeSpec* Rotary::spec() const {
  return config_.type == "dynamic" ? nullptr : &spec_;
}

} // namespace cleave
