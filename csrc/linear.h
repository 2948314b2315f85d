// Matrix products for a few rows. Included inside an instruction set's namespace.
//
// Quantised weights (GGUF's Q4_0, Q4_1 and Q8_0: 32 weights share a scale) are dealt into tiles of 16 outputs, one lane
// each, so that nothing is summed across lanes. One tile, one block of 32 inputs:
//
//     scales   16 x f16 | minimums 16 x f16 (Q4_1) | vectors of 16 lanes x 4 bytes
//
//     Q4   vector j, lane n: bytes 4j .. 4j+3 of output n; low nibbles are inputs 4j .., high ones 16 + 4j ..
//     Q8   vector j, lane n: inputs 4j .. 4j+3 of output n, plus 128
//
// Activations are quantised to int8 in the same groups of 32, as llama.cpp does:
//     sum (d q + m) x  =  dx (d sum(q xq) + m sum(xq)),   m = -8 d in Q4_0, -128 d in Q8_0

template <QuantFormat F> constexpr int kQuantVectors = F == kQ8_0 ? 8 : 4;

// How many outputs ahead of its use a bf16 weight is asked into L2: rows are read four abreast, which the hardware does
// not foresee. Quantised tiles are one straight line, which it does.
constexpr int kPrefetchOutputs = 8;

inline F16 round16(F16 x) {  // to integers, |x| < 2^22
    const F16 magic = F16::set1(12582912.0f);
    return (x + magic) - magic;
}

template <Storage S> void quantise_row(const char* bytes, int width, int8_t* quants, float* scales, float* sums) {
    const auto* x = reinterpret_cast<const Element<S>*>(bytes);
    for (int block = 0; block < width / 32; ++block, x += 32, quants += 32) {
        const F16 a = F16::load(x), b = F16::load(x + 16);
        const F16 size = max(max(a, F16::zero() - a), max(b, F16::zero() - b));
        const float largest = reduce_max(size), scale = largest / 127.0f;
        const F16 inverse = F16::set1(largest > 0.0f ? 127.0f / largest : 0.0f);
        const F16 qa = round16(a * inverse), qb = round16(b * inverse);
        store_int8(qa, quants);
        store_int8(qb, quants + 16);
        scales[block] = scale;
        sums[block] = scale * reduce_add(qa + qb);
    }
}

inline uint32_t load_quad(const int8_t* p) {
    uint32_t quad;
    __builtin_memcpy(&quad, p, 4);
    return quad;
}

// 16 outputs of rows [row, row + R).
template <QuantFormat F, int R>
inline void quant_tile_rows(const QuantLinearTask& task, const uint8_t* tile, int row, F16* results) {
    const U16 nibble = U16::set1(0x0f0f0f0f);
    const int8_t* x = task.quants + int64_t{row} * task.blocks * 32;
    const float *scales = task.scales + int64_t{row} * task.blocks, *sums = task.sums + int64_t{row} * task.blocks;
    for (int r = 0; r < R; ++r) results[r] = F16::zero();
    for (int block = 0; block < task.blocks; ++block) {
        const F16 scale = F16::load_half(reinterpret_cast<const uint16_t*>(tile));
        F16 minimum;
        tile += 32;
        if constexpr (F == kQ4_1) {
            minimum = F16::load_half(reinterpret_cast<const uint16_t*>(tile));
            tile += 32;
        } else {
            minimum = scale * F16::set1(F == kQ4_0 ? -8.0f : -128.0f);
        }
        U16 even[R], odd[R];
        for (int r = 0; r < R; ++r) even[r] = odd[r] = U16::zero();
#pragma GCC unroll 8
        for (int j = 0; j < kQuantVectors<F>; ++j, tile += 64) {
            const U16 packed = U16::load(tile);
            const int8_t* at = x + block * 32 + j * 4;
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r, at += task.blocks * 32) {
                if constexpr (F == kQ8_0) {
                    U16& sum = j % 2 ? odd[r] : even[r];
                    sum = dot_bytes(sum, packed, U16::set1(load_quad(at)));
                } else {
                    even[r] = dot_nibbles(even[r], packed & nibble, U16::set1(load_quad(at)));
                    odd[r] = dot_nibbles(odd[r], shift_right<4>(packed) & nibble, U16::set1(load_quad(at + 16)));
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const int at = r * task.blocks + block;
            results[r] = fma(F16::from_int(even[r] + odd[r]) * scale, F16::set1(scales[at]), results[r]);
            results[r] = fma(minimum, F16::set1(sums[at]), results[r]);
        }
    }
}

template <class T>
inline void store_outputs(const LinearOutput& out, int64_t row, int64_t column, F16 result, int64_t count) {
    if (out.bias) result = result + load_some(reinterpret_cast<const T*>(out.bias) + column, count);
    store_some(result, reinterpret_cast<T*>(out.base + row * out.stride) + column, count);
}
inline void store_outputs(const LinearOutput& out, int64_t row, int64_t column, F16 result) {
    const int64_t count = out.width - column;
    if (out.storage == kBf16) store_outputs<bf16>(out, row, column, result, count);
    else store_outputs<float>(out, row, column, result, count);
}

template <QuantFormat F> void quant_linear(const QuantLinearTask& task, int64_t tile_begin, int64_t tile_end) {
    constexpr int kRowsInCache = 64;  // their activations stay in L2 while the weights pass
    const int64_t tile_bytes = int64_t{task.blocks} * quant_block_bytes(F);
    for (int first = 0; first < task.rows; first += kRowsInCache) {
        const int end = first + kRowsInCache < task.rows ? first + kRowsInCache : task.rows;
        for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
            const uint8_t* weights = task.weight + tile * tile_bytes;
            for (int row = first; row < end;) {
                F16 results[4];
                const int count = end - row >= 4 ? 4 : end - row >= 2 ? 2 : 1;
                if (count == 4) quant_tile_rows<F, 4>(task, weights, row, results);
                else if (count == 2) quant_tile_rows<F, 2>(task, weights, row, results);
                else quant_tile_rows<F, 1>(task, weights, row, results);
                for (int r = 0; r < count; ++r) store_outputs(task.out, row + r, tile * 16, results[r]);
                row += count;
            }
        }
    }
}

// R rows times C outputs of a bfloat16 weight [outputs, inputs] as torch keeps it.
template <int R, int C>
inline void bf16_dots(const Bf16LinearTask& task, int row, int64_t output, float* results) {
    F16 acc[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = F16::zero();
    const char *x = task.x + row * task.x_stride, *w = task.weight + output * task.weight_stride;
    for (int64_t at = 0; at < int64_t{task.inputs} * 2; at += 64) {
        U16 a[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) a[r] = U16::load(x + r * task.x_stride + at);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            const U16 b = U16::load(w + c * task.weight_stride + at);
            __builtin_prefetch(w + (c + kPrefetchOutputs) * task.weight_stride + at, 0, 2);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) acc[r][c] = mac_bf16(acc[r][c], b, a[r]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) results[r * 16 + c] = reduce_add(acc[r][c]);
}

template <int R> inline void bf16_rows(const Bf16LinearTask& task, int row, int64_t output, int64_t count) {
    float results[R * 16] = {};
    int c = 0;
    for (; c + 4 <= count; c += 4) bf16_dots<R, 4>(task, row, output + c, results + c);
    for (; c < count; ++c) bf16_dots<R, 1>(task, row, output + c, results + c);
    for (int r = 0; r < R; ++r) store_outputs(task.out, row + r, output, F16::load(results + r * 16));
}

inline void bf16_linear(const Bf16LinearTask& task, int64_t tile_begin, int64_t tile_end) {
    for (int64_t output = tile_begin * 16; output < tile_end * 16; output += 16) {
        const int64_t count = task.out.width - output < 16 ? task.out.width - output : 16;
        int row = 0;
        for (; row + 4 <= task.rows; row += 4) bf16_rows<4>(task, row, output, count);
        if (row + 2 <= task.rows) {
            bf16_rows<2>(task, row, output, count);
            row += 2;
        }
        if (row < task.rows) bf16_rows<1>(task, row, output, count);
    }
}
