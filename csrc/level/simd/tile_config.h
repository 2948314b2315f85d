// The configuration of tiles, as `ldtilecfg` reads it.
#pragma once

#include "level/simd/common.h"

namespace octavo::OCTAVO_LEVEL {

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    void set(int tile, int num_rows, int bytes) {
        rows[tile] = static_cast<uint8_t>(num_rows);
        row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
};
static_assert(sizeof(TileConfig) == 64);

}  // namespace octavo::OCTAVO_LEVEL
