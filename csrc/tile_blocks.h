// How products in tiles (level/tile_gemm.h) are blocked, and the memory that they need.
#pragma once

#include <cstdint>

namespace octavo {

constexpr int kTileGroupRows = 32;
// Panels whose sums are kept between two blocks of inputs.
constexpr int64_t kTilePanels = 8;
// Steps of 32 inputs in a block. Up to 1,024 inputs are one block: there are no sums to keep.
constexpr int64_t kMostTileSteps = 32;
constexpr int64_t tile_block_steps(int64_t steps) { return steps <= kMostTileSteps ? steps : kMostTileSteps / 2; }
// Bytes of ProductTask::decoded: a block of a decoded panel, and sums of 32 floats a row.
constexpr int64_t tile_room(int64_t groups) {
    return (kMostTileSteps * 16 + groups * kTilePanels * kTileGroupRows) * 128;
}

}  // namespace octavo
