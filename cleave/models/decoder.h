#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cleave/models/config.h"
#include "cleave/models/kv_cache.h"
#include "cleave/models/rotary.h"
#include "cleave/models/weights.h"
#include "cleave/site/attention.h"
#include "cleave/site/linear_group.h"
#include "cleave/site/mlp.h"

namespace cleave {

/// Which units take part at a site, by its name and its first weight; empty: main alone.
using ShareChooser = std::function<std::vector<UnitShare>(const std::string& site, const LinearWeight& weight)>;

struct DecoderOptions {
  ShareChooser shares = {}; ///< none: main alone everywhere
  int tile = 512;           ///< tokens that the sites' programs are tuned for
  int min_rows = 192;       ///< calls with fewer tokens run the original ops
  /// Whether a layer's q,k,v, attention and o are one site, unless its rope depends on the length; unset: where
  /// Attention::cuts_well.
  std::optional<bool> attention = std::nullopt;
  Precision precision = Precision::exact;         ///< of the partners' products
  std::shared_ptr<MemoryBudget> budget = nullptr; ///< see SiteOptions
};

/// One cache per layer.
using DecoderCache = std::vector<KvCache>;

/// A decoder of the Llama, Qwen2, Qwen3 or Qwen3-VL-text kind. What it computes, and in which dtypes, is what mlx_lm
/// computes from the same folder. Its linear layers are sites (q,k,v and o, or attention with both; mlp; head), each of
/// which runs the original ops below min_rows tokens or where main has it all; norms, rope, attention and sums are
/// cleave::ops. Immutable after construction, callable from any thread.
class Decoder {
 public:
  /// Takes what it needs out of `weights`. Throws ModelError naming what is missing or does not fit, and
  /// std::invalid_argument for shares that are not legal.
  Decoder(ModelConfig config, Weights weights, const DecoderOptions& options = {});

  /// ids [B, S] int32 or uint32, below the vocabulary -> logits [B, 1, vocab] of the last position, or [B, S, vocab].
  /// Builds lazy nodes only and appends S positions to `cache`; `reserve` as in KvCache::append.
  mx::array operator()(const mx::array& ids, DecoderCache& cache, bool all_positions = false, int reserve = 0) const;

  DecoderCache make_cache() const {
    return DecoderCache(config_.layers);
  }
  const ModelConfig& config() const {
    return config_;
  }
  /// In order of their use: per layer q+k+v and o, or attention; mlp; and at the end the head.
  const std::vector<std::shared_ptr<const Site>>& sites() const {
    return sites_;
  }
  /// Bytes of the model's own arrays.
  size_t nbytes() const {
    return nbytes_;
  }

 private:
  struct Layer {
    mx::array input_norm, mlp_norm;
    std::optional<mx::array> q_norm, k_norm;
    std::shared_ptr<const Attention> attention; ///< or, where it is null:
    std::shared_ptr<const LinearGroup> qkv, o;
    std::shared_ptr<const Mlp> mlp;
    int window; ///< 0: sees all positions
  };

  AttentionSpec attention_spec(const Layer& layer) const;
  mx::array embed(const mx::array& ids) const;
  mx::array attend(const Layer& layer, const mx::array& x, KvCache& cache, int reserve) const;

  ModelConfig config_;
  Rotary rotary_;
  LinearWeight embedding_;
  std::vector<Layer> layers_;
  std::optional<mx::array> norm_;
  std::shared_ptr<const LinearGroup> head_;
  std::vector<std::shared_ptr<const Site>> sites_;
  size_t nbytes_ = 0;
};

/// Reads a model folder in the form of mlx_lm or Hugging Face, or a .gguf file. Throws ModelError with one sentence.
std::shared_ptr<const Decoder> load_decoder(const std::string& path, const DecoderOptions& options = {});

} // namespace cleave
