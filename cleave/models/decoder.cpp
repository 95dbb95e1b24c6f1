#include "cleave/models/decoder.h"

#include <cmath>
#include <tuple>

#include "cleave/models/error.h"
#include "cleave/models/gguf_model.h"
#include "mlx/fast.h"

namespace cleave {

namespace {

/// mlx widens to the weight's dtype where the two differ.
mx::array norm(const mx::array& x, const mx::array& weight, float eps) {
  return x.dtype() == weight.dtype() ? ops::rms_norm(x, weight, eps) : mx::fast::rms_norm(x, weight, eps);
}

/// [B, S, H * D] -> [B, S, H, D].
mx::array heads_of(const mx::array& x, int heads) {
  return mx::reshape(x, {x.shape(0), x.shape(1), heads, -1});
}

struct LayerWeights {
  std::vector<LinearWeight> qkv;
  LinearWeight o, gate, up, down;
};

LayerWeights take_layer(Weights& w, const std::string& name, const ModelConfig& c) {
  const int q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  const auto attention = name + ".self_attn.", mlp = name + ".mlp.";
  return {
      {w.linear(attention + "q_proj", q, c.hidden, c.qkv_bias),
       w.linear(attention + "k_proj", kv, c.hidden, c.qkv_bias),
       w.linear(attention + "v_proj", kv, c.hidden, c.qkv_bias)},
      w.linear(attention + "o_proj", c.hidden, q, c.o_bias),
      w.linear(mlp + "gate_proj", c.intermediate, c.hidden, c.mlp_bias),
      w.linear(mlp + "up_proj", c.intermediate, c.hidden, c.mlp_bias),
      w.linear(mlp + "down_proj", c.hidden, c.intermediate, c.mlp_bias)};
}

/// Names, shares and options of a decoder's sites.
class SiteMaker {
 public:
  SiteMaker(const DecoderOptions& options, mx::Dtype activations) : options_(options), activations_(activations) {}

  std::shared_ptr<const LinearGroup> group(const std::string& name, std::vector<LinearWeight> members) const {
    const auto shares = shares_for(name, members[0]);
    return group(name, shares, std::move(members));
  }
  /// A layer's attention as one site, or q,k,v and o as sites of their own; the others are null. `name` is the layer's.
  std::tuple<std::shared_ptr<const Attention>, std::shared_ptr<const LinearGroup>, std::shared_ptr<const LinearGroup>>
  attention(const std::string& name, LayerWeights& w, const AttentionSpec& spec) const {
    const auto qkv = name + ".self_attn.q_proj+k_proj+v_proj", whole = name + ".self_attn";
    const auto shares = shares_for(qkv, w.qkv[0]);
    if (spec.rope && options_.attention.value_or(Attention::cuts_well(w.o, spec, shares))) {
      Attention::Weights weights{w.qkv[0], w.qkv[1], w.qkv[2], w.o};
      return {
          std::make_shared<Attention>(std::move(weights), spec, shares, options_for(whole, w.qkv[0])), nullptr,
          nullptr};
    }
    return {nullptr, group(qkv, shares, std::move(w.qkv)), group(name + ".self_attn.o_proj", {std::move(w.o)})};
  }
  std::shared_ptr<const Mlp> mlp(const std::string& name, LayerWeights& w) const {
    const auto shares = shares_for(name, w.gate);
    const auto site = options_for(name, w.gate);
    return std::make_shared<Mlp>(std::move(w.gate), std::move(w.up), std::move(w.down), Activation::silu, shares, site);
  }

 private:
  std::shared_ptr<const LinearGroup> group(
      const std::string& name, const std::vector<UnitShare>& shares, std::vector<LinearWeight> members) const {
    const auto site = options_for(name, members[0]);
    return std::make_shared<LinearGroup>(std::move(members), shares, site);
  }
  std::vector<UnitShare> shares_for(const std::string& name, const LinearWeight& weight) const {
    auto shares = options_.shares ? options_.shares(name, weight) : std::vector<UnitShare>{};
    return shares.empty() ? std::vector<UnitShare>{{nullptr, 1.0}} : shares;
  }
  SiteOptions options_for(const std::string& name, const LinearWeight& weight) const {
    SiteOptions site{name, options_.tile, options_.min_rows, 1, std::nullopt, options_.precision, options_.budget};
    if (weight.packed() && weight.mode != "affine") { // scales of the fp modes name no dtype
      site.dtype = activations_;
    }
    return site;
  }

  const DecoderOptions& options_;
  mx::Dtype activations_;
};

LinearWeight take_embedding(Weights& w, const ModelConfig& c) {
  auto embedding = w.linear("model.embed_tokens", c.vocab, c.hidden);
  embedding.check("load_model");
  return embedding;
}

} // namespace

Decoder::Decoder(ModelConfig config, Weights weights, const DecoderOptions& options)
    : config_(std::move(config)),
      rotary_(config_.rope, config_.head_dim, config_.trained_context),
      embedding_(take_embedding(weights, config_)) {
  const auto& c = config_;
  std::vector<LayerWeights> linears;
  for (int i = 0; i < c.layers; ++i) { // all are named before any is read, so that a fault shows at once
    const auto name = "model.layers." + std::to_string(i);
    linears.push_back(take_layer(weights, name, c));
    Layer layer{
        weights.vector(name + ".input_layernorm.weight", c.hidden),
        weights.vector(name + ".post_attention_layernorm.weight", c.hidden),
        std::nullopt,
        std::nullopt,
        nullptr,
        nullptr,
        nullptr,
        nullptr,
        c.windowed[i] ? c.window : 0};
    if (c.qk_norm) {
      layer.q_norm = weights.vector(name + ".self_attn.q_norm.weight", c.head_dim);
      layer.k_norm = weights.vector(name + ".self_attn.k_norm.weight", c.head_dim);
    }
    layers_.push_back(std::move(layer));
  }
  norm_ = weights.vector("model.norm.weight", c.hidden);
  auto head = c.tied ? embedding_ : weights.linear("lm_head", c.vocab, c.hidden);
  weights.check_all_taken();

  const SiteMaker make(options, norm_->dtype());
  nbytes_ = embedding_.nbytes() + (c.tied ? 0 : head.nbytes());
  for (int i = 0; i < c.layers; ++i) {
    const auto name = "model.layers." + std::to_string(i);
    auto& from = linears[i];
    for (const auto* w : {&from.qkv[0], &from.qkv[1], &from.qkv[2], &from.o, &from.gate, &from.up, &from.down}) {
      nbytes_ += w->nbytes();
    }
    auto& layer = layers_[i];
    std::tie(layer.attention, layer.qkv, layer.o) = make.attention(name, from, attention_spec(layer));
    for (const auto& site : std::initializer_list<std::shared_ptr<const Site>>{layer.attention, layer.qkv, layer.o}) {
      if (site) {
        sites_.push_back(site);
      }
    }
    layer.mlp = make.mlp(name + ".mlp", from);
    sites_.push_back(layer.mlp);
  }
  head_ = make.group(c.tied ? "model.embed_tokens" : "lm_head", {std::move(head)});
  sites_.push_back(head_);
}

AttentionSpec Decoder::attention_spec(const Layer& layer) const {
  const auto& c = config_;
  AttentionSpec spec{c.heads,      c.kv_heads,   c.head_dim,   static_cast<float>(std::pow(c.head_dim, -0.5)),
                     layer.window, layer.q_norm, layer.k_norm, c.norm_eps};
  if (const auto* rope = rotary_.spec()) {
    spec.rope = *rope;
  }
  return spec;
}

mx::array Decoder::embed(const mx::array& ids) const {
  const auto& e = embedding_;
  if (!e.packed()) {
    return mx::take(e.weight, ids, 0);
  }
  auto rows = [&](const mx::array& a) { return mx::take(a, ids, 0); };
  return mx::dequantize(
      rows(e.weight), rows(*e.scales), e.biases ? std::optional(rows(*e.biases)) : std::nullopt, e.group_size, e.bits,
      e.mode);
}

mx::array Decoder::attend(const Layer& layer, const mx::array& x, KvCache& cache, int reserve) const {
  const auto& c = config_;
  if (layer.attention) {
    const auto past = cache.view();
    auto out = (*layer.attention)(x, past ? std::optional(CachedHeads{past->keys, past->values}) : std::nullopt);
    cache.append(out[1], out[2], reserve);
    return out[0];
  }
  auto qkv = (*layer.qkv)(x);
  auto q = heads_of(qkv[0], c.heads), k = heads_of(qkv[1], c.kv_heads), v = heads_of(qkv[2], c.kv_heads);
  qkv.clear();
  if (c.qk_norm) {
    q = norm(q, *layer.q_norm, c.norm_eps);
    k = norm(k, *layer.k_norm, c.norm_eps);
  }
  const int offset = cache.length();
  q = rotary_(mx::transpose(q, {0, 2, 1, 3}), offset);
  k = rotary_(mx::transpose(k, {0, 2, 1, 3}), offset);
  const auto kv = cache.append(k, mx::transpose(v, {0, 2, 1, 3}), reserve);
  const float scale = static_cast<float>(std::pow(c.head_dim, -0.5));
  const auto y = ops::attention(q, kv.keys, kv.values, scale, true, layer.window);
  const auto joined = mx::reshape(mx::transpose(y, {0, 2, 1, 3}), {x.shape(0), x.shape(1), -1});
  return (*layer.o)(joined)[0];
}

mx::array Decoder::operator()(const mx::array& ids, DecoderCache& cache, bool all_positions, int reserve) const {
  if (ids.ndim() != 2 || ids.size() == 0 || static_cast<int>(cache.size()) != config_.layers) {
    refuse("decode", "ids of " + std::to_string(ids.ndim()) + " dimensions", "ids [B, S] and the model's own cache");
  }
  auto h = embed(ids);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const auto& layer = layers_[i];
    h = ops::add(h, attend(layer, norm(h, layer.input_norm, config_.norm_eps), cache[i], reserve));
    h = ops::add(h, (*layer.mlp)(norm(h, layer.mlp_norm, config_.norm_eps))[0]);
  }
  if (!all_positions && h.shape(1) > 1) {
    h = mx::slice(h, {0, h.shape(1) - 1, 0}, h.shape());
  }
  return (*head_)(norm(h, *norm_, config_.norm_eps))[0];
}

std::shared_ptr<const Decoder> load_decoder(const std::string& path, const DecoderOptions& options) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::is_directory(path, error)) {
    auto config = read_config(path);
    auto weights = open_weights(path, config);
    return std::make_shared<Decoder>(std::move(config), std::move(weights), options);
  }
  if (fs::is_regular_file(path, error) && fs::path(path).extension() == ".gguf") {
    auto [config, weights] = open_gguf(path);
    return std::make_shared<Decoder>(std::move(config), std::move(weights), options);
  }
  refuse(
      "load_model", path + (fs::exists(path, error) ? "" : ", which does not exist,"),
      "a model folder with config.json, or a .gguf file");
}

} // namespace cleave
