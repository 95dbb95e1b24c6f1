#include "cleave/models/session.h"

#include <algorithm>

#include "cleave/models/error.h"

namespace cleave {

void check_ids(const std::vector<int>& ids, const ModelConfig& config, int before) {
  if (ids.empty()) {
    refuse("prefill", "an empty prompt", "at least one token");
  }
  for (int id : ids) {
    if (id < 0 || id >= config.vocab) {
      refuse("prefill", "token id " + std::to_string(id), "ids from 0 to " + std::to_string(config.vocab - 1));
    }
  }
  if (config.context && ids.size() + before > static_cast<size_t>(config.context)) {
    refuse(
        "prefill", std::to_string(ids.size() + before) + " tokens",
        "at most the model's context of " + std::to_string(config.context));
  }
}

Session::Session(std::shared_ptr<const Decoder> decoder, const Sampling& sampling)
    : decoder_(std::move(decoder)), sampler_(sampling), cache_(decoder_->make_cache()) {
  sampling.check(decoder_->config().vocab);
}

mx::array Session::read(const std::vector<int>& ids, int reserve, bool all_positions, const Progress& progress) {
  const int count = static_cast<int>(ids.size());
  reserve_ = std::max({reserve_, reserve, length() + count});
  std::vector<mx::array> parts;
  for (int begin = 0; begin < count; begin += chunk) {
    const int size = std::min(chunk, count - begin);
    parts.push_back((*decoder_)(mx::array(ids.data() + begin, {1, size}, mx::int32), cache_, all_positions, reserve_));
    const bool last = begin + size == count;
    std::vector<mx::array> wanted;
    for (const auto& layer : cache_) {
      const auto arrays = layer.arrays();
      wanted.insert(wanted.end(), arrays.begin(), arrays.end());
    }
    if (all_positions || last) {
      wanted.push_back(parts.back());
    } else {
      parts.clear(); // nobody asks for the logits in between, so they are not computed
    }
    mx::eval(std::move(wanted));
    if (progress) {
      progress(begin + size);
    }
  }
  return parts.size() == 1 ? parts[0] : mx::concatenate(parts, 1);
}

void Session::feed(const std::vector<int>& ids, int reserve, const Progress& progress) {
  check_ids(ids, decoder_->config(), length());
  token_ = std::nullopt;
  logits_ = std::nullopt; // they are of the end, should the reading stop before it
  logits_ = read(ids, reserve, false, progress);
}

mx::array Session::feed_for_logits(const std::vector<int>& ids) {
  check_ids(ids, decoder_->config(), length());
  token_ = std::nullopt;
  auto all = read(ids, 0, true, {});
  mx::eval(all);
  logits_ = mx::slice(all, {0, all.shape(1) - 1, 0}, all.shape());
  return all;
}

const mx::array& Session::last_logits() const {
  if (!logits_) {
    refuse("next", length() ? "a context that is full" : "no tokens read so far", "a prompt that leaves room");
  }
  return *logits_;
}

void Session::choose() {
  const auto& logits = last_logits();
  token_ = sampler_(mx::reshape(logits, {1, logits.shape(2)}));
  logits_ = std::nullopt;
}

int Session::next() {
  const int context = decoder_->config().context;
  if (!token_) {
    choose();
  }
  mx::async_eval({*token_});
  auto token = *token_;
  // The graph of the next step is built while this one runs. A GPU may be handed it at once; on a CPU the caches would
  // be copied rather than written in place, as tasks that still run hold them.
  token_ = std::nullopt;
  const bool room = !context || length() < context;
  if (room) {
    logits_ = (*decoder_)(mx::reshape(token, {1, 1}), cache_, false, reserve_);
    choose();
    if (mx::default_device() == mx::Device::gpu) {
      mx::async_eval({*token_});
    }
  } else {
    logits_ = std::nullopt;
  }
  return static_cast<int>(token.item<uint32_t>());
}

} // namespace cleave
