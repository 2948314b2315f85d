// bf16 weights in twelve bits, without loss.
//
// A trained matrix's exponents hardly differ: 15 consecutive ones cover all but a few weights in ten thousand. Four
// bits encode which; sign and mantissa are stored as they are. Weights with other exponents, the escapes, are listed
// separately. Products of a few rows wait for their weights, and get them in three quarters of the time. The panels are
// those of gemm.h:
//
//     two units   | unit 0: 64 x sign and mantissa | unit 1: the same | 64 x two codes: unit 0 low, unit 1 high |
//
// Bytes are in the order that unpacking to 16 bits within 128-bit lanes needs, see compressed_position. Code 0 is
// exponent 0, code c the exponent base + c. Every group of rows decodes a panel again, in registers: the multiplier
// leaves time for it, and writing a decoded panel for the other groups to read would take longer.
#pragma once

#include "level/gemm.h"

namespace octavo::OCTAVO_LEVEL {

#ifndef OCTAVO_DECOMPRESSES
struct ExponentTables {
    const uint8_t* bytes;
};
inline ExponentTables load_tables(const uint8_t* tables) { return {tables}; }
template <int K> inline void decompress_unit(const char* from, const ExponentTables& tables, U16& low, U16& high) {
    alignas(64) uint16_t elements[64];
    for (int element = 0; element < 64; ++element) {
        const int at = compressed_position(element);
        const auto rest = static_cast<uint8_t>(from[K * 64 + at]), codes = static_cast<uint8_t>(from[128 + at]);
        const int code = K == 0 ? codes & 15 : codes >> 4;
        elements[element] =
            static_cast<uint16_t>(((rest & 128) | tables.bytes[code]) << 8 | (rest & 127) | tables.bytes[16 + code]);
    }
    low = U16::load(elements);
    high = U16::load(elements + 32);
}
#endif

// Puts the weights of unit `unit` that codes cannot represent into the vectors `low` and `high`.
[[gnu::always_inline]] inline void put_escapes(const Escape*& escape, uint32_t unit, U16& low, U16& high) {
    alignas(64) uint16_t elements[64];
    store(low, elements);
    store(high, elements + 32);
    for (; escape->unit == unit; ++escape) elements[escape->element] = escape->bits;
    low = U16::load(elements);
    high = U16::load(elements + 32);
}

template <int R, int K>
[[gnu::always_inline]] inline void compressed_unit(const char* panel, const ExponentTables& tables, int unit,
                                              const Escape*& escape, const uint32_t* x, F16 (&acc)[R][2]) {
    U16 low, high;
    decompress_unit<K>(panel, tables, low, high);
    if (escape->unit == static_cast<uint32_t>(unit)) [[unlikely]]
        put_escapes(escape, unit, low, high);
    add_unit<kBf16>(acc, low, high, x);
}

template <int R>
void compressed_panel(const ProductTask& task, const char* panel, int64_t index, int64_t row, PanelPrefetch prefetch) {
    const Escape* escape = task.compressed.escapes + task.compressed.first_escape[index];
    const uint32_t* x = task.x + (row - task.first_row) * task.units;
    const ExponentTables tables = load_tables(task.compressed.tables);
    prefetch_outputs<R>(task.out, row, index);
    F16 acc[R][2];
    OCTAVO_UNROLL for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = F16::zero();
    int unit = 0;
    for (; unit + 1 < task.units; unit += 2, panel += kCompressedPairBytes, x += 2 * R) {
        prefetch.step<R, kCompressedPairBytes / 64>(panel);
        compressed_unit<R, 0>(panel, tables, unit, escape, x, acc);
        compressed_unit<R, 1>(panel, tables, unit + 1, escape, x + R, acc);
    }
    if (unit < task.units) compressed_unit<R, 0>(panel, tables, unit, escape, x, acc);
    store_sums(task.out, row, index, acc);
}

// As `gemm`, with compressed panels.
inline void gemm_compressed(const ProductTask& task, int64_t group_begin, int64_t group_end, int64_t panel_begin,
                       int64_t panel_end) {
    const int64_t pairs = (int64_t{task.units} + 1) / 2;
    each_panel<kGemmRows>(task, group_begin, group_end, panel_begin, panel_end, pairs * kCompressedPairBytes, pairs,
                          [&](auto count, auto... of) { compressed_panel<count>(task, of...); });
}

}  // namespace octavo::OCTAVO_LEVEL
