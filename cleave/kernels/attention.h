#pragma once

#include <span>

#include "cleave/element.h"

namespace cleave::kernels {

struct AttentionShape {
  int64_t batch, heads,
      kv_heads;   ///< heads is a multiple of kv_heads; head h reads key-value head h / (heads / kv_heads)
  int64_t tokens; ///< queries
  int d, dv;
  float scale;
  bool causal;        ///< the last query sees all keys, each one before it one key less
  int64_t window = 0; ///< causal only: each query sees itself and window - 1 keys before it; 0: all before it
};

/// out = softmax(scale * q k^T) v in fp32, blocked, so that memory grows with tokens and not with their square. The
/// keys of all segments follow each other.
void attention(const AttentionShape& shape, const Heads& q, std::span<const KeysValues> segments, const Heads& out);

} // namespace cleave::kernels
