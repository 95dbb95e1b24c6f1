#pragma once

#include <string>

namespace cleave {

/// The function between gate and down of an mlp: y = W_down (act(W_gate x) * (W_up x)).
enum class Activation { silu, gelu, gelu_tanh, relu };

const char* to_string(Activation activation);
/// Throws std::invalid_argument for a name that is not one of silu, gelu, gelu_tanh, relu.
Activation activation_from_string(const std::string& name);

} // namespace cleave
