// Matrix products in bf16 tiles, for any number of rows.
//
// The panels are those of gemm.h, [units][32 outputs]: sixteen units of sixteen outputs form a tile as stored.
// Activations are packed in steps of sixteen units, rows padded with zeros to whole steps, by blocks of inputs:
//
//     block b   | group 0 | group 1 | ..                      some steps of all groups of a task, see tile_blocks.h
//     group g   | step 0: row 0 .. R-1, 16 units each | step 1 | ..        R <= 32
//
//                 outputs 0-15   16-31                 tiles
//     rows  0-15     sums 0        1                   4, 5: activations     6, 7: weights
//     rows 16-31          2        3
//
// A sum takes its inputs in order, a step at a time, whatever rows share the tile: its bits depend on its own row
// alone. Weights that are not bf16 panels are decoded into one, which all the groups of a task then read.
//
// With several groups, a task proceeds in blocks of inputs, so that both operands stay close to the core: a panel's
// part of a block (32 KiB for 512 inputs) in the first-level cache, the activations' (1 KiB a row) in the second-level
// one. Between two blocks the sums of some panels are in memory, which does not round them:
//
//     for panels p .. p + 7:  for blocks b of inputs:  for each panel: decode its part; for each group: sums += ..
//
#pragma once

#include "level/compressed.h"
#include "level/gemm.h"
#include "level/simd/tiles.h"
#include "tile_blocks.h"

namespace octavo::OCTAVO_LEVEL {

constexpr int kTileUnits = 16;
constexpr int kTilePrefetch = 4096;  // bytes, see kWeightPrefetch
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
    float* of(int tile) { return row[tile / 2 * 16] + tile % 2 * 16; }
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

// Some steps of a panel in bf16: the whole steps, and the panel's last units, padded with zeros to a step, or null.
struct TilePart {
    const char* panel;
    int64_t steps;
    const char* tail;
};

template <bool Lower> inline void begin_sums(TileSums* from) {
    each_constant<Lower ? 4 : 2>([&](auto tile) {
        if (from)
            tile_load<tile>(from->of(tile), sizeof from->row[0]);
        else
            tile_zero<tile>();
    });
}
template <bool Lower> inline void end_sums(TileSums& to) {
    each_constant<Lower ? 4 : 2>([&](auto tile) { tile_store<tile>(to.of(tile), sizeof to.row[0]); });
}
// Adds a part's products to the sums of a group of `rows` rows. `meanwhile(step)` runs while the tiles multiply.
template <bool Lower, class Meanwhile>
inline void add_steps(const TilePart& part, const char* x, int64_t rows, const Meanwhile& meanwhile) {
    const char* panel = part.panel;
    for (int64_t step = 0; step < part.steps; ++step, panel += kTileStepBytes, x += rows * 64) {
        tile_step<Lower>(panel, x);
        meanwhile(step);
    }
    if (part.tail) tile_step<Lower>(part.tail, x);
}

// Prefetches the lines that a group's sums go to, for writing, an equal part at each step: other cores have read or
// written them before, and stores would wait for one line after the other.
class OutputPrefetch {
  public:
    OutputPrefetch(const LinearOutput& out, int64_t row, int64_t rows, int64_t panel_index, int64_t steps)
        : line_(output_at(out, row, panel_index)),
          stride_(out.stride),
          rows_(rows),
          rows_per_step_(steps ? (rows + steps - 1) / steps : 0) {}
    void operator()(int64_t step) const {
        const int64_t begin = step * rows_per_step_, end = begin + rows_per_step_;
        for (int64_t r = begin; r < (end < rows_ ? end : rows_); ++r) prefetch_for_write(line_ + r * stride_);
    }

  private:
    const char* line_;
    int64_t stride_, rows_, rows_per_step_;
};

inline int64_t most_rows(const RowGroups& groups, int64_t begin, int64_t end) {
    int64_t most = 0;
    for (int64_t group = begin; group < end; ++group) {
        const int64_t rows = groups.begin(group + 1) - groups.begin(group);
        most = most > rows ? most : rows;
    }
    return most;
}

// Panels that are stored as bf16.
class StoredPanels {
  public:
    static constexpr bool kDecodes = false;
    explicit StoredPanels(const ProductTask& task)
        : task_(task), panel_bytes_(int64_t{task.units} * kPanelOutputs * 4) {}
    // Where steps [first, ..) of a panel are stored, and how long `steps` of them are.
    const char* stored(int64_t panel, int64_t first) const {
        return task_.weight + panel * panel_bytes_ + first * kTileStepBytes;
    }
    static int64_t stored_bytes(int64_t steps) { return steps * kTileStepBytes; }
    // Steps [first, end) of a panel.
    TilePart part(int64_t panel, int64_t first, int64_t end) {
        const int64_t whole = task_.units / kTileUnits, left = task_.units % kTileUnits * kPanelOutputs * 4;
        const char* from = stored(panel, first);
        if (end <= whole) return {from, end - first, nullptr};
        __builtin_memcpy(tail_, stored(panel, whole), left);
        __builtin_memset(tail_ + left, 0, kTileStepBytes - left);
        return {from, whole - first, tail_};
    }

  private:
    const ProductTask& task_;
    int64_t panel_bytes_;
    alignas(64) char tail_[kTileStepBytes];
};

// Panels of compressed.h.
class DecompressedPanels {
  public:
    static constexpr bool kDecodes = true;
    explicit DecompressedPanels(const ProductTask& task) : task_(task), tables_(load_tables(task.compressed.tables)) {}
    const char* stored(int64_t panel, int64_t first) const {
        const int64_t pairs = (int64_t{task_.units} + 1) / 2;
        return task_.weight + (panel * pairs + first * (kTileUnits / 2)) * kCompressedPairBytes;
    }
    static int64_t stored_bytes(int64_t steps) { return steps * (kTileUnits / 2) * kCompressedPairBytes; }
    TilePart part(int64_t panel, int64_t first, int64_t end) {
        const char* from = stored(panel, first);
        const Escape* escape = task_.compressed.escapes + task_.compressed.first_escape[panel];
        const auto begin_unit = static_cast<int>(first * kTileUnits), end_unit = static_cast<int>(end * kTileUnits);
        while (escape->unit < static_cast<uint32_t>(begin_unit)) ++escape;
        char* to = task_.decoded;
        const auto put = [&](int unit, U16 low, U16 high) {
            if (escape->unit == static_cast<uint32_t>(unit)) [[unlikely]]
                put_escapes(escape, unit, low, high);
            store(low, to);
            store(high, to + 64);
            to += 128;
        };
        U16 low, high;
        for (int unit = begin_unit; unit < end_unit; unit += 2, from += kCompressedPairBytes) {
            for (int line = 0; line < kCompressedPairBytes; line += 64)
                __builtin_prefetch(from + kWeightPrefetch + line, 0, 3);
            for (int half = 0; half < 2; ++half) {
                if (unit + half >= task_.units)
                    low = high = U16::zero();
                else if (half == 0)
                    decompress_unit<0>(from, tables_, low, high);
                else
                    decompress_unit<1>(from, tables_, low, high);
                put(unit + half, low, high);
            }
        }
        return {task_.decoded, end - first, nullptr};
    }

  private:
    const ProductTask& task_;
    ExponentTables tables_;
};

// One group: its sums stay in the tiles, and prefetches reach for a later part of the same panel.
template <bool Lower, class Panels>
void tile_one_group(const ProductTask& task, int64_t group, int64_t panel_begin, int64_t panel_end) {
    const int64_t row = task.groups.begin(group), rows = task.groups.begin(group + 1) - row;
    const int64_t steps = tile_steps(task.units), most = Panels::kDecodes ? tile_block_steps(steps) : steps;
    const char* x = reinterpret_cast<const char*>(task.x);
    Panels panels(task);
    TileSums sums;
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
        const OutputPrefetch prefetch(task.out, row, rows, panel, steps);
        begin_sums<Lower>(nullptr);
        for (int64_t first = 0; first < steps; first += most) {
            const TilePart part = panels.part(panel, first, first + most < steps ? first + most : steps);
            const char* ahead = part.panel + kTilePrefetch;
            add_steps<Lower>(part, x + first * rows * 64, rows, [&](int64_t step) {
                if constexpr (!Panels::kDecodes)
                    for (int64_t at = 0; at < kTileStepBytes; at += 64)
                        __builtin_prefetch(ahead + step * kTileStepBytes + at, 0, 2);
                prefetch(first + step);
            });
        }
        end_sums<Lower>(sums);
        store_panel(task.out, row, panel, &sums.row[0][0], rows);
    }
}

// Several groups: while they read a panel's part, each prefetches some of the next one as it is stored.
template <class Panels>
void tile_groups(const ProductTask& task, int64_t group_begin, int64_t group_end, int64_t panel_begin,
                 int64_t panel_end) {
    const int64_t steps = tile_steps(task.units), most = tile_block_steps(steps), groups = group_end - group_begin;
    const int64_t all_rows = task.groups.begin(group_end) - task.first_row;
    const char* x = reinterpret_cast<const char*>(task.x);
    auto* const kept = reinterpret_cast<TileSums*>(task.decoded + kMostTileSteps * kTileStepBytes);
    const int64_t step_share = (Panels::stored_bytes(1) + groups * 64 - 1) / (groups * 64) * 64;
    Panels panels(task);
    TileSums sums;
    for (int64_t base = panel_begin; base < panel_end; base += kTilePanels) {
        const int64_t end_panel = base + kTilePanels < panel_end ? base + kTilePanels : panel_end;
        for (int64_t first = 0; first < steps; first += most) {
            const int64_t end = first + most < steps ? first + most : steps;
            for (int64_t panel = base; panel < end_panel; ++panel) {
                const TilePart part = panels.part(panel, first, end);
                const bool last = end == steps;
                const char* next = panel + 1 < end_panel ? panels.stored(panel + 1, first)
                                                         : panels.stored(last ? end_panel : base, last ? 0 : end);
                for (int64_t group = group_begin; group < group_end; ++group) {
                    const int64_t row = task.groups.begin(group), rows = task.groups.begin(group + 1) - row;
                    const char* own = x + (first * all_rows + (row - task.first_row) * (end - first)) * 64;
                    TileSums* const own_sums = kept + (panel - base) * groups + group - group_begin;
                    const OutputPrefetch prefetch(task.out, row, last ? rows : 0, panel, end - first);
                    const char* ahead = next + (group - group_begin) * (end - first) * step_share;
                    const auto meanwhile = [&](int64_t step) {
                        for (int64_t at = 0; at < step_share; at += 64)
                            __builtin_prefetch(ahead + step * step_share + at, 0, 2);
                        prefetch(step);
                    };
                    const auto multiply = [&]<bool Lower>() {
                        begin_sums<Lower>(first ? own_sums : nullptr);
                        add_steps<Lower>(part, own, rows, meanwhile);
                        end_sums<Lower>(last ? sums : *own_sums);
                    };
                    if (rows > 16)
                        multiply.template operator()<true>();
                    else
                        multiply.template operator()<false>();
                    if (last) store_panel(task.out, row, panel, &sums.row[0][0], rows);
                }
            }
        }
    }
}

// As `gemm`, with tiles.
template <class Panels>
void multiply_in_tiles(const ProductTask& task, int64_t group_begin, int64_t group_end, int64_t panel_begin,
                       int64_t panel_end) {
    const int64_t most = most_rows(task.groups, group_begin, group_end);
    configure_tiles(most);
    if (group_end - group_begin > 1)
        tile_groups<Panels>(task, group_begin, group_end, panel_begin, panel_end);
    else if (most > 16)
        tile_one_group<true, Panels>(task, group_begin, panel_begin, panel_end);
    else
        tile_one_group<false, Panels>(task, group_begin, panel_begin, panel_end);
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
