// Matrix products in bf16 tiles, for any number of rows.
//
// The panels are those of gemm.h, [units][32 outputs]: sixteen units of sixteen outputs form a tile as stored.
// Activations are packed in steps of sixteen units, rows padded with zeros to whole steps:
//
//     group g   | step 0: row 0 .. R-1, 16 units each | step 1 | ..        R <= 32
//
//                 outputs 0-15   16-31                 tiles
//     rows  0-15     sums 0        1                   4, 5: activations     6, 7: weights
//     rows 16-31          2        3
//
// A sum takes its inputs in order, a step at a time, whatever rows share the tile: its bits depend on its own row
// alone. Weights that are not bf16 panels are decoded into one, which all the groups of a task then read.
#pragma once

#include "level/coded.h"
#include "level/gemm.h"
#include "level/simd/tiles.h"

namespace octavo::OCTAVO_LEVEL {

constexpr int kTileUnits = 16, kTileGroupRows = 32;
constexpr int kTilePrefetch = 4096;  // bytes, see kGemmPrefetch
// Measured on Sapphire Rapids with whole steps of a model; with fewer rows, dequantising a panel costs more than tiles
// save.
constexpr int64_t kGemmQuantRows = 32;
constexpr int64_t kTileStepBytes = kTileUnits * kPanelOutputs * 4;  // of a panel

inline int64_t tile_steps(int64_t units) { return (units + kTileUnits - 1) / kTileUnits; }

// Groups differ by at most one row. The smaller ones compute one row more, which is not stored.
inline void configure_tiles(int64_t most_rows) {
    const int upper = static_cast<int>(most_rows < 16 ? most_rows : 16), lower = static_cast<int>(most_rows) - upper;
    TileConfig config;
    for (int half = 0; half < 2; ++half) {
        const int rows = half == 0 || lower == 0 ? upper : lower;
        config.set(2 * half, rows, 64);
        config.set(2 * half + 1, rows, 64);
        config.set(4 + half, rows, 64);
        config.set(6 + half, kTileUnits, 64);
    }
    load_tile_config(config);
}

struct alignas(64) TileSums {
    float row[kTileGroupRows][kPanelOutputs];
};

template <bool Lower> inline void tile_step(const char* panel, const char* x) {
    tile_load<4>(x, 64);
    tile_load<6>(panel, 128);
    tile_dot_bf16<0, 4, 6>();
    tile_load<7>(panel + 64, 128);
    tile_dot_bf16<1, 4, 7>();
    if constexpr (Lower) {
        tile_load<5>(x + 16 * 64, 64);
        tile_dot_bf16<2, 5, 6>();
        tile_dot_bf16<3, 5, 7>();
    }
}

// Computes the sums of a group of `rows` rows. `tail` is what follows the panel's whole steps, padded, or null.
// `beside(step)` runs while the tiles multiply.
template <bool Lower, class Beside>
inline void tile_sums(const char* panel, const char* tail, int64_t steps, const char* x, int64_t rows, TileSums& sums,
                      const Beside& beside) {
    tile_zero<0>();
    tile_zero<1>();
    if constexpr (Lower) {
        tile_zero<2>();
        tile_zero<3>();
    }
    for (int64_t step = 0; step < steps; ++step, panel += kTileStepBytes, x += rows * 64) {
        tile_step<Lower>(panel, x);
        beside(step);
    }
    if (tail) tile_step<Lower>(tail, x);
    tile_store<0>(sums.row[0], sizeof sums.row[0]);
    tile_store<1>(sums.row[0] + 16, sizeof sums.row[0]);
    if constexpr (Lower) {
        tile_store<2>(sums.row[16], sizeof sums.row[0]);
        tile_store<3>(sums.row[16] + 16, sizeof sums.row[0]);
    }
}

// What each step of a group prefetches: a later part of the same panel if there is a single group, which waits for it,
// otherwise the group's part of the next panel.
struct TilePrefetch {
    const char* from;
    int64_t step, bytes;
    void operator()(int64_t index) const {
        const char* p = from + index * step;
        for (int64_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(p + offset, 0, 2);
    }
};

// Prefetches the lines that a group's sums go to, for writing, an equal part at each step: other cores have read or
// written them before, and stores would wait for one line after the other.
class OutputAhead {
  public:
    OutputAhead(const LinearOutput& out, int64_t row, int64_t rows, int64_t panel_index, int64_t steps)
        : line_(out.base + row * out.stride +
                panel_index * (out.epilogue == kPlain ? 32 : 16) * (out.storage == kBf16 ? 2 : 4)),
          stride_(out.stride),
          rows_(rows),
          rows_per_step_(steps ? (rows + steps - 1) / steps : 0) {}
    void operator()(int64_t step) const {
        const int64_t begin = step * rows_per_step_, end = begin + rows_per_step_;
        for (int64_t r = begin; r < (end < rows_ ? end : rows_); ++r) ask_to_write(line_ + r * stride_);
    }

  private:
    const char* line_;
    int64_t stride_, rows_, rows_per_step_;
};

struct NothingBeside {
    void operator()(int64_t) const {}
};

template <class Beside>
inline void tile_group(const ProductTask& task, const char* panel, const char* tail, int64_t steps, int64_t group,
                       int64_t panel_index, TileSums& sums, const Beside& beside) {
    const int64_t row = task.groups.begin(group), rows = task.groups.begin(group + 1) - row;
    const char* x = reinterpret_cast<const char*>(task.x) + (row - task.first_row) * tile_steps(task.units) * 64;
    const OutputAhead ask(task.out, row, rows, panel_index, steps);
    const auto beside_and_ask = [&](int64_t step) {
        beside(step);
        ask(step);
    };
    if (rows > 16)
        tile_sums<true>(panel, tail, steps, x, rows, sums, beside_and_ask);
    else
        tile_sums<false>(panel, tail, steps, x, rows, sums, beside_and_ask);
    store_panel(task.out, row, panel_index, &sums.row[0][0], rows);
}

inline int64_t most_rows(const RowGroups& groups, int64_t begin, int64_t end) {
    int64_t most = 0;
    for (int64_t group = begin; group < end; ++group) {
        const int64_t rows = groups.begin(group + 1) - groups.begin(group);
        most = most > rows ? most : rows;
    }
    return most;
}

// A panel's last units, padded with zeros to a whole step.
struct alignas(64) TileTail {
    char bytes[kTileStepBytes];
    const char* of(const char* units, int64_t count) {
        if (count == 0) return nullptr;
        __builtin_memcpy(bytes, units, count * kPanelOutputs * 4);
        __builtin_memset(bytes + count * kPanelOutputs * 4, 0, kTileStepBytes - count * kPanelOutputs * 4);
        return bytes;
    }
};

// As `gemm`, with tiles.
inline void tile_gemm(const ProductTask& task, int64_t group_begin, int64_t group_end, int64_t panel_begin,
                      int64_t panel_end) {
    const int64_t panel_bytes = int64_t{task.units} * kPanelOutputs * 4, steps = task.units / kTileUnits;
    const int64_t groups = group_end - group_begin;
    const int64_t share = groups == 1 ? kTileStepBytes : (kTileStepBytes + groups * 64 - 1) / (groups * 64) * 64;
    TileSums sums;
    TileTail tail;
    configure_tiles(most_rows(task.groups, group_begin, group_end));
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
        const char* weight = task.weight + panel * panel_bytes;
        const char* last = tail.of(weight + steps * kTileStepBytes, task.units % kTileUnits);
        for (int64_t group = group_begin; group < group_end; ++group) {
            const TilePrefetch ahead =
                groups == 1 ? TilePrefetch{weight + kTilePrefetch, kTileStepBytes, share}
                            : TilePrefetch{weight + panel_bytes + (group - group_begin) * share, kTileStepBytes, share};
            tile_group(task, weight, last, steps, group, panel, sums, ahead);
        }
    }
    release_tiles();
}

// As `gemm_coded`, with tiles.
inline void tile_gemm_coded(const ProductTask& task, int64_t group_begin, int64_t group_end, int64_t panel_begin,
                            int64_t panel_end) {
    const int64_t panel_bytes = (int64_t{task.units} + 1) / 2 * kCodedPairBytes, steps = tile_steps(task.units);
    const CodeTables tables = load_tables(task.coded.tables);
    TileSums sums;
    configure_tiles(most_rows(task.groups, group_begin, group_end));
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
        const char* from = task.weight + panel * panel_bytes;
        const Escape* escape = task.coded.escapes + task.coded.first_escape[panel];
        char* to = task.decoded;
        const auto put = [&](int unit, U16 low, U16 high) {
            if (escape->unit == static_cast<uint32_t>(unit)) [[unlikely]]
                put_escapes(escape, unit, low, high);
            store(low, to);
            store(high, to + 64);
            to += 128;
        };
        int unit = 0;
        for (; unit + 1 < task.units; unit += 2, from += kCodedPairBytes) {
            for (int line = 0; line < kCodedPairBytes; line += 64)
                __builtin_prefetch(from + kGemmPrefetch + line, 0, 3);
            U16 low, high;
            decode_unit<0>(from, tables, low, high);
            put(unit, low, high);
            decode_unit<1>(from, tables, low, high);
            put(unit + 1, low, high);
        }
        if (unit < task.units) {
            U16 low, high;
            decode_unit<0>(from, tables, low, high);
            put(unit++, low, high);
        }
        for (; unit < steps * kTileUnits; ++unit, to += 128) {
            store(U16::zero(), to);
            store(U16::zero(), to + 64);
        }
        for (int64_t group = group_begin; group < group_end; ++group)
            tile_group(task, task.decoded, nullptr, steps, group, panel, sums, NothingBeside{});
    }
    release_tiles();
}

// [row][unit] -> [step][row][16 units]
inline void pack_tile_rows(const char* const* rows, int64_t count, int64_t row_bytes, uint32_t* packed) {
    char* to = reinterpret_cast<char*>(packed);
    for (int64_t at = 0; at < row_bytes; at += 64) {
        const int64_t left = row_bytes - at;
        for (int64_t r = 0; r < count; ++r, to += 64) {
            if (left >= 64) {
                store(U16::load(rows[r] + at), to);
            } else {
                __builtin_memset(to, 0, 64);
                __builtin_memcpy(to, rows[r] + at, left);
            }
        }
    }
}

}  // namespace octavo::OCTAVO_LEVEL
