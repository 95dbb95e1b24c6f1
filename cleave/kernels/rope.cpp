#include "cleave/kernels/rope.h"

#include <cmath>
#include <map>

#include "cleave/kernels/convert.h"
#include "cleave/kernels/table.h"
#include "cleave/kernels/team.h"

namespace cleave::kernels {

namespace {
constexpr int64_t block_positions = 256;
}

RopeAngles::RopeAngles(std::vector<float> frequencies, float amplitude)
    : frequencies_(std::move(frequencies)), amplitude_(amplitude) {}

std::shared_ptr<RopeAngles> RopeAngles::shared(const std::vector<float>& frequencies, float amplitude) {
  static std::mutex mutex;
  static std::map<std::pair<std::vector<float>, float>, std::weak_ptr<RopeAngles>> known;
  std::lock_guard lock(mutex);
  auto& entry = known[{frequencies, amplitude}];
  auto angles = entry.lock();
  if (!angles) {
    entry = angles = std::make_shared<RopeAngles>(frequencies, amplitude);
  }
  return angles;
}

std::vector<const float*> RopeAngles::table(int64_t first, int64_t count) {
  const int n = half();
  std::lock_guard lock(mutex_);
  std::vector<const float*> out(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t block = (first + i) / block_positions;
    if (static_cast<int64_t>(blocks_.size()) <= block) {
      blocks_.resize(block + 1);
    }
    auto& angles = blocks_[block];
    if (!angles) {
      angles = std::make_unique<float[]>(block_positions * 2 * n);
      on_team_for(block_positions, [&](int64_t p) {
        float* cosine = angles.get() + p * 2 * n;
        for (int j = 0; j < n; ++j) {
          const float angle = static_cast<float>(block * block_positions + p) * frequencies_[j];
          cosine[j] = std::cos(angle) * amplitude_;
          cosine[n + j] = std::sin(angle) * amplitude_;
        }
      });
    }
    out[i] = angles.get() + (first + i) % block_positions * 2 * n;
  }
  return out;
}

void transform_heads(const HeadTransform& t, const HeadCounts& c, int64_t offset, const Heads& from, const Heads& to) {
  const auto angles = t.angles ? t.angles->table(offset, c.tokens) : std::vector<const float*>();
  const int half = t.angles ? t.angles->half() : 0;
  on_team(
      [&](Fence&) {
        std::vector<float> row(c.d);
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t b = 0; b < c.batch; ++b) {
          for (int64_t i = 0; i < c.tokens; ++i) {
            for (int64_t h = 0; h < c.heads; ++h) {
              convert_row(from.row(b, h, i), from.dtype, row.data(), mx::float32, c.d);
              if (t.norm) {
                table().rms_norm(row.data(), t.norm, t.eps, row.data(), c.d);
              }
              if (half > 0) {
                table().rope(row.data(), angles[i], angles[i] + half, half, t.traditional);
              }
              convert_row(row.data(), mx::float32, to.row(b, h, i), to.dtype, c.d);
            }
          }
        }
      },
      c.batch * c.tokens);
}

} // namespace cleave::kernels
