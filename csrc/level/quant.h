// Matrix products with quantised weights, for any number of rows.
//
// GGUF's Q4_0, Q4_1 and Q8_0 (32 weights share a scale) are dealt into tiles of 16 outputs, one lane each, so that
// nothing is summed across lanes. One tile, one block of 32 inputs:
//
//     scales   16 x f16 | minimums 16 x f16 (Q4_1) | vectors of 16 lanes x 4 bytes
//
//     Q4   vector j, lane n: bytes 4j .. 4j+3 of output n; low nibbles are inputs 4j .., high ones 16 + 4j ..
//     Q8   vector j, lane n: inputs 4j .. 4j+3 of output n, plus 128
//
// Activations are quantised to int8. A row has a scale s of 127 steps to its largest value, and each of its blocks a
// power of two of it, the finest that holds its own largest: that takes an addition to exponents, on ports that wait
// for the multiplying ones. A rounded block is the integers xq times s / 2^k:
//     sum (d q + m) x  =  s / 2^24 (2^(24-k) d (sum(q xq) - z sum(xq)) + m 2^(24-k) sum(xq)),
//     z = 8 in Q4_0, 128 in Q8_0, m in Q4_1 only
// They lie in groups of up to kQuantRows rows as in gemm.h, a unit being four of them.
#pragma once

#include <utility>

#include "level/gemm.h"
#include "level/interleave.h"

namespace octavo::OCTAVO_LEVEL {

template <QuantFormat F> constexpr int kQuantVectors = F == kQ8_0 ? 8 : 4;
constexpr int quant_zero(QuantFormat format) { return format == kQ4_0 ? 8 : format == kQ8_0 ? 128 : 0; }
constexpr int kQuantFinest = 24;  // the most binary places that a block may be finer than its row

// The bits of the largest size among 32 numbers. As integers, sizes are ordered like numbers, and above them all come
// infinity and what is no number.
inline int32_t largest_size(const float* x) {
    const U16 size = U16::set1(0x7fffffff);
    return reduce_max(max(U16::load(x) & size, U16::load(x + 16) & size));
}
inline int32_t largest_size(const bf16* x) {
    const U16 pairs = U16::load(x), size = U16::set1(0x7fff0000);
    return reduce_max(max(pairs & size, shift_left<16>(pairs) & size));
}

// sums[r] of quants [8 units][R rows], four of them to a unit.
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

// A group of R rows. One that holds an infinity or no number has a scale that is none, and so has every product of it.
template <Storage S, int R>
void quantise_group(QuantFormat format, const char* const* bytes, int width, const QuantRows& to) {
    using T = Element<S>;
    // A block's largest number lies where its exponent will.
    int32_t largest[R] = {};
    for (int r = 0; r < R; ++r)
        for (int block = 0; block < width / 32; ++block) {
            const int32_t size = largest_size(reinterpret_cast<const T*>(bytes[r]) + block * 32);
            to.exponents[block * R + r] = static_cast<uint32_t>(size);
            largest[r] = max(largest[r], size);
        }
    constexpr int32_t kInfinite = 0x7f800000;
    constexpr float kSmallest = 0x1p-90f;  // rows of less are zero: their steps' inverse is not finite
    float whole[R], inverse[R];
    for (int r = 0; r < R; ++r) {
        whole[r] = bits_to_float(static_cast<uint32_t>(largest[r]));
        const bool usual = whole[r] >= kSmallest && largest[r] < kInfinite;
        inverse[r] = usual ? 127.0f / whole[r] : 0.0f;
        to.scales[r] = largest[r] >= kInfinite ? __builtin_nanf("")
                       : usual                 ? whole[r] / (127.0f * (1 << kQuantFinest))
                                               : 0;
    }
    for (int block = 0; block < width / 32; ++block) {
        int8_t quants[R][32];
        const char* rows[R];
        float factor[R];
        uint32_t* exponents = to.exponents + block * R;
        for (int r = 0; r < R; ++r) {
            // The largest k with part 2^k <= whole; of infinite ratios, the exponent is 128.
            const uint32_t ratio = float_bits(whole[r] / bits_to_float(exponents[r])) >> 23 & 0xff;
            const int finer = min(max(static_cast<int>(ratio), 127) - 127, kQuantFinest);
            factor[r] = inverse[r] * bits_to_float(static_cast<uint32_t>(127 + finer) << 23);
            exponents[r] = static_cast<uint32_t>(kQuantFinest - finer) << 23;
        }
        for (int r = 0; r < R; ++r) {
            const T* x = reinterpret_cast<const T*>(bytes[r]) + block * 32;
            round_to_int8(F16::load(x) * F16::set1(factor[r]), quants[r]);
            round_to_int8(F16::load(x + 16) * F16::set1(factor[r]), quants[r] + 16);
            rows[r] = reinterpret_cast<const char*>(quants[r]);
        }
        interleave_rows<R>(rows, 8, to.quants + int64_t{block} * 8 * R);
    }
    // All at the end: sixteen lanes cannot be read before the narrower stores that made them have reached the cache.
    for (int block = 0; block < width / 32; ++block) {
        int32_t sums[R];
        sum_quants(to.quants + int64_t{block} * 8 * R, sums);
        for (int r = 0; r < R; ++r) {
            const float step = bits_to_float((127 << 23) + to.exponents[block * R + r]);
            to.sums[block * R + r] = format == kQ4_1 ? float_bits(static_cast<float>(sums[r]) * step)
                                                     : static_cast<uint32_t>(-quant_zero(format) * sums[r]);
        }
    }
}
template <Storage S>
void quantise_rows(QuantFormat format, const char* const* rows, int count, int width, const QuantRows& to) {
    with_constant<kQuantRows>(count, [&](auto constant) { quantise_group<S, constant>(format, rows, width, to); });
}

// Products of R rows with T tiles `stride` bytes apart. Each broadcast activation meets all T: one port loads, one
// multiplies, and T = 2 keeps the first from holding up the second.
template <QuantFormat F, int R, int T>
inline void quant_tiles(const QuantTask& task, const uint8_t* tile, int64_t stride, int64_t row, Ahead ahead,
                        F16 (*results)[2]) {
    const U16 nibble = U16::set1(0x0f0f0f0f);
    const QuantRows group = task.x.at(row - task.first_row, task.blocks);
    const uint32_t *x = group.quants, *exponents = group.exponents, *sums = group.sums;
    F16 totals[R][T];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t) totals[r][t] = F16::zero();
    for (int block = 0; block < task.blocks; ++block, x += 8 * R, exponents += R, sums += R) {
        U16 dots[R][T];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int t = 0; t < T; ++t) dots[r][t] = F == kQ4_1 ? U16::zero() : U16::set1(sums[r]);
        const uint8_t* vector = tile + (F == kQ4_1 ? 64 : 32);
        if constexpr (R > kQuantRowsThatWait) ahead.ask_l1();
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            // All low nibbles come before the high ones: the second time round they are in L1.
            U16 weights[T];
#pragma GCC unroll 2
            for (int t = 0; t < T; ++t) {
                const uint8_t* from = vector + t * stride + j % kQuantVectors<F> * 64;
                weights[t] = U16::load(from);
                if (R <= kQuantRowsThatWait && j < kQuantVectors<F>) __builtin_prefetch(from + kQuantPrefetch, 0, 3);
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
            scale[t] = F16::load_half(reinterpret_cast<const uint16_t*>(tile + t * stride));
            if constexpr (F == kQ4_1)
                minimum[t] = F16::load_half(reinterpret_cast<const uint16_t*>(tile + t * stride) + 16);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const U16 exponent = U16::set1(exponents[r]);
#pragma GCC unroll 2
            for (int t = 0; t < T; ++t) {
                totals[r][t] = fma(F16::from_int(dots[r][t]), as_float(as_bits(scale[t]) + exponent), totals[r][t]);
                if constexpr (F == kQ4_1) totals[r][t] = fma(minimum[t], as_float(U16::set1(sums[r])), totals[r][t]);
            }
        }
        tile += quant_block_bytes(F);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t) results[r][t] = totals[r][t] * F16::set1(group.scales[r]);
}

// 32 outputs of R rows; the last 16 repeat the first where there are no more (`stride` 0).
template <QuantFormat F, int R>
inline void quant_pair(const QuantTask& task, const uint8_t* tile, int64_t stride, int64_t row, int64_t pair,
                       const Ahead& ahead) {
    ask_to_write_rows<R>(task.out, row, pair);
    F16 results[R][2];
    if constexpr (kQuantTiles == 2 && R > kQuantRowsThatWait) {
        quant_tiles<F, R, 2>(task, tile, stride, row, ahead, results);
    } else {
        quant_tiles<F, R, 1>(task, tile, 0, row, ahead, results);
        F16 others[R][2];
        quant_tiles<F, R, 1>(task, tile + stride, 0, row, ahead, others);
        for (int r = 0; r < R; ++r) results[r][1] = others[r][0];
    }
    store_rows(task.out, row, pair, results);
}

// Row groups [group_begin, group_end) times pairs of tiles [pair_begin, pair_end).
template <QuantFormat F>
void quant_linear(const QuantTask& task, int64_t group_begin, int64_t group_end, int64_t pair_begin, int64_t pair_end) {
    const int64_t tile_bytes = int64_t{task.blocks} * quant_block_bytes(F);
    const Ahead ahead(2 * tile_bytes, task.blocks, group_end - group_begin);
    for (int64_t pair = pair_begin; pair < pair_end; ++pair) {
        const uint8_t* weight = task.weight + pair * 2 * tile_bytes;
        const int64_t stride = pair * 2 + 1 < task.tiles ? tile_bytes : 0;
        for (int64_t group = group_begin; group < group_end; ++group) {
            const int64_t row = task.groups.begin(group), rows = task.groups.begin(group + 1) - row;
            with_constant<kQuantRows>(static_cast<int>(rows), [&](auto count) {
                quant_pair<F, count>(task, weight, stride, row, pair,
                                     ahead.of(weight + 2 * tile_bytes, group - group_begin));
            });
        }
    }
}

}  // namespace octavo::OCTAVO_LEVEL
