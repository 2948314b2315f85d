// Matrix products with quantised weights, for any number of rows. Included inside an instruction set's namespace.
//
// GGUF's Q4_0, Q4_1 and Q8_0 (32 weights share a scale) are dealt into tiles of 16 outputs, one lane each, so that
// nothing is summed across lanes. One tile, one block of 32 inputs:
//
//     scales   16 x f16 | minimums 16 x f16 (Q4_1) | vectors of 16 lanes x 4 bytes
//
//     Q4   vector j, lane n: bytes 4j .. 4j+3 of output n; low nibbles are inputs 4j .., high ones 16 + 4j ..
//     Q8   vector j, lane n: inputs 4j .. 4j+3 of output n, plus 128
//
// Activations are quantised to int8 in the same groups of 32, as llama.cpp does, and lie in groups of up to kQuantRows
// rows as in gemm.h, a unit being four of them:
//     sum (d q + m) x  =  dx d (sum(q xq) - z sum(xq)) + dx m sum(xq),   z = 8 in Q4_0, 128 in Q8_0, m in Q4_1 only

template <QuantFormat F> constexpr int kQuantVectors = F == kQ8_0 ? 8 : 4;
template <QuantFormat F> constexpr int kQuantZero = F == kQ4_0 ? 8 : F == kQ8_0 ? 128 : 0;

inline F16 round16(F16 x) {  // to integers, |x| < 2^22
    const F16 magic = F16::set1(12582912.0f);
    return (x + magic) - magic;
}

// Sums are those of the quants, or with `scaled` of what they stand for.
template <Storage S>
void quantise_row(const char* bytes, int width, bool scaled, int8_t* quants, float* scales, float* sums) {
    const auto* x = reinterpret_cast<const Element<S>*>(bytes);
    for (int block = 0; block < width / 32; ++block, x += 32, quants += 32) {
        const F16 a = F16::load(x), b = F16::load(x + 16);
        const F16 size = max(max(a, F16::zero() - a), max(b, F16::zero() - b));
        const float largest = reduce_max(size);
        const F16 inverse = F16::set1(largest > 0.0f ? 127.0f / largest : 0.0f);
        const F16 qa = round16(a * inverse), qb = round16(b * inverse);
        store_int8(qa, quants);
        store_int8(qb, quants + 16);
        scales[block] = largest / 127.0f;
        sums[block] = reduce_add(qa + qb) * (scaled ? scales[block] : 1.0f);
    }
}

// Products of R rows with T tiles `stride` bytes apart. Each broadcast activation meets all T: one port loads, one
// multiplies, and T = 2 keeps the first from holding up the second.
template <QuantFormat F, int R, int T>
inline void quant_tiles(const QuantTask& task, const uint8_t* tile, int64_t stride, int64_t row, int64_t ahead,
                        F16 (*results)[2]) {
    const U16 nibble = U16::set1(0x0f0f0f0f);
    const uint32_t* x = task.quants + row * task.blocks * 8;
    const float *scales = task.scales + row * task.blocks, *sums = task.sums + row * task.blocks;
    F16 totals[R][T];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t) totals[r][t] = F16::zero();
    for (int block = 0; block < task.blocks; ++block, x += 8 * R, scales += R, sums += R) {
        U16 dots[R][T];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int t = 0; t < T; ++t)
                dots[r][t] = U16::set1(static_cast<uint32_t>(static_cast<int32_t>(sums[r]) * -kQuantZero<F>));
        const uint8_t* vector = tile + (F == kQ4_1 ? 64 : 32);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            // All low nibbles come before the high ones: the second time round they are in L1.
            U16 weights[T];
#pragma GCC unroll 2
            for (int t = 0; t < T; ++t) {
                const uint8_t* from = vector + t * stride + j % kQuantVectors<F> * 64;
                weights[t] = U16::load(from);
                if (j < kQuantVectors<F>) __builtin_prefetch(from + ahead, 0, 3);
                if constexpr (F != kQ8_0) weights[t] = (j < 4 ? weights[t] : shift_right<4>(weights[t])) & nibble;
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const U16 broadcast = U16::set1(x[j * R + r]);
#pragma GCC unroll 2
                for (int t = 0; t < T; ++t)
                    if constexpr (F == kQ8_0) dots[r][t] = dot_bytes(dots[r][t], weights[t], broadcast);
                    else dots[r][t] = dot_nibbles(dots[r][t], weights[t], broadcast);
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
            const F16 x_scale = F16::set1(scales[r]);
#pragma GCC unroll 2
            for (int t = 0; t < T; ++t) {
                totals[r][t] = fma(F16::from_int(dots[r][t]) * scale[t], x_scale, totals[r][t]);
                if constexpr (F == kQ4_1) totals[r][t] = fma(minimum[t], F16::set1(sums[r]), totals[r][t]);
            }
        }
        tile += quant_block_bytes(F);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t) results[r][t] = totals[r][t];
}

// 32 outputs of up to kQuantRows rows; the last 16 repeat the first where there are no more (`stride` 0).
template <QuantFormat F, int R = kQuantRows>
inline void quant_group(int rows, const QuantTask& task, const uint8_t* tile, int64_t stride, int64_t row, int64_t pair,
                        int64_t ahead) {
    if (rows == R) {
        if constexpr (R <= kQuantRowsThatWait) ahead = kQuantPrefetch;
        F16 results[R][2];
        if constexpr (kQuantTiles == 2 && R > kQuantRowsThatWait) {
            quant_tiles<F, R, 2>(task, tile, stride, row, ahead, results);
        } else {
            quant_tiles<F, R, 1>(task, tile, 0, row, ahead, results);
            F16 others[R][2];
            quant_tiles<F, R, 1>(task, tile + stride, 0, row, ahead, others);
            for (int r = 0; r < R; ++r) results[r][1] = others[r][0];
        }
        return store_rows(task.out, row, pair, results);
    }
    if constexpr (R > 1) quant_group<F, R - 1>(rows, task, tile, stride, row, pair, ahead);
}

// Row groups [group_begin, group_end) times pairs of tiles [pair_begin, pair_end).
template <QuantFormat F>
void quant_linear(const QuantTask& task, int64_t group_begin, int64_t group_end, int64_t pair_begin, int64_t pair_end) {
    const int64_t tile_bytes = int64_t{task.blocks} * quant_block_bytes(F);
    for (int64_t pair = pair_begin; pair < pair_end; ++pair) {
        const uint8_t* weight = task.weight + pair * 2 * tile_bytes;
        const int64_t stride = pair * 2 + 1 < task.tiles ? tile_bytes : 0;
        for (int64_t group = group_begin; group < group_end; ++group) {
            const int64_t row = task.groups.begin(group), rows = task.groups.begin(group + 1) - row;
            quant_group<F>(static_cast<int>(rows), task, weight, stride, row, pair,
                           group + 1 == group_end ? 2 * tile_bytes : 0);
        }
    }
}
