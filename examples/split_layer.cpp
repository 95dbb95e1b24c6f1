// One linear layer of a C++ program built on MLX, its rows shared by two CPU units, checked against the plain op.
#include <cstdio>

#include "cleave/site/linear_group.h"
#include "cleave/unit/registry.h"

int main(int argc, char** argv) {
  namespace mx = mlx::core;
  const std::string units[] = {argc > 1 ? argv[1] : "cpu", argc > 2 ? argv[2] : "reference"};
  try {
    auto weight = mx::random::normal({1024, 512});
    auto x = mx::random::normal({256, 512});
    cleave::LinearGroup site(
        {cleave::LinearWeight{weight}}, {{cleave::make_unit(units[0]), 0.75}, {cleave::make_unit(units[1]), 0.25}},
        {.name = "example", .tile = 256});

    auto y = site(x)[0]; // lazy, as any mlx op
    auto error = mx::max(mx::abs(mx::subtract(y, mx::matmul(x, mx::transpose(weight)))));
    std::printf("y [%d, %d], largest difference to the plain op %.2g\n", y.shape(0), y.shape(1), error.item<float>());
    for (const auto& part : site.report().parts) {
      std::printf("%-10s %5d rows, %.1f MB added\n", part.unit.c_str(), part.rows[0], double(part.bytes) / 1e6);
    }
    return error.item<float>() < 1e-3f ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
