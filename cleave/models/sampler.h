#pragma once

#include "cleave/mlx.h"

namespace cleave {

/// How a token is chosen; the meaning of each is that of mlx_lm's make_sampler.
struct Sampling {
  float temperature = 0; ///< 0: the most likely token
  float top_p = 0;       ///< in (0, 1): from the likeliest tokens whose probabilities reach it; else all
  int top_k = 0;         ///< above 0: from the k likeliest
  uint64_t seed = 0;

  /// Throws ModelError when a value is out of range for `vocab` tokens.
  void check(int vocab) const;
};

/// Chooses tokens one after another, with a random state of its own. For one seed, the tokens of mlx_lm after
/// mx.random.seed(seed).
class Sampler {
 public:
  explicit Sampler(const Sampling& sampling);
  /// logits [..., vocab] of floats -> [...] uint32, lazy.
  mx::array operator()(const mx::array& logits);

 private:
  Sampling sampling_;
  mx::random::KeySequence keys_;
};

/// -inf for all but the k likeliest. logits [..., vocab].
mx::array keep_top_k(const mx::array& logits, int k);
/// -inf for what lies below the probability mass p of the likeliest. log_probabilities [..., vocab].
mx::array keep_top_p(const mx::array& log_probabilities, float p);

} // namespace cleave
