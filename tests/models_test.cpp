#include <gmock/gmock.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "cleave/models/error.h"
#include "cleave/models/safetensors.h"
#include "cleave/models/session.h"
#include "util.h"

namespace cleave::test {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

const std::string tiny = R"({"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24,
  "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "vocab_size": 40)";

ModelConfig config(const std::string& fields = "") {
  return parse_config(tiny + fields + "}", "config.json");
}

TEST(ModelConfigs, DefaultsAreThoseOfMlxLm) {
  const auto c = config();
  EXPECT_EQ(c.head_dim, 8);
  EXPECT_EQ(c.context, 0);
  EXPECT_EQ(c.rope.theta, 10000.0f);
  EXPECT_TRUE(c.tied);
  EXPECT_FALSE(c.qkv_bias || c.o_bias || c.mlp_bias || c.qk_norm || c.quantized);
}

TEST(ModelConfigs, FieldsAreRead) {
  const auto c = config(R"(, "head_dim": 4, "attention_bias": true, "tie_word_embeddings": false,
    "max_position_embeddings": 100, "eos_token_id": [3, 5], "rope_scaling": {"type": "linear", "factor": 2.0},
    "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7,
    "quantization": {"group_size": 32, "bits": 4, "model.layers.0.mlp.up_proj": {"bits": 8, "group_size": 64},
                     "lm_head": false})");
  EXPECT_EQ(c.head_dim, 4);
  EXPECT_TRUE(c.qkv_bias && c.o_bias && c.quantized && !c.tied);
  EXPECT_EQ(c.trained_context, 100);
  EXPECT_EQ(c.context, 200);
  EXPECT_THAT(c.end_tokens, ElementsAre(3, 5));
  EXPECT_THAT(c.windowed, ElementsAre(false, true));
  EXPECT_EQ(c.window, 7);
  EXPECT_EQ(c.packed_as.at("model.layers.0.mlp.up_proj")->bits, 8);
  EXPECT_FALSE(c.packed_as.at("lm_head"));
}

TEST(ModelConfigs, AFaultIsNamed) {
  EXPECT_THAT(
      [] { config(R"(, "vocab_size": 0)"); },
      ThrowsMessage<ModelError>(AllOf(HasSubstr("'vocab_size': 0 in config.json"), HasSubstr("from 1 to"))));
  EXPECT_THAT([] { parse_config("{\n", "config.json"); }, ThrowsMessage<ModelError>(HasSubstr("no JSON at line 2")));
  const std::string deep(100000, '[');
  EXPECT_THAT(
      [&] { config(R"(, "vocab_size": )" + deep + std::string(deep.size(), ']')); },
      ThrowsMessage<ModelError>(HasSubstr("'vocab_size': a list of 1")));
}

/// A file that is gone after the test.
class SafetensorsHeader : public testing::Test {
 protected:
  const std::filesystem::path file =
      std::filesystem::temp_directory_path() / ("cleave_" + std::to_string(std::random_device{}()) + ".safetensors");

  ~SafetensorsHeader() override {
    std::filesystem::remove(file);
  }
  void write(const std::string& header, size_t data_bytes, std::optional<uint64_t> length = {}) const {
    const uint64_t n = length.value_or(header.size());
    std::ofstream(file, std::ios::binary).write(reinterpret_cast<const char*>(&n), 8)
        << header << std::string(data_bytes, '\0');
  }
  void expect_refused(const std::string& words) const {
    EXPECT_THAT(
        [&] { read_safetensors_header(file); },
        ThrowsMessage<ModelError>(AllOf(HasSubstr(file.string()), HasSubstr(words))));
  }
};

TEST_F(SafetensorsHeader, IsRead) {
  write(R"({"__metadata__": {}, "a": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}})", 12);
  const auto tensors = read_safetensors_header(file);
  ASSERT_EQ(tensors.size(), 1u);
  EXPECT_EQ(tensors.at("a").dtype, "F16");
  EXPECT_THAT(tensors.at("a").shape, ElementsAre(2, 3));
}

TEST_F(SafetensorsHeader, IsRefused) {
  expect_refused("cannot be read"); // no file yet
  const std::string a = R"({"a": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}})";
  write(a, 11);
  expect_refused("ends 1 bytes before its tensor 'a'");
  write(a, 12, uint64_t(1) << 63);
  expect_refused("no room for its header");
  write(a.substr(1), 12);
  expect_refused("no JSON object");
  write(R"({"a": {"dtype": "F16", "shape": [2, 4], "data_offsets": [0, 12]}})", 12);
  expect_refused("offsets that do not fit");
  write(R"({"a": {"dtype": "F16", "shape": [4294967296, 4294967296, 2], "data_offsets": [0, 0]}})", 12);
  expect_refused("'a' has shape");
  write(R"({"a": {"dtype": "F16", "shape": [2147483647, 2147483647, 2147483647], "data_offsets": [0, 0]}})", 12);
  expect_refused("offsets that do not fit");
  std::ofstream(file, std::ios::binary) << "abc";
  expect_refused("3 bytes");
}

constexpr int draws = 4000;

/// How often each token is drawn. probabilities need not sum to 1.
std::vector<double> frequencies(const std::vector<float>& probabilities, const Sampling& sampling) {
  const int vocab = static_cast<int>(probabilities.size());
  const auto row = mx::log(mx::array(probabilities.data(), {1, vocab}, mx::float32));
  Sampler sampler(sampling);
  auto ids = sampler(mx::repeat(row, draws, 0));
  mx::eval(ids);
  std::vector<double> out(vocab, 0);
  for (int i = 0; i < draws; ++i) {
    out.at(ids.data<uint32_t>()[i]) += 1.0 / draws;
  }
  return out;
}

/// Four standard deviations of a share of 0.5, which is the widest.
constexpr double spread = 0.032;

void expect_near(const std::vector<double>& got, const std::vector<double>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (expected[i] == 0) {
      EXPECT_EQ(got[i], 0) << i;
    } else {
      EXPECT_NEAR(got[i], expected[i], spread) << i;
    }
  }
}

const std::vector<float> odds{0.2f, 0.4f, 0.1f, 0.3f};

TEST(Samplers, Distributions) {
  expect_near(frequencies(odds, {}), {0, 1, 0, 0});
  expect_near(frequencies(odds, {.temperature = 1, .seed = 1}), {0.2, 0.4, 0.1, 0.3});
  // At temperature 1/2 probabilities are squared: 4, 16, 1 and 9 of 30.
  expect_near(frequencies(odds, {.temperature = 0.5f, .seed = 2}), {4 / 30., 16 / 30., 1 / 30., 9 / 30.});
  expect_near(frequencies(odds, {.temperature = 1, .top_k = 2, .seed = 3}), {0, 4 / 7., 0, 3 / 7.});
  expect_near(frequencies(odds, {.temperature = 1, .top_p = 0.6f, .seed = 4}), {0, 4 / 7., 0, 3 / 7.});
  expect_near(frequencies(odds, {.temperature = 1, .top_p = 0.85f, .seed = 5}), {2 / 9., 4 / 9., 0, 3 / 9.});
  expect_near(frequencies(odds, {.temperature = 1, .top_p = 0.01f, .seed = 6}), {0, 1, 0, 0});
  expect_near(frequencies(odds, {.temperature = 1, .top_p = 0.85f, .top_k = 1, .seed = 7}), {0, 1, 0, 0});
}

TEST(Samplers, TheSeedDecides) {
  const Sampling one{.temperature = 1, .seed = 1}, two{.temperature = 1, .seed = 2};
  EXPECT_EQ(frequencies(odds, one), frequencies(odds, one));
  EXPECT_NE(frequencies(odds, one), frequencies(odds, two));
}

TEST(KvCaches, GrowInStepsAndKeepWhatTheyHold) {
  Random random(1);
  const auto all = normal(random, {1, 2, 3 * KvCache::step, 4});
  const auto part = [&](int begin, int end) { return mx::slice(all, {0, 0, begin, 0}, {1, 2, end, 4}); };
  KvCache cache;
  EXPECT_TRUE(cache.arrays().empty());
  int length = 0;
  for (int end : {5, 6, KvCache::step, KvCache::step + 1, 2 * KvCache::step + 9}) {
    const auto view = cache.append(part(length, end), mx::negative(part(length, end)));
    EXPECT_TRUE(same_bits(view.keys, part(0, end)));
    EXPECT_TRUE(same_bits(view.values, mx::negative(part(0, end))));
    EXPECT_EQ(cache.length(), end);
    EXPECT_EQ(cache.capacity(), rounded_capacity(end));
    length = end;
  }
  EXPECT_EQ(rounded_capacity(1), KvCache::step);
  EXPECT_EQ(rounded_capacity(KvCache::step), KvCache::step);
}

TEST(KvCaches, ReserveRoomAtOnce) {
  Random random(1);
  const auto keys = normal(random, {1, 1, 3, 4});
  KvCache cache;
  cache.append(keys, keys, 1000);
  EXPECT_EQ(cache.capacity(), 1024);
}

/// A random model of the tiny config with `fields`.
std::shared_ptr<const Decoder> make_decoder(const std::string& fields = "", const DecoderOptions& options = {}) {
  const auto c = config(fields);
  Random random(2);
  std::unordered_map<std::string, mx::array> arrays;
  const auto linear = [&](const std::string& name, int n, int k) {
    arrays.emplace(name + ".weight", normal(random, {n, k}, mx::float32, 1 / std::sqrt(static_cast<float>(k))));
  };
  const auto norm = [&](const std::string& name) { arrays.emplace(name + ".weight", normal(random, {c.hidden})); };
  linear("model.embed_tokens", c.vocab, c.hidden);
  norm("model.norm");
  for (int i = 0; i < c.layers; ++i) {
    const auto layer = "model.layers." + std::to_string(i) + ".";
    norm(layer + "input_layernorm");
    norm(layer + "post_attention_layernorm");
    linear(layer + "self_attn.q_proj", c.heads * c.head_dim, c.hidden);
    linear(layer + "self_attn.k_proj", c.kv_heads * c.head_dim, c.hidden);
    linear(layer + "self_attn.v_proj", c.kv_heads * c.head_dim, c.hidden);
    linear(layer + "self_attn.o_proj", c.hidden, c.heads * c.head_dim);
    linear(layer + "mlp.gate_proj", c.intermediate, c.hidden);
    linear(layer + "mlp.up_proj", c.intermediate, c.hidden);
    linear(layer + "mlp.down_proj", c.hidden, c.intermediate);
  }
  return std::make_shared<Decoder>(c, Weights(std::move(arrays), c, "memory"), options);
}

std::vector<int> random_ids(int count) {
  Random random(3);
  std::vector<int> ids(count);
  for (auto& id : ids) {
    id = uniform(random, 0, 39);
  }
  return ids;
}

void expect_close(const mx::array& a, const mx::array& b) {
  ASSERT_EQ(a.shape(), b.shape());
  EXPECT_LE(mx::max(mx::abs(mx::subtract(a, b))).item<float>(), 2e-5f * mx::max(mx::abs(b)).item<float>());
}

// Prompts longer than Session::chunk are python/tests/test_decoder.py's: too slow under ThreadSanitizer.
TEST(Sessions, PartsOfAPromptGiveWhatOneCallGives) {
  const auto decoder = make_decoder();
  const auto ids = random_ids(70);
  auto cache = decoder->make_cache();
  const auto whole = (*decoder)(mx::array(ids.data(), {1, static_cast<int>(ids.size())}, mx::int32), cache, true);
  Session session(decoder);
  std::vector<mx::array> parts;
  int begin = 0;
  for (int count : {40, 1, 28, 1}) {
    parts.push_back(session.feed_for_logits({ids.begin() + begin, ids.begin() + begin + count}));
    begin += count;
    EXPECT_EQ(session.length(), begin);
  }
  expect_close(mx::concatenate(parts, 1), whole);
  Session last(decoder);
  last.feed(ids);
  expect_close(last.last_logits(), mx::slice(whole, {0, whole.shape(1) - 1, 0}, whole.shape()));
}

TEST(Sessions, NextReadsTheLikeliestAndUnitsChangeNothing) {
  const auto ids = random_ids(50);
  std::vector<std::vector<int>> answers;
  for (bool split : {false, true}) {
    DecoderOptions options{{}, 32, 16};
    if (split) {
      options.shares = [](const std::string&, const LinearWeight&) {
        return std::vector<UnitShare>{{nullptr, 0.5}, {unit("reference"), 0.5}};
      };
    }
    const auto decoder = make_decoder(R"(, "max_position_embeddings": 60)", options);
    Session session(decoder);
    session.feed(ids);
    auto& answer = answers.emplace_back();
    auto read = ids;
    for (int i = 0; i < 6; ++i) {
      answer.push_back(session.next());
      read.push_back(answer.back());
    }
    Session again(decoder);
    const auto logits = again.feed_for_logits(read);
    const auto likeliest = mx::astype(mx::argmax(logits, -1), mx::int32);
    mx::eval(likeliest);
    for (int i = 0; i < 6; ++i) {
      EXPECT_EQ(likeliest.data<int>()[49 + i], answer[i]) << i;
    }
  }
  EXPECT_EQ(answers[0], answers[1]);
}

TEST(Sessions, OneDecoderServesSeveralThreads) {
  const Watchdog watchdog;
  const auto decoder = make_decoder();
  const auto ids = random_ids(40);
  std::vector<std::vector<int>> answers(3);
  std::vector<std::thread> threads;
  for (auto& answer : answers) {
    threads.emplace_back([&] {
      Session session(decoder, {.temperature = 1, .seed = 5});
      session.feed(ids);
      for (int i = 0; i < 5; ++i) {
        answer.push_back(session.next());
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(answers[0], answers[1]);
  EXPECT_EQ(answers[0], answers[2]);
}

TEST(Sessions, RefuseWhatTheyCannotRead) {
  Session session(make_decoder(R"(, "max_position_embeddings": 4)"));
  EXPECT_THAT([&] { session.next(); }, ThrowsMessage<ModelError>(HasSubstr("no tokens read so far")));
  EXPECT_THAT([&] { session.feed({}); }, ThrowsMessage<ModelError>(HasSubstr("an empty prompt")));
  EXPECT_THAT([&] { session.feed({1, 40}); }, ThrowsMessage<ModelError>(HasSubstr("token id 40")));
  EXPECT_THAT([&] { session.feed({1, 2, 3, 4, 5}); }, ThrowsMessage<ModelError>(HasSubstr("context of 4")));
  EXPECT_EQ(session.length(), 0);
}

} // namespace
} // namespace cleave::test
