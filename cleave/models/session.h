#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "cleave/models/decoder.h"
#include "cleave/models/sampler.h"

namespace cleave {

/// One text being read and continued: a decoder, its cache and a sampler. Not for several threads at once.
///
/// Every method throws ModelError for ids outside the vocabulary, no ids, or more positions than the model's context.
class Session {
 public:
  static constexpr int chunk = 2048; ///< tokens that are evaluated at once in prefill

  explicit Session(std::shared_ptr<const Decoder> decoder, const Sampling& sampling = {});

  /// Called after each chunk with the number of ids read so far. What it throws ends the reading there.
  using Progress = std::function<void(int)>;

  /// Reads ids after what was read before, chunk by chunk; returns when they are evaluated. `reserve`: positions
  /// expected in the end.
  void feed(const std::vector<int>& ids, int reserve = 0, const Progress& progress = {});
  /// The same, and gives the logits of every id, [1, S, vocab], evaluated.
  mx::array feed_for_logits(const std::vector<int>& ids);

  /// The next token, which is read too. Needs ids to have been fed.
  int next();

  /// The logits after what was read, [1, 1, vocab], lazy.
  const mx::array& last_logits() const;
  /// Positions read, or about to be.
  int length() const {
    return cache_[0].length();
  }
  const Decoder& decoder() const {
    return *decoder_;
  }

 private:
  mx::array read(const std::vector<int>& ids, int reserve, bool all_positions, const Progress& progress);
  void choose();

  std::shared_ptr<const Decoder> decoder_;
  Sampler sampler_;
  DecoderCache cache_;
  int reserve_ = 0;
  std::optional<mx::array> logits_; ///< of the last position
  std::optional<mx::array> token_;  ///< chosen from them, once asked for
};

/// Throws ModelError unless there are ids, all of them below `vocab`, and `before` more fit the context.
void check_ids(const std::vector<int>& ids, const ModelConfig& config, int before = 0);

} // namespace cleave
