// Products of many rows with quantised weights, in bf16 tiles.
//
// A panel of quant_panels.h is dequantised into a bf16 panel, which all the groups of a task read; activations stay
// bf16. For few rows the integer products of quant.h are faster; their results are equal within rounding.
//
// Quants become floats without a conversion: the quant is put into the mantissa of a power of two, 2^7 + q or 2^15 + q,
// and the power is subtracted with the minimum, exactly: (2^7 + q) d + (m - 2^7 d).
#pragma once

#include "level/quant_panels.h"
#include "level/tile_gemm.h"

namespace octavo::OCTAVO_LEVEL {

// The weights of two neighbouring inputs, rounded to the nearest bf16.
inline U16 bf16_pair(F16 even, F16 odd) {
    const U16 half = U16::set1(0x8000);
    return shift_right<16>(as_bits(even) + half) | ((as_bits(odd) + half) & U16::set1(0xffff0000u));
}

// The weights of quad J of sixteen outputs -> two units of a panel
template <WeightFormat F, int J>
inline void dequantise_quad(const StoredSection<F>& section, int half, F16 scale, F16 minimum, char* to) {
    // Byte i's quant is at bit 8 i + from and is shifted to bit 16 (to bit 8 if it has eight bits).
    constexpr QuantLayout layout = quant_layout(F);
    constexpr bool as_stored = layout.high == 0 && layout.codebook == Codebook::none;
    constexpr int bits = layout.quant_bits(), at = bits == 8 ? 8 : 16;
    constexpr int from = as_stored ? J / layout.low * layout.low : 0;
    const U16 quads =
        as_stored ? U16::load(section.planes(half) + J % layout.low * 128) : section.template quad<J>(half);
    const U16 mask = U16::set1(((1u << bits) - 1) << at), one = U16::set1(bits == 8 ? 0x47000000 : 0x43000000);
    const auto value = [&](U16 moved) { return fma(as_float((moved & mask) | one), scale, minimum); };
    store(bf16_pair(value(shifted<at - from>(quads)), value(shifted<at - from - 8>(quads))), to);
    store(bf16_pair(value(shifted<at - from - 16>(quads)), value(shifted<at - from - 24>(quads))),
          to + kPanelOutputs * 4);
}

// A section of a panel's outputs 16 `half` .. -> 16 units of a panel
template <WeightFormat F> inline void dequantise_section(const StoredSection<F>& section, int half, char* to) {
    constexpr QuantLayout layout = quant_layout(F);
    constexpr int kParts = layout.scales_per_section();
    constexpr int64_t quad_bytes = 2 * kPanelOutputs * 4;  // two units
    const F16 whole = F16::set1((layout.quant_bits() == 8 ? -32768.0f : -128.0f) - layout.zero);
    each_constant<kParts>([&](auto part) __attribute__((always_inline)) {
        const F16 scale = section.scale(half, part);
        F16 minimum = scale * whole;
        if constexpr (layout.has_minimums()) minimum = fma(scale, whole, section.minimum(half, part));
        each_constant<8 / kParts>([&](auto index) __attribute__((always_inline)) {
            constexpr int j = part * (8 / kParts) + index;
            dequantise_quad<F, j>(section, half, scale, minimum, to + j * quad_bytes);
        });
    });
}

// Panels of quant_panels.h.
template <WeightFormat F> class QuantPanels {
  public:
    static constexpr bool kDecodes = true;
    explicit QuantPanels(const ProductTask& task) : task_(task) {}
    const char* stored(int64_t panel, int64_t first) const {
        return task_.weight + panel * kLayout.panel_bytes(task_.units / kTileUnits) +
               first / kLayout.sections() * kLayout.block_bytes();
    }
    static int64_t stored_bytes(int64_t steps) {
        return (steps * kLayout.block_bytes() + kLayout.sections() - 1) / kLayout.sections();
    }
    TilePart part(int64_t panel, int64_t first, int64_t end) {
        const QuantPanel from{reinterpret_cast<const uint8_t*>(stored(panel, 0)), nullptr};
        char* to = task_.decoded;
        for (int64_t step = first; step < end; ++step, to += kTileStepBytes) {
            const StoredSection<F> section(from, static_cast<int>(step));
            const uint8_t* ahead = section.bytes() + 2 * kWeightPrefetch;
            __builtin_prefetch(ahead, 0, 2);
            __builtin_prefetch(ahead + kLayout.section_bytes() / 128 * 64, 0, 2);
            dequantise_section<F>(section, 0, to);
            dequantise_section<F>(section, 1, to + 64);
        }
        return {task_.decoded, end - first, nullptr};
    }

  private:
    static constexpr QuantLayout kLayout = quant_layout(F);
    static_assert(kMostTileSteps / 2 % kLayout.sections() == 0);
    const ProductTask& task_;
};

template <WeightFormat F>
void multiply_quants_in_tiles(const ProductTask& task, int64_t group_begin, int64_t group_end, int64_t panel_begin,
                              int64_t panel_end) {
    multiply_in_tiles<QuantPanels<F>>(task, group_begin, group_end, panel_begin, panel_end);
}

}  // namespace octavo::OCTAVO_LEVEL
