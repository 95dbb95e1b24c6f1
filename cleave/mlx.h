#pragma once

#include "mlx/mlx.h"

namespace cleave {
namespace mx = mlx::core;
}
