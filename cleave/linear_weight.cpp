#include "cleave/linear_weight.h"

#include <cmath>
#include <sstream>
#include <stdexcept>

#include "cleave/element.h"

namespace cleave {

int LinearWeight::n() const {
  return weight.shape(0);
}

int LinearWeight::k() const {
  return packed() ? static_cast<int>(int64_t(weight.shape(1)) * 32 / bits) : weight.shape(1);
}

size_t LinearWeight::nbytes() const {
  size_t total = weight.nbytes();
  for (const auto* a : {&scales, &biases, &bias}) {
    total += *a ? (*a)->nbytes() : 0;
  }
  return total;
}

std::string LinearWeight::format() const {
  std::ostringstream s;
  if (packed()) {
    s << mode << ' ' << bits << "-bit group " << group_size;
  } else {
    s << weight.dtype();
  }
  return s.str();
}

LinearWeight LinearWeight::rows(int begin, int end) const {
  auto cut = [&](const mx::array& a) {
    auto stop = a.shape();
    stop[0] = end;
    mx::Shape start(a.ndim(), 0);
    start[0] = begin;
    return mx::slice(a, std::move(start), std::move(stop));
  };
  LinearWeight part = *this;
  part.transposed = std::nullopt;
  part.weight = cut(weight);
  for (auto [from, to] : {std::pair{&scales, &part.scales}, {&biases, &part.biases}, {&bias, &part.bias}}) {
    if (*from) {
      *to = cut(**from);
    }
  }
  return part;
}

LinearWeight LinearWeight::columns(int begin, int end) const {
  if (packed() && (begin % group_size || end % group_size)) {
    std::ostringstream s;
    s << "[columns] got [" << begin << ", " << end << ") and needs multiples of the group size " << group_size;
    throw std::invalid_argument(s.str());
  }
  auto cut = [](const mx::array& a, int b, int e) { return mx::slice(a, {0, b}, {a.shape(0), e}); };
  LinearWeight part = *this;
  part.bias = part.transposed = std::nullopt;
  if (!packed()) {
    part.weight = cut(weight, begin, end);
    return part;
  }
  part.weight = cut(weight, begin * bits / 32, end * bits / 32);
  part.scales = cut(*scales, begin / group_size, end / group_size);
  if (biases) {
    part.biases = cut(*biases, begin / group_size, end / group_size);
  }
  return part;
}

mx::array LinearWeight::linear(const mx::array& x, mx::StreamOrDevice s) const {
  if (packed()) {
    auto y = mx::quantized_matmul(x, weight, *scales, biases, true, group_size, bits, mode, s);
    return bias ? mx::add(y, *bias, s) : y;
  }
  auto wt = transposed ? *transposed : mx::transpose(weight, s);
  return bias ? mx::addmm(*bias, x, wt, 1.0f, 1.0f, s) : mx::matmul(x, wt, s);
}

void LinearWeight::keep_transposed() {
  if (!packed()) {
    transposed = mx::transpose(weight);
    mx::eval(*transposed);
  }
}

mx::Dtype LinearWeight::output_dtype(mx::Dtype x) const {
  auto dtype = x;
  if (!packed()) {
    dtype = mx::promote_types(x, weight.dtype());
  } else if (mode == "affine") {
    dtype = mx::promote_types(x, scales->dtype());
  }
  return bias ? mx::promote_types(dtype, bias->dtype()) : dtype;
}

mx::Dtype LinearWeight::activation_dtype() const {
  if (!packed()) {
    return weight.dtype();
  }
  if (mode == "affine") {
    return scales->dtype();
  }
  return bias ? bias->dtype() : mx::float32;
}

void LinearWeight::check(const std::string& op) const {
  auto fail = [&](const std::string& given, const std::string& needed) {
    throw std::invalid_argument("[" + op + "] got " + given + " and needs " + needed);
  };
  auto shown = [](const mx::array& a) {
    std::ostringstream s;
    s << a.dtype() << ' ' << a.shape();
    return s.str();
  };
  if (weight.ndim() != 2 || weight.size() == 0) {
    fail("a weight of " + shown(weight), "a matrix [n, k] that is not empty");
  }
  if (!packed()) {
    if (!is_activation_dtype(weight.dtype())) {
      fail("a weight of " + shown(weight), "float32, float16, bfloat16 or a packed weight with its mode");
    }
  } else {
    if (mode != "affine" && mode != "mxfp4" && mode != "mxfp8" && mode != "nvfp4") {
      fail("quantisation mode '" + mode + "'", "affine, mxfp4, mxfp8 or nvfp4");
    }
    bool known = bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8;
    if (weight.dtype() != mx::uint32 || !scales || !known || group_size <= 0) {
      fail(
          "a packed weight of " + shown(weight) + " with " + std::to_string(bits) + " bits and group size " +
              std::to_string(group_size),
          "uint32, scales, bits of 2, 3, 4, 5, 6 or 8 and a group size above 0");
    }
    mx::Shape groups{n(), k() / group_size};
    if (scales->shape() != groups) {
      fail("scales of " + shown(*scales), "one scale per " + std::to_string(group_size) + " of " + std::to_string(k()));
    }
    if (mode == "affine") {
      if (!biases || biases->shape() != groups || biases->dtype() != scales->dtype() ||
          !is_activation_dtype(scales->dtype())) {
        fail(
            "affine scales of " + shown(*scales) + (biases ? " with biases of " + shown(*biases) : ""),
            "biases of their shape and dtype, in float32, float16 or bfloat16");
      }
    } else if (
        scales->dtype() != mx::uint8 || bits != (mode == "mxfp8" ? 8 : 4) ||
        group_size != (mode == "nvfp4" ? 16 : 32)) {
      fail(
          format() + " with scales of " + shown(*scales),
          "uint8 scales and mxfp4 4-bit group 32, mxfp8 8-bit group 32 or nvfp4 4-bit group 16");
    }
  }
  if (bias && (bias->shape() != mx::Shape{n()} || !is_activation_dtype(bias->dtype()))) {
    fail("a bias of " + shown(*bias), "[" + std::to_string(n()) + "] in float32, float16 or bfloat16");
  }
  std::vector<mx::array> all{weight};
  for (const auto* a : {&scales, &biases, &bias}) {
    if (*a) {
      all.push_back(**a);
    }
  }
  mx::eval(all);
  for (const auto& a : all) {
    if (packed() && a.ndim() == 2 && a.strides(1) != 1) {
      fail("packed arrays with gaps between columns", "adjacent columns (mx.contiguous gives them)");
    }
  }
}

namespace {

/// A float of 1 sign bit, `exponent_bits` and `mantissa_bits` without infinities, as in OCP Microscaling 1.0.
float small_float(uint32_t code, int exponent_bits, int mantissa_bits, int exponent_bias) {
  int sign = code >> (exponent_bits + mantissa_bits);
  int exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1);
  float mantissa = static_cast<float>(code & ((1u << mantissa_bits) - 1)) / static_cast<float>(1 << mantissa_bits);
  float value =
      exponent ? std::ldexp(1.0f + mantissa, exponent - exponent_bias) : std::ldexp(mantissa, 1 - exponent_bias);
  return sign ? -value : value;
}

float e2m1(uint32_t code) {
  return small_float(code, 2, 1, 1);
}

float e4m3(uint32_t code) {
  return (code & 0x7f) == 0x7f ? std::nanf("") : small_float(code, 4, 3, 7);
}

/// The `bits` wide code number `i` of a little-endian bit stream.
uint32_t code_at(const uint8_t* stream, int64_t i, int bits) {
  int64_t bit = i * bits;
  uint32_t word = stream[bit / 8];
  if (bit % 8 + bits > 8) {
    word |= uint32_t(stream[bit / 8 + 1]) << 8;
  }
  return (word >> (bit % 8)) & ((1u << bits) - 1);
}

template <typename T>
const T* row_of(const mx::array& a, int row) {
  return a.data<T>() + int64_t(row) * a.strides(0);
}

template <typename T>
void unpack_affine(const LinearWeight& w, const uint8_t* codes, int row, float* out) {
  const T* scales = row_of<T>(*w.scales, row);
  const T* biases = row_of<T>(*w.biases, row);
  const int groups = w.k() / w.group_size;
  for (int g = 0; g < groups; ++g) {
    const float scale = static_cast<float>(scales[g]);
    const float zero = static_cast<float>(biases[g]);
    float* o = out + int64_t(g) * w.group_size;
    const int64_t first = int64_t(g) * w.group_size;
    if (w.bits == 4) { // the two common widths without the general bit arithmetic
      const uint8_t* c = codes + first / 2;
      for (int i = 0; i < w.group_size; i += 2, ++c) {
        o[i] = static_cast<float>(*c & 15) * scale + zero;
        o[i + 1] = static_cast<float>(*c >> 4) * scale + zero;
      }
    } else if (w.bits == 8) {
      for (int i = 0; i < w.group_size; ++i) {
        o[i] = static_cast<float>(codes[first + i]) * scale + zero;
      }
    } else {
      for (int i = 0; i < w.group_size; ++i) {
        o[i] = static_cast<float>(code_at(codes, first + i, w.bits)) * scale + zero;
      }
    }
  }
}

void unpack_small_floats(const LinearWeight& w, const uint8_t* codes, int row, float* out) {
  const uint8_t* scales = row_of<uint8_t>(*w.scales, row);
  for (int64_t i = 0; i < w.k(); ++i) {
    uint8_t s = scales[i / w.group_size];
    float scale = w.mode == "nvfp4" ? e4m3(s) : std::ldexp(1.0f, int(s) - 127);
    uint32_t code = code_at(codes, i, w.bits);
    out[i] = scale * (w.bits == 4 ? e2m1(code) : e4m3(code));
  }
}

} // namespace

void unpack_vector(const mx::array& v, float* out) {
  with_type(v.dtype(), [&](auto* type) {
    const auto* from = v.data<std::remove_pointer_t<decltype(type)>>();
    for (int64_t i = 0; i < v.shape(0); ++i) {
      out[i] = static_cast<float>(from[i * v.strides(0)]);
    }
  });
}

void unpack_row(const LinearWeight& w, int row, float* out) {
  if (!w.packed()) {
    with_type(w.weight.dtype(), [&](auto* type) {
      const auto* from = row_of<std::remove_pointer_t<decltype(type)>>(w.weight, row);
      const auto step = w.weight.strides(1);
      for (int64_t i = 0; i < w.weight.shape(1); ++i) {
        out[i] = static_cast<float>(from[i * step]);
      }
    });
    return;
  }
  const auto* codes = reinterpret_cast<const uint8_t*>(row_of<uint32_t>(w.weight, row));
  if (w.mode == "affine") {
    with_type(w.scales->dtype(), [&](auto* type) {
      unpack_affine<std::remove_pointer_t<decltype(type)>>(w, codes, row, out);
    });
  } else {
    unpack_small_floats(w, codes, row, out);
  }
}

} // namespace cleave
