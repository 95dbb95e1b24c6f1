// A decoder's shape out of named fields, which config.json and GGUF call differently.
#pragma once

#include "cleave/models/config.h"
#include "cleave/models/fields.inl"

namespace cleave {

/// What a file calls the numbers of a shape.
struct ShapeNames {
  std::string hidden, layers, intermediate, heads, kv_heads, norm_eps;
};

/// All of the shape but the size of heads and the vocabulary.
inline void read_shape(const Fields& f, const ShapeNames& names, ModelConfig& c) {
  c.hidden = f.integer(names.hidden, 1, most_hidden);
  c.layers = f.integer(names.layers, 1, most_layers);
  c.intermediate = f.integer(names.intermediate, 1, most_intermediate);
  c.heads = f.integer(names.heads, 1, most_heads);
  c.kv_heads = f.integer(names.kv_heads, 1, c.heads, c.heads);
  c.norm_eps = static_cast<float>(f.number(names.norm_eps, 0));
  c.windowed.assign(c.layers, false);
  if (c.heads % c.kv_heads) {
    f.refuse_field(names.kv_heads, "a divisor of " + std::to_string(c.heads) + " heads");
  }
}

} // namespace cleave
