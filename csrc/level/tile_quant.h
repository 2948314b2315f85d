// Products of many rows with quantised weights, in bf16 tiles.
//
// A panel of quant.h is dequantised into a bf16 panel, which all the groups of a task read; activations
// stay bf16. For few rows the integer products of quant.h are faster; their results are equal within rounding.
//
// Quants become floats without a conversion: the quant is put into the mantissa of a power of two, 2^7 + q or 2^15 + q,
// and the power is subtracted with the minimum, exactly: (2^7 + q) d + (m - 2^7 d).
#pragma once

#include <utility>

#include "level/quant.h"
#include "level/tile_gemm.h"

namespace octavo::OCTAVO_LEVEL {

template <int Shift> inline U16 shifted(U16 a) {
    if constexpr (Shift > 0)
        return shift_left<Shift>(a);
    else if constexpr (Shift < 0)
        return shift_right<-Shift>(a);
    else
        return a;
}

// The weights of two neighbouring inputs, rounded to the nearest bf16.
inline U16 bf16_pair(F16 even, F16 odd) {
    const U16 half = U16::set1(0x8000);
    return shift_right<16>(as_bits(even) + half) | ((as_bits(odd) + half) & U16::set1(0xffff0000u));
}

template <QuantFormat F, int From, int... Unit>
inline void dequantise_bytes(U16 quads, F16 scale, F16 minimum, char* to, std::integer_sequence<int, Unit...>) {
    // Byte i's quant lies at bit 8 i + From and is shifted to bit 16 (to bit 8 if it has eight bits).
    constexpr int at = F == kQ8_0 ? 8 : 16;
    const U16 mask = U16::set1(F == kQ8_0 ? 0xff00 : 0xf0000), one = U16::set1(F == kQ8_0 ? 0x47000000 : 0x43000000);
    const auto value = [&](U16 bits) { return fma(as_float((bits & mask) | one), scale, minimum); };
    (store(bf16_pair(value(shifted<at - From - 16 * Unit>(quads)), value(shifted<at - From - 16 * Unit - 8>(quads))),
           to + Unit * kPanelOutputs * 4),
     ...);
}

// A block of 32 inputs of a panel's outputs 16 `half` .. -> 16 units of a panel
template <QuantFormat F> inline void dequantise_block(const uint8_t* block, int half, char* to) {
    const auto* scales = reinterpret_cast<const uint16_t*>(block) + half * 16;
    const F16 scale = F16::load_half(scales);
    const F16 whole = F16::set1(F == kQ8_0 ? -32768.0f - 128.0f : F == kQ4_0 ? -128.0f - 8.0f : -128.0f);
    const F16 minimum =
        F == kQ4_1 ? fma(scale, whole, F16::load_half(scales + kPanelOutputs)) : scale * whole;
    const uint8_t* vector = block + (F == kQ4_1 ? 128 : 64) + half * 64;
    constexpr std::integer_sequence<int, 0, 1> units;
    constexpr int64_t quad = 2 * kPanelOutputs * 4;  // two units
#pragma GCC unroll 8
    for (int j = 0; j < kQuantVectors<F>; ++j) {
        const U16 quads = U16::load(vector + j * 128);
        dequantise_bytes<F, 0>(quads, scale, minimum, to + j * quad, units);
        if constexpr (F != kQ8_0) dequantise_bytes<F, 4>(quads, scale, minimum, to + (4 + j) * quad, units);
    }
}

// Dequantises a task's panels and multiplies them.
template <QuantFormat F>
void tile_gemm_quant(const GemmTask& task, int64_t group_begin, int64_t group_end, int64_t panel_begin,
                     int64_t panel_end) {
    const int64_t blocks = task.units / kTileUnits;
    char* const panels[2] = {task.decoded, task.decoded + blocks * kTileStepBytes};
    const auto* weight = reinterpret_cast<const uint8_t*>(task.weight);
    const auto dequantise = [&](int64_t panel, int64_t block, char* to) {
        const uint8_t* from = weight + (panel * blocks + block) * quant_block_bytes(F);
        __builtin_prefetch(from + kQuantPrefetch, 0, 2);
        __builtin_prefetch(from + kQuantPrefetch + quant_block_bytes(F) / 128 * 64, 0, 2);
        dequantise_block<F>(from, 0, to + block * kTileStepBytes);
        dequantise_block<F>(from, 1, to + block * kTileStepBytes + 64);
    };
    TileSums sums;
    configure_tiles(most_rows(task.groups, group_begin, group_end));
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
        char* const now = panels[0];
        for (int64_t block = 0; block < blocks; ++block) dequantise(panel, block, now);
        for (int64_t group = group_begin; group < group_end; ++group)
            tile_group(task, now, nullptr, blocks, group, panel, sums, NothingBeside{});
    }
    release_tiles();
}

}  // namespace octavo::OCTAVO_LEVEL
