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
  void (*scale)(float* y, float factor, const float* bias, int64_t n);     ///< bias may be null
  void (*pack_keys)(const float* k, int64_t stride, int64_t keys, int64_t d, float* panel);
  void (*attend)(const AttentionTask& task);
};

/// The best of the targets that this processor runs.
const Table& table();

} // namespace cleave::kernels
