// What oneDNN's matmul alone reaches on a model's products: the peak that the forward passes are held against.
//
// gemm_peak fp32|bf16|fp16|s8|u8 N K COUNT [N K COUNT ...] speaks the protocol of rivals/serve.py: for a request of M
// tokens it answers with the seconds of COUNT products x [M, K] W^T [N, K] of every shape, one after the other. Weights
// are packed as oneDNN chooses, and made anew for each product of a shape as far as memory goes, as in a model.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <dnnl.hpp>
#include <nlohmann/json.hpp>

namespace {

using dnnl::memory;
using json = nlohmann::json;

struct Types {
  memory::data_type x, w, y;
};

const std::map<std::string, Types>& known_types() {
  using T = memory::data_type;
  static const std::map<std::string, Types> types{
      {"fp32", {T::f32, T::f32, T::f32}},
      {"bf16", {T::bf16, T::bf16, T::bf16}},
      {"fp16", {T::f16, T::f16, T::f16}},
      {"s8", {T::s8, T::s8, T::s32}},
      {"u8", {T::u8, T::s8, T::s32}}};
  return types;
}

struct Product {
  dnnl::matmul matmul;
  memory x, y;
  std::vector<memory> weights;
  int count;

  void run(dnnl::stream& stream) {
    for (int i = 0; i < count; ++i) {
      auto& w = weights[i % weights.size()];
      matmul.execute(stream, {{DNNL_ARG_SRC, x}, {DNNL_ARG_WEIGHTS, w}, {DNNL_ARG_DST, y}});
    }
    stream.wait();
  }
};

/// Ordinary numbers in every type: 1 as a half, 1/128 as a bfloat16 and a float, 0 and 60 as int8.
memory filled(const memory::desc& desc, const dnnl::engine& engine) {
  memory m(desc, engine);
  std::fill_n(static_cast<uint16_t*>(m.get_data_handle()), desc.get_size() / 2, uint16_t{0x3c00});
  return m;
}

Product prepare(const Types& t, int64_t m, int64_t n, int64_t k, int count, const dnnl::engine& engine) {
  const memory::desc x({m, k}, t.x, memory::format_tag::ab), y({m, n}, t.y, memory::format_tag::ab);
  const memory::desc any({k, n}, t.w, memory::format_tag::any);
  const dnnl::matmul::primitive_desc made(engine, x, any, y);
  if (std::string_view(made.impl_info_str()).find("ref") != std::string_view::npos) {
    throw std::runtime_error("oneDNN has only reference code for this type on this processor");
  }
  constexpr size_t weight_bytes = 64 << 20; // past the last-level cache share of a few cores, without a model's memory
  const auto copies = std::min<size_t>(count, std::max<size_t>(1, weight_bytes / made.weights_desc().get_size()));
  Product p{dnnl::matmul(made), filled(x, engine), memory(y, engine), {}, count};
  for (size_t i = 0; i < copies; ++i) {
    p.weights.push_back(filled(made.weights_desc(), engine));
  }
  return p;
}

double seconds_of(const Types& types, int64_t tokens, const std::vector<std::array<int, 3>>& shapes) {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  double seconds = 0;
  for (const auto& [n, k, count] : shapes) {
    auto product = prepare(types, tokens, n, k, count, engine);
    const int all = std::exchange(product.count, 1);
    product.run(stream); // warm-up
    product.count = all;
    const auto begin = std::chrono::steady_clock::now();
    product.run(stream);
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  return seconds;
}

} // namespace

int main(int argc, char** argv) {
  if (argc < 5 || argc % 3 != 2 || !known_types().contains(argv[1])) {
    std::fprintf(stderr, "usage: gemm_peak fp32|bf16|fp16|s8|u8 N K COUNT [N K COUNT ...]\n");
    return 2;
  }
  const auto types = known_types().at(argv[1]);
  std::vector<std::array<int, 3>> shapes;
  for (int i = 2; i < argc; i += 3) {
    shapes.push_back({std::stoi(argv[i]), std::stoi(argv[i + 1]), std::stoi(argv[i + 2])});
  }
  const auto* v = dnnl::version();
  const auto version = std::to_string(v->major) + "." + std::to_string(v->minor) + "." + std::to_string(v->patch);
  std::cout << json{{"ready", "oneDNN " + version + " matmul " + argv[1]}} << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    json answer;
    try {
      answer["seconds"] = {seconds_of(types, json::parse(line).at("tokens"), shapes)};
    } catch (const std::exception& e) {
      answer = {{"error", e.what()}};
    }
    std::cout << answer << std::endl;
  }
}
