#include "cleave/graph/join.h"

#include <cstring>

#include "cleave/graph/primitive.h"
#include "mlx/backend/cpu/encoder.h"

namespace cleave {

namespace {

class JointBuffer : public CpuPrimitive {
 public:
  JointBuffer(mx::Stream stream, std::vector<int> n) : CpuPrimitive(stream), n_(std::move(n)) {}

  const char* name() const override {
    return "JointBuffer";
  }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    std::vector<mx::Shape> shapes;
    for (int n : n_) {
      shapes.push_back(with_last(inputs[0].shape(), n));
    }
    return shapes;
  }
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>& outputs) override {
    for (auto& out : outputs) {
      out.set_data(mx::allocator::malloc(out.nbytes()));
    }
  }

 private:
  std::vector<int> n_;
};

class Join : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;

  const char* name() const override {
    return "Join";
  }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape()};
  }
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const auto& buffer = inputs[0];
    outputs[0].copy_shared_buffer(buffer);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const size_t item = buffer.itemsize();
    const size_t pitch = buffer.shape(-1) * item;
    char* column = outputs[0].data<char>();
    for (size_t i = 1; i < inputs.size(); ++i) {
      const auto& part = inputs[i];
      const size_t width = part.shape(-1) * item;
      if (part.data_shared_ptr() != buffer.data_shared_ptr()) {
        encoder.dispatch([from = part.data<char>(), column, width, pitch, rows = part.size() / part.shape(-1),
                          kept = std::pair(part.data_shared_ptr(), buffer.data_shared_ptr())] {
          for (size_t r = 0; r < rows; ++r) {
            std::memcpy(column + r * pitch, from + r * width, width);
          }
        });
      }
      column += width;
    }
  }
};

} // namespace

std::vector<mx::array> joint_buffers(
    const mx::array& x, const std::vector<int>& n, const std::vector<mx::Dtype>& dtypes, mx::Stream stream) {
  auto node = std::make_shared<JointBuffer>(stream, n);
  auto shapes = node->output_shapes({x});
  return mx::array::make_arrays(std::move(shapes), dtypes, node, {x});
}

mx::array join_in(const mx::array& buffer, const std::vector<mx::array>& parts, mx::Stream stream) {
  std::vector<mx::array> inputs{buffer};
  for (const auto& part : parts) {
    inputs.push_back(part);
  }
  return mx::array(buffer.shape(), buffer.dtype(), std::make_shared<Join>(stream), std::move(inputs));
}

} // namespace cleave
