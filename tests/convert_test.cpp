#include "cleave/kernels/convert.h"

#include <cmath>
#include <limits>

#include "util.h"

namespace cleave::test {
namespace {

/// Random numbers of every size, and those where rounding is special.
std::vector<float> numbers(Random& random, size_t count) {
  std::vector<float> out{
      0.0f,
      -0.0f,
      1.0f + 0x1p-11f, // half way between two float16
      1.0f + 3 * 0x1p-11f,
      1.0f + 0x1p-8f, // half way between two bfloat16
      1.0f + 3 * 0x1p-8f,
      65519.0f, // rounds to the largest float16
      65520.0f, // rounds to infinity
      0x1p-24f, // the smallest float16
      0x1p-25f,
      std::numeric_limits<float>::infinity(),
      -std::numeric_limits<float>::infinity()};
  while (out.size() < count) {
    out.push_back(std::ldexp(std::uniform_real_distribution<float>(-1, 1)(random), uniform(random, -30, 17)));
  }
  return out;
}

TEST(Convert, RoundsAsMlxDoesBetweenAllDtypesAndStrides) {
  Random random(71);
  const std::vector<mx::Dtype> dtypes{mx::float32, mx::float16, mx::bfloat16};
  for (auto from : dtypes) {
    for (auto to : dtypes) {
      for (int cols : {1, 7, 8, 9, 40}) {
        SCOPED_TRACE(testing::Message() << from << " to " << to << ", " << cols << " columns");
        constexpr int rows = 5, gap = 3;
        const int stride = cols + gap;
        const auto values = numbers(random, rows * stride);
        auto wide = mx::astype(mx::array(values.data(), {rows, stride}, mx::float32), from);
        auto expected = mx::contiguous(mx::astype(mx::slice(wide, {0, 0}, {rows, cols}), to));
        auto out = mx::zeros({rows, stride}, to);
        mx::eval(wide, expected, out);
        convert({wide.data<void>(), from, rows, cols, stride}, {out.data<void>(), to, rows, cols, stride});
        EXPECT_TRUE(same_bits(mx::slice(out, {0, 0}, {rows, cols}), expected));
        EXPECT_TRUE(same_bits(mx::slice(out, {0, cols}, {rows, stride}), mx::zeros({rows, gap}, to))) << "in the gap";
      }
    }
  }
}

TEST(Convert, KeepsNotANumber) {
  const float nan = std::nanf("");
  for (auto dtype : {mx::float16, mx::bfloat16}) {
    uint16_t narrow = 0;
    float back = 0;
    convert({&nan, mx::float32, 1, 1, 1}, {&narrow, dtype, 1, 1, 1});
    convert({&narrow, dtype, 1, 1, 1}, {&back, mx::float32, 1, 1, 1});
    EXPECT_TRUE(std::isnan(back)) << dtype;
  }
}

} // namespace
} // namespace cleave::test
