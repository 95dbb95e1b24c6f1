#pragma once

// Kept free of other headers: it is compiled for several processors, and an inline function of a standard header must
// not reach the program in a form that only the newest of them can run.
#include <cstdint>

namespace cleave::kernels {

constexpr int kQueryBlock = 60; ///< a multiple of every target's register tile
constexpr int kKeyBlock = 256;  ///< scores of a block of queries stay in the second-level cache

/// Attention of up to kQueryBlock queries of one head.
struct AttentionTask {
  const float* q; ///< [rows, d], multiplied by scale * log2(e)
  int64_t rows;
  int64_t d, dv;
  const float* keys;   ///< panels of all keys
  const float* values; ///< [keys, dv rounded up to a register tile]
  int64_t visible;     ///< keys that the first row may see, counted from key 0
  int64_t step;        ///< 1: each row sees one more than the row before (causal); 0: all see the same
  int64_t window;      ///< each row sees no more than the last `window` of those
  float* out;          ///< [rows, dv]
  int64_t out_stride;
  float* scratch; ///< kQueryBlock * (kKeyBlock + dv rounded up)

  int64_t last(int64_t row) const {
    return visible + row * step;
  }
  int64_t first(int64_t row) const {
    return last(row) > window ? last(row) - window : 0;
  }
};

enum class Number { f32, f16, bf16 };

constexpr int kReadable = 64; ///< bytes that kernels may read past a packed row

/// Rows of a weight where they lie: dense numbers, or, where bits is not 0, affine codes (w = code * scale + bias, a
/// scale and a bias per group). Strides are bytes between rows.
struct WeightTask {
  const uint8_t* data;
  const uint8_t *scales, *biases; ///< packed only
  int64_t stride, scale_stride;
  Number number; ///< of dense weights; packed: of scales and biases
  int bits, group;
  int64_t rows, k;

  const float* x; ///< m rows of finite numbers as arrange() gives them
  const float* sums;
  int64_t m, x_stride, sums_stride;
  float* y; ///< dot: y[i * y_stride + row]; unpack: y[row * y_stride + column]
  int64_t y_stride;
};

/// How many floats a row of x takes for weights of a format, and how many its sums.
struct Arranged {
  int64_t columns, groups;
};

/// Kernels for one processor target.
struct Table {
  const char* name;
  int lanes;
  void (*gated_silu)(const float* gate, const float* up, float* out, int64_t n);
  void (*gated_gelu)(const float* gate, const float* up, float* out, int64_t n);
  void (*gated_gelu_tanh)(const float* gate, const float* up, float* out, int64_t n);
  void (*gated_relu)(const float* gate, const float* up, float* out, int64_t n);
  void (*rms_norm)(const float* x, const float* weight, float eps, float* y, int64_t n); ///< weight may be null
  void (*add)(const float* a, const float* b, float* y, int64_t n);
  void (*rope)(float* x, const float* cosine, const float* sine, int64_t half, bool traditional);
  bool (*split)(const float* x, uint16_t* high, uint16_t* low, int64_t n); ///< whether any low is not 0
  float (*quantize)(const float* x, int8_t* codes, int64_t n);             ///< returns the scale
  /// y = x * factor + bias; bias may be null, y may be x.
  void (*scale)(const float* x, float* y, float factor, const float* bias, int64_t n);
  void (*widen_bf16)(const uint16_t* x, float* y, int64_t n);
  void (*round_bf16)(const float* x, uint16_t* y, int64_t n);
  void (*pack_keys)(const float* k, int64_t stride, int64_t keys, int64_t d, float* panel);
  void (*attend)(const AttentionTask& task);
  Arranged (*arranged)(int bits, int group, int64_t k);
  /// A row of x in the order of the codes, with the sums of its groups; false where it is not finite.
  bool (*arrange)(const float* x, int bits, int group, int64_t k, float* to, float* sums);
  void (*dot)(const WeightTask& task);    ///< y = x W^T
  void (*unpack)(const WeightTask& task); ///< packed only: y = W
};

/// The targets that this processor runs, the best first and null behind the last.
const Table* const* tables();
/// The best of them.
const Table& table();

} // namespace cleave::kernels
