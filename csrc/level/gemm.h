// Matrix products of any number of rows with packed weights.
//
// A unit is four bytes: a pair of bf16 of neighbouring inputs, or one float. Weights are in panels of 32 outputs, the
// last one padded with zeros; activations in groups of up to kGemmRows rows, so that both are read sequentially:
//
//     panel p   | unit 0: outputs 0 .. 31 | unit 1: outputs 0 .. 31 | ..      [outputs / 32][units][32]
//     group g   | unit 0: rows 0 .. R-1 | unit 1: rows 0 .. R-1 | ..          [rows / R][units][R]
//
//              16 outputs    16           row r, unit u: one 32-bit broadcast
//     u=0     [w w w ..]    [w w w ..]    acc[r][output] += x[r][u] . w[u][output]
//     u=1     [w w w ..]    [w w w ..]
//
// Every output has one accumulator, which takes its inputs in order: its bits depend on its own row alone.
#pragma once

#include "level/linear_output.h"
#include "level/row_pairs.h"
#include "level/with_constant.h"

namespace octavo::OCTAVO_LEVEL {

// Prefetches the next panel while groups read the current one, an equal part at each of their steps: if the last group
// prefetched all of it, more lines would be in flight than a core has buffers for.
class PanelPrefetch {
  public:
    PanelPrefetch(int64_t bytes, int64_t steps, int64_t groups)
        : next_(nullptr), step_((bytes + steps * groups - 1) / (steps * groups)), part_(step_ * steps) {}
    PanelPrefetch of(const void* next, int64_t group) const {
        PanelPrefetch prefetch = *this;
        prefetch.next_ = static_cast<const char*>(next) + part_ * group;
        return prefetch;
    }
    // At a step of R rows over float weights, which is at `panel`. Few rows prefetch their own panel. Others prefetch
    // the next one to L2: L1 would have evicted it before it is used. `Lines` is what a step needs if there is a single
    // group: a loop of variable length would cost the sums their registers.
    template <int R, int Lines> [[gnu::always_inline]] void step(const char* panel, int line_stride = 64) {
        if constexpr (R <= kGemmRowsThatWait) {
            OCTAVO_UNROLL for (int line = 0; line < Lines; ++line)
                __builtin_prefetch(panel + kWeightPrefetch + line * line_stride, 0, 3);
        } else {
            OCTAVO_UNROLL for (int line = 0; line < Lines; ++line) __builtin_prefetch(next_ + line * 64, 0, 2);
            next_ += step_;
        }
    }
    void to_l1() {
        for (int64_t offset = 0; offset < step_; offset += 64) __builtin_prefetch(next_ + offset, 0, 3);
        next_ += step_;
    }

  private:
    const char* next_;
    int64_t step_, part_;
};

// Calls body(rows as a constant, panel, its index, first row, prefetch) for each panel and each group of LeastRows to
// MostRows rows. A body takes `steps` steps over a panel and prefetches at each.
template <int MostRows, int LeastRows = 1, class Body>
[[gnu::always_inline]] inline void each_panel(const ProductTask& task, int64_t group_begin, int64_t group_end,
                                              int64_t panel_begin, int64_t panel_end, int64_t panel_bytes,
                                              int64_t steps, const Body& body) {
    const PanelPrefetch prefetch(panel_bytes, steps, group_end - group_begin);
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
        const char* weight = task.weight + panel * panel_bytes;
        const char* next = weight + (panel + 1 < panel_end ? 1 : 1 + task.skipped) * panel_bytes;
        for (int64_t group = group_begin; group < group_end; ++group) {
            const int64_t row = task.groups.begin(group), rows = task.groups.begin(group + 1) - row;
            with_constant<MostRows, LeastRows>(static_cast<int>(rows), [&](auto count) {
                body(count, weight, panel, row, prefetch.of(next, group - group_begin));
            });
        }
    }
}

// Adds the products of a unit of 32 outputs and of R rows.
template <Storage S, int R>
[[gnu::always_inline]] inline void add_unit(F16 (&sums)[R][2], U16 low, U16 high, const uint32_t* x) {
    OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
        const U16 broadcast = U16::set1(x[r]);
        sums[r][0] = mac<S>(sums[r][0], low, broadcast);
        sums[r][1] = mac<S>(sums[r][1], high, broadcast);
    }
}

template <Storage S, int R>
inline void gemm_panel(const ProductTask& task, const char* panel, int64_t panel_index, int64_t row,
                      PanelPrefetch prefetch) {
    const uint32_t* x = task.x + (row - task.first_row) * task.units;
    prefetch_outputs<R>(task.out, row, panel_index);
    F16 acc[R][2];
    OCTAVO_UNROLL for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = F16::zero();
    for (int unit = 0; unit < task.units; ++unit, panel += kPanelOutputs * 4, x += R) {
        const U16 low = U16::load(panel), high = U16::load(panel + 64);
        prefetch.step<R, 2>(panel);
        add_unit<S>(acc, low, high, x);
    }
    store_sums(task.out, row, panel_index, acc);
}

constexpr int kUnitsPerHalf = 32;

// The same where there are too few registers for the sums of both halves of a panel: halves follow each other every few
// units, so that the panel is still read sequentially.
template <Storage S, int R>
inline void gemm_halves(const ProductTask& task, const char* panel, int64_t panel_index, int64_t row,
                        PanelPrefetch prefetch) {
    const uint32_t* x = task.x + (row - task.first_row) * task.units;
    prefetch_outputs<R>(task.out, row, panel_index);
    F16 sums[R][2];
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = F16::zero();
    for (int unit = 0; unit < task.units; unit += kUnitsPerHalf) {
        const int count = min(task.units - unit, kUnitsPerHalf);
#pragma GCC unroll 1
        for (int half = 0; half < 2; ++half) {
            F16 acc[R][1];
            OCTAVO_UNROLL for (int r = 0; r < R; ++r) acc[r][0] = sums[r][half];
            int u = 0;
            const char* w = panel + half * 64;
            const uint32_t* from = x;
            if constexpr (S == kBf16 && kInPairs<R>) {
                join_pairs(acc);
                for (; u + 1 < count; u += 2, w += kPanelOutputs * 8, from += 2 * R) {
                    prefetch.step<R, 2>(w, kPanelOutputs * 4);
                    add_pairs(acc, U16::load(w), U16::load(w + kPanelOutputs * 4), from);
                }
                split_pairs(acc);
            }
            for (; u < count; ++u, w += kPanelOutputs * 4, from += R)
                OCTAVO_UNROLL for (int r = 0; r < R; ++r)
                    acc[r][0] = mac<S>(acc[r][0], U16::load(w), U16::set1(from[r]));
            OCTAVO_UNROLL for (int r = 0; r < R; ++r) sums[r][half] = acc[r][0];
        }
        panel += count * kPanelOutputs * 4;
        x += count * R;
    }
    store_rows(task.out, row, panel_index, sums);
}

template <Storage S>
void gemm(const ProductTask& task, int64_t group_begin, int64_t group_end, int64_t panel_begin, int64_t panel_end) {
    each_panel<kGemmRows>(task, group_begin, group_end, panel_begin, panel_end, int64_t{task.units} * kPanelOutputs * 4,
                          task.units, [&](auto count, auto... of) {
                              if constexpr (count > kGemmRowsOfBothHalves)
                                  gemm_halves<S, count>(task, of...);
                              else
                                  gemm_panel<S, count>(task, of...);
                          });
}

}  // namespace octavo::OCTAVO_LEVEL
