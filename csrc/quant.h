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

// 16 outputs of R rows.
template <QuantFormat F, int R>
inline void quant_tile(const QuantTask& task, const uint8_t* tile, int64_t row, F16* results) {
    const U16 nibble = U16::set1(0x0f0f0f0f);
    const uint32_t* x = task.quants + row * task.blocks * 8;
    const float *scales = task.scales + row * task.blocks, *sums = task.sums + row * task.blocks;
    F16 totals[R];
    for (int r = 0; r < R; ++r) totals[r] = F16::zero();
    for (int block = 0; block < task.blocks; ++block, x += 8 * R, scales += R, sums += R) {
        const F16 scale = F16::load_half(reinterpret_cast<const uint16_t*>(tile));
        F16 minimum;
        tile += 32;
        if constexpr (F == kQ4_1) {
            minimum = F16::load_half(reinterpret_cast<const uint16_t*>(tile));
            tile += 32;
        }
        U16 dots[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
            dots[r] = U16::set1(static_cast<uint32_t>(static_cast<int32_t>(sums[r]) * -kQuantZero<F>));
#pragma GCC unroll 8
        for (int j = 0; j < kQuantVectors<F>; ++j, tile += 64) {
            const U16 packed = U16::load(tile);
            if constexpr (R <= kQuantRowsThatWait) __builtin_prefetch(tile + kQuantPrefetch, 0, 3);
            const U16 low = packed & nibble, high = shift_right<4>(packed) & nibble;
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                if constexpr (F == kQ8_0) {
                    dots[r] = dot_bytes(dots[r], packed, U16::set1(x[j * R + r]));
                } else {
                    dots[r] = dot_nibbles(dots[r], low, U16::set1(x[j * R + r]));
                    dots[r] = dot_nibbles(dots[r], high, U16::set1(x[(4 + j) * R + r]));
                }
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const F16 x_scale = F16::set1(scales[r]);
            totals[r] = fma(F16::from_int(dots[r]) * scale, x_scale, totals[r]);
            if constexpr (F == kQ4_1) totals[r] = fma(minimum, F16::set1(sums[r]), totals[r]);
        }
    }
    for (int r = 0; r < R; ++r) results[r] = totals[r];
}

template <QuantFormat F, int R = kQuantRows>
inline void quant_group(int rows, const QuantTask& task, const uint8_t* tile, int64_t row, F16* results) {
    if (rows == R) return quant_tile<F, R>(task, tile, row, results);
    if constexpr (R > 1) quant_group<F, R - 1>(rows, task, tile, row, results);
}

// Row groups [group_begin, group_end) times pairs of tiles [pair_begin, pair_end).
template <QuantFormat F>
void quant_linear(const QuantTask& task, int64_t group_begin, int64_t group_end, int64_t pair_begin, int64_t pair_end) {
    const int64_t tile_bytes = int64_t{task.blocks} * quant_block_bytes(F);
    for (int64_t pair = pair_begin; pair < pair_end; ++pair) {
        const uint8_t* tile = task.weight + pair * 2 * tile_bytes;
        const bool whole = pair * 2 + 1 < task.tiles;
        for (int64_t group = group_begin; group < group_end; ++group) {
            const int64_t row = task.groups.begin(group);
            const int rows = static_cast<int>(task.groups.begin(group + 1) - row);
            F16 low[kQuantRows], high[kQuantRows];
            quant_group<F>(rows, task, tile, row, low);
            if (whole) quant_group<F>(rows, task, tile + tile_bytes, row, high);
            for (int r = 0; r < rows; ++r) store_pair(task.out, row + r, pair, low[r], whole ? high[r] : F16::zero());
        }
    }
}
