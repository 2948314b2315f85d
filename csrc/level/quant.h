// Matrix products with quantised weights, for any number of rows.
//
// GGUF's Q4_0, Q4_1 and Q8_0 (32 weights share a scale) are rearranged into panels of 32 outputs, two vectors of 16
// lanes, so that nothing is summed across lanes; the last panel is padded with zeros. One block of 32 inputs:
//
//     | scales 32 x f16 | minimums 32 x f16 (Q4_1) | j = 0: outputs 0 .. 15 | outputs 16 .. 31 | j = 1: .. | ..
//
//     Q4   vector j, lane n: bytes 4j .. 4j+3 of output n; low nibbles are inputs 4j .., high ones 16 + 4j ..
//     Q8   vector j, lane n: inputs 4j .. 4j+3 of output n, plus 128
//
// A block begins where a cache line does, no vector crosses one, and a panel is read from its beginning to its end.
//
// Activations are quantised to int8: a block of a row has the scale s, 1/127 of its largest magnitude, and is the
// integers xq times s:
//     sum (d q + m) x  =  s d (sum(q xq) - z sum(xq)) + m s sum(xq),   z = 8 in Q4_0, 128 in Q8_0, m in Q4_1 only
// The integers lie in groups of up to kQuantRows rows as in gemm.h, four to a unit.
#pragma once

#include <utility>

#include "level/gemm.h"
#include "level/interleave.h"

namespace octavo::OCTAVO_LEVEL {

template <QuantFormat F> constexpr int kQuantVectors = F == kQ8_0 ? 8 : 4;
constexpr int quant_zero(QuantFormat format) { return format == kQ4_0 ? 8 : format == kQ8_0 ? 128 : 0; }

// The bits of the largest magnitude of 32 numbers. Compared as integers, magnitudes are ordered as numbers are, with
// infinity and then NaN above them all.
inline int32_t largest_size(const float* x) {
    const U16 size = U16::set1(0x7fffffff);
    return reduce_max(max(U16::load(x) & size, U16::load(x + 16) & size));
}
inline int32_t largest_size(const bf16* x) {
    const U16 pairs = U16::load(x), size = U16::set1(0x7fff0000);
    return reduce_max(max(pairs & size, shift_left<16>(pairs) & size));
}

constexpr int32_t kInfiniteSize = 0x7f800000;
constexpr int32_t kSmallestSize = (127 - 90) << 23;  // 2^-90: blocks below are taken as zero: the inverse of their
                                                     // scale is not finite
inline bool is_usual_size(int32_t size) { return size >= kSmallestSize && size < kInfiniteSize; }

// sums[r] of quants [8 units][R rows], with four quants to a unit.
template <int R> inline void sum_quants(const uint32_t* units, int32_t (&sums)[R]) {
    if constexpr (R == 8) {
        U16 even_and_odd = U16::zero();
        for (int u = 0; u < 8; u += 2)
            even_and_odd = dot_bytes(even_and_odd, U16::set1(0x01010101), U16::load(units + u * R));
        int32_t lanes[16];
        store(even_and_odd, lanes);
        for (int r = 0; r < R; ++r) sums[r] = lanes[r] + lanes[r + 8];
    } else {
        for (int r = 0; r < R; ++r) sums[r] = 0;
        for (int u = 0; u < 8; ++u)
            for (int r = 0; r < R; ++r)
                for (int byte = 0; byte < 32; byte += 8) sums[r] += static_cast<int8_t>(units[u * R + r] >> byte);
    }
}

constexpr int kQuantChunk = 16;  // blocks whose scales are computed together: vectors of divisions, not one by one

// The scales of `count` blocks from the bits of their largest magnitudes, and what to multiply the blocks by. The scale
// of a block that holds an infinity or NaN is NaN, and so is every product of its row.
inline void invert_scales(const int32_t* sizes, int count, bool usual, float* scales, float* inverses) {
    for (int i = 0; i < count; i += 16) {
        const F16 largest = as_float(U16::load(sizes + i));
        (largest / F16::set1(127.0f)).store(scales + i);
        (F16::set1(127.0f) / largest).store(inverses + i);
    }
    for (int i = 0; !usual && i < count; ++i) {
        if (is_usual_size(sizes[i])) continue;
        scales[i] = sizes[i] >= kInfiniteSize ? __builtin_nanf("") : 0.0f;
        inverses[i] = 0.0f;
    }
}

// Quantises a group of R rows.
template <Storage S, int R>
void quantise_group(QuantFormat format, const char* const* bytes, int width, const QuantRows& to) {
    using T = Element<S>;
    for (int first = 0; first < width / 32; first += kQuantChunk) {
        const int blocks = min(width / 32 - first, kQuantChunk), count = blocks * R;
        alignas(64) int32_t sizes[kQuantChunk * R + 15];
        alignas(64) float scales[kQuantChunk * R + 15], inverses[kQuantChunk * R + 15];
        bool usual = true;
        for (int block = 0; block < blocks; ++block)
            for (int r = 0; r < R; ++r) {
                const int32_t size = largest_size(reinterpret_cast<const T*>(bytes[r]) + (first + block) * 32);
                usual &= is_usual_size(size);
                sizes[block * R + r] = size;
            }
        for (int i = count; i % 16; ++i) sizes[i] = 0;
        invert_scales(sizes, count, usual, scales, inverses);
        __builtin_memcpy(to.scales + first * R, scales, sizeof(float) * count);
        for (int block = 0; block < blocks; ++block) {
            int8_t quants[R][32];
            const char* rows[R];
            for (int r = 0; r < R; ++r) {
                const T* x = reinterpret_cast<const T*>(bytes[r]) + (first + block) * 32;
                const F16 inverse = F16::set1(inverses[block * R + r]);
                round_to_int8(F16::load(x) * inverse, quants[r]);
                round_to_int8(F16::load(x + 16) * inverse, quants[r] + 16);
                rows[r] = reinterpret_cast<const char*>(quants[r]);
            }
            interleave_rows<R>(rows, 8, to.quants + int64_t{first + block} * 8 * R);
        }
    }
    // Summed at the end: a load of sixteen lanes waits until the narrower stores of them have reached the cache.
    for (int block = 0; block < width / 32; ++block) {
        int32_t sums[R];
        sum_quants(to.quants + int64_t{block} * 8 * R, sums);
        for (int r = 0; r < R; ++r)
            to.sums[block * R + r] = format == kQ4_1
                                         ? float_bits(static_cast<float>(sums[r]) * to.scales[block * R + r])
                                         : static_cast<uint32_t>(-quant_zero(format) * sums[r]);
    }
}
template <Storage S>
void quantise_rows(QuantFormat format, const char* const* rows, int count, int width, const QuantRows& to) {
    with_constant<kQuantRows>(count, [&](auto constant) { quantise_group<S, constant>(format, rows, width, to); });
}

// Products of R rows with both halves of a panel, 16 outputs each, or with the half `First`. A broadcast activation is
// used for both: one port loads, one multiplies, and two halves keep the first from holding up the second.
template <QuantFormat F, int R, int First, int T>
inline void quant_halves(const QuantTask& task, const uint8_t* panel, int64_t row, Ahead ahead, F16 (*results)[2]) {
    constexpr int kHeader = F == kQ4_1 ? 128 : 64;
    const U16 nibble = U16::set1(0x0f0f0f0f);
    const QuantRows group = task.x.at(row - task.first_row, task.blocks);
    const uint32_t *x = group.quants, *sums = group.sums;
    const float* steps = group.scales;
    F16 totals[R][T];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t) totals[r][t] = F16::zero();
    for (int block = 0; block < task.blocks; ++block, x += 8 * R, steps += R, sums += R) {
        U16 dots[R][T];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int t = 0; t < T; ++t) dots[r][t] = F == kQ4_1 ? U16::zero() : U16::set1(sums[r]);
        const uint8_t* vector = panel + kHeader + First * 64;
        if constexpr (R > kQuantRowsThatWait) {
            ahead.ask_l1();
        } else {
            const uint8_t* later = panel + kQuantPrefetch;
#pragma GCC unroll 2
            for (int line = 0; First == 0 && line < kHeader; line += 64) __builtin_prefetch(later + line, 0, 3);
#pragma GCC unroll 16
            for (int j = 0; j < kQuantVectors<F> * T; ++j)
                __builtin_prefetch(later + kHeader + First * 64 + j * (128 / T), 0, 3);
        }
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            // All low nibbles come before the high ones; when vectors are read for the second time, they are in L1.
            U16 weights[T];
#pragma GCC unroll 2
            for (int t = 0; t < T; ++t) {
                weights[t] = U16::load(vector + t * 64 + j % kQuantVectors<F> * 128);
                if constexpr (F != kQ8_0) weights[t] = (j < 4 ? weights[t] : shift_right<4>(weights[t])) & nibble;
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const U16 broadcast = U16::set1(x[j * R + r]);
#pragma GCC unroll 2
                for (int t = 0; t < T; ++t)
                    if constexpr (F == kQ8_0)
                        dots[r][t] = dot_bytes(dots[r][t], weights[t], broadcast);
                    else
                        dots[r][t] = dot_small(dots[r][t], weights[t], broadcast);
            }
        }
        F16 scale[T], minimum[T];
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t) {
            const auto* scales = reinterpret_cast<const uint16_t*>(panel) + (First + t) * 16;
            scale[t] = F16::load_half(scales);
            if constexpr (F == kQ4_1) minimum[t] = F16::load_half(scales + kPanelOutputs);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const F16 step = F16::set1(steps[r]);
#pragma GCC unroll 2
            for (int t = 0; t < T; ++t) {
                totals[r][t] = fma(F16::from_int(dots[r][t]), scale[t] * step, totals[r][t]);
                if constexpr (F == kQ4_1) totals[r][t] = fma(minimum[t], as_float(U16::set1(sums[r])), totals[r][t]);
            }
        }
        panel += quant_block_bytes(F);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t) results[r][First + t] = totals[r][t];
}

// 32 outputs of R rows.
template <QuantFormat F, int R>
inline void quant_panel(const QuantTask& task, const uint8_t* panel, int64_t row, int64_t index, const Ahead& ahead) {
    ask_to_write_rows<R>(task.out, row, index);
    F16 results[R][2];
    if constexpr (kQuantHalves == 2 || R == 1) {
        quant_halves<F, R, 0, 2>(task, panel, row, ahead, results);
    } else {
        quant_halves<F, R, 0, 1>(task, panel, row, ahead, results);
        quant_halves<F, R, 1, 1>(task, panel, row, ahead, results);
    }
    store_rows(task.out, row, index, results);
}

// Row groups [group_begin, group_end) times panels [panel_begin, panel_end).
template <QuantFormat F>
void quant_linear(const QuantTask& task, int64_t group_begin, int64_t group_end, int64_t panel_begin,
                  int64_t panel_end) {
    const int64_t panel_bytes = int64_t{task.blocks} * quant_block_bytes(F);
    const Ahead ahead(panel_bytes, task.blocks, group_end - group_begin);
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
        const uint8_t* weight = task.weight + panel * panel_bytes;
        const uint8_t* next = weight + (panel + 1 < panel_end ? 1 : 1 + task.skipped) * panel_bytes;
        for (int64_t group = group_begin; group < group_end; ++group) {
            const int64_t row = task.groups.begin(group), rows = task.groups.begin(group + 1) - row;
            with_constant<kQuantRows>(static_cast<int>(rows), [&](auto count) {
                quant_panel<F, count>(task, weight, row, panel, ahead.of(next, group - group_begin));
            });
        }
    }
}

}  // namespace octavo::OCTAVO_LEVEL
