// Panels of quantised weights: as they are stored, and as they are decoded for several groups of rows.
//
// GGUF's formats are rearranged into panels of 32 outputs, two vectors of 16 lanes, so that nothing is summed across
// lanes; the last panel is padded with zeros. A block has a header and sections of 32 inputs, see QuantLayout:
//
//     | scales 32 x f16 | minimums 32 x f16 | section 0 | section 1 | ..
//     | factors 2 x 32 x u8 | low plane | high plane |                                  a section, see Factors
//     | scales 32 x f16 | factors 32 x u8 of section 0 | of section 1 | ..              a header with all factors
//     | vector 0: outputs 0 .. 15 | outputs 16 .. 31 | vector 1: .. | ..                a plane: as many as it has bits
//
// A section's quants are eight quads, of inputs 4j .. 4j+3. In a plane of B bits quad j is in vector j % B, from bit
// j / B * B of each byte on. A quant's lower bits are in the low plane, its others in the high one:
//
//     Q4, low plane   vector j, lane n: low nibbles are inputs 4j .. of output n, high ones 16 + 4j ..
//     Q5, high plane  lane n: bit j of byte i is the fifth bit of input 4j + i
//     Q8, low plane   vector j, lane n: inputs 4j .. 4j+3 of output n, plus 128
//
// Of a format with a codebook these are codes, which a table of 16 bytes turns into quants:
//
//     IQ4      code c is quant kCodebooks[iq4][c] + 128      (1 .. 241)
//     MXFP4    code c is quant kCodebooks[e2m1][c] + 12      (0 .. 24)
//
// A section begins where a cache line does, no vector crosses one, and a panel is read from its beginning to its end.
//
// In a product of many rows each group of rows reads the panel. The first one stores what it decodes, and the others
// need no shifts, masks, tables or conversions:
//
//     | quad 0: 32 x 4 x u8 | .. | quad 7 | scales 32 x f32 | minimums 32 x f32 |     a section: one or two of each
#pragma once

#include "level/simd/types.h"
#include "level/with_constant.h"
#include "product_task.h"

namespace octavo::OCTAVO_LEVEL {

template <int Shift> inline U16 shifted(U16 a) {
    if constexpr (Shift > 0)
        return shift_left<Shift>(a);
    else if constexpr (Shift < 0)
        return shift_right<-Shift>(a);
    else
        return a;
}

// Quad J's bits of a plane, moved to bit To of each byte.
template <int Bits, int J, int To> [[gnu::always_inline]] inline U16 plane_bits(const uint8_t* plane) {
    const U16 bits = U16::load(plane + J % Bits * 128);
    if constexpr (Bits == 8) return bits;
    return shifted<To - J / Bits * Bits>(bits) & U16::set1((0x01010101u * ((1u << Bits) - 1)) << To);
}
// The quants of a format's codes.
template <WeightFormat F> struct CodeTable {
    alignas(16) uint8_t quants[16];
    constexpr CodeTable() : quants() {
        constexpr QuantLayout layout = quant_layout(F);
        for (int code = 0; code < 16; ++code)
            quants[code] = static_cast<uint8_t>(kCodebooks[static_cast<int>(layout.codebook)][code] + layout.zero);
    }
};
template <WeightFormat F> constexpr CodeTable<F> kCodeTable;

// Where a panel is stored, and where it is decoded.
struct QuantPanel {
    const uint8_t* stored;
    char* decoded;
};

// A section of a panel as it is stored.
template <WeightFormat F> class StoredSection {
  public:
    static constexpr QuantLayout kLayout = quant_layout(F);
    static constexpr bool kFromMemory = true;  // few rows wait for it
    StoredSection(const QuantPanel& panel, int section) : in_block_(section % kLayout.sections()) {
        header_ = panel.stored + section / kLayout.sections() * kLayout.block_bytes();
        bytes_ = header_ + kLayout.header_bytes() + in_block_ * kLayout.section_bytes();
        factors_ = kLayout.factors_of(header_, in_block_, bytes_);
    }
    // The quants of quad J of the outputs of half a panel.
    template <int J> [[gnu::always_inline]] U16 quad(int half) const {
        const U16 low = plane_bits<kLayout.low, J, 0>(planes(half));
        if constexpr (kLayout.codebook != Codebook::none)
            return look_up(kCodeTable<F>.quants, low);
        else if constexpr (kLayout.high == 0)
            return low;
        else
            return low | plane_bits<kLayout.high, J, kLayout.low>(planes(half) + kLayout.low * 128);
    }
    // The block's scale and minimum of these outputs, times their factors for the inputs of scale `part`.
    [[gnu::always_inline]] F16 scale(int half, int part) const {
        const uint8_t* factors = factors_ + part * kPanelOutputs + half * 16;
        if constexpr (kFactors == Factors::exponent) return as_float(shift_left<23>(widen(factors)));
        const F16 scale = F16::load_half(halves(half));
        if constexpr (kFactors == Factors::none) return scale;
        if constexpr (kFactors == Factors::two_scales || kFactors == Factors::one_scale)
            return scale * F16::from_int(widen_signed(factors));
        if constexpr (kFactors == Factors::two_pairs) return scale * F16::from_int(widen(factors) & U16::set1(15));
        return scale * F16::from_int(widen(factors));
    }
    [[gnu::always_inline]] F16 minimum(int half, int part) const {
        const F16 minimum = F16::load_half(halves(half) + kPanelOutputs);
        if constexpr (kFactors == Factors::none) return minimum;
        const uint8_t* factors = factors_ + (kFactors == Factors::two_pairs ? part : 1) * kPanelOutputs + half * 16;
        const U16 wide = widen(factors);
        return minimum * F16::from_int(kFactors == Factors::two_pairs ? shift_right<4>(wide) : wide);
    }
    // Prefetches a later section, or a part of it and the header of its block.
    [[gnu::always_inline]] void prefetch() const {
        for (int line = 0; in_block_ == 0 && line < kLayout.header_bytes(); line += 64)
            __builtin_prefetch(header_ + kWeightPrefetch + line, 0, 3);
        constexpr int kLines = kLayout.section_bytes() / 64;
        OCTAVO_UNROLL for (int line = 0; line < kLines; ++line)
            __builtin_prefetch(bytes_ + kWeightPrefetch + line * 64, 0, 3);
    }
    const uint8_t* bytes() const { return bytes_; }
    const uint8_t* planes(int half) const { return bytes_ + kLayout.planes_at() + half * 64; }

  private:
    static constexpr Factors kFactors = kLayout.factors;
    const uint16_t* halves(int half) const { return reinterpret_cast<const uint16_t*>(header_) + half * 16; }

    int in_block_;
    const uint8_t *header_, *bytes_, *factors_;
};

// Whether all groups of rows but the first read panels of a format decoded. Costly formats are those with two scales a
// section, or with a codebook and a factor for each section.
template <WeightFormat F> constexpr bool kDecodesOnce = [] {
    constexpr QuantLayout layout = quant_layout(F);
    if (layout.low == 8 || kDecodedFormats == DecodedFormats::none) return false;
    return kDecodedFormats == DecodedFormats::all || layout.scales_per_section() == 2 || layout.factors_in_header();
}();

// A section of a panel that has been decoded.
template <QuantLayout Layout> class DecodedSection {
  public:
    static constexpr QuantLayout kLayout = Layout;
    static constexpr bool kFromMemory = false;
    DecodedSection(const QuantPanel& panel, int section) : bytes_(panel.decoded + section * kLayout.decoded_bytes()) {}
    template <int J> U16 quad(int half) const { return U16::load(bytes_ + J * 128 + half * 64); }
    F16 scale(int half, int part) const { return floats(half, part); }
    F16 minimum(int half, int part) const { return floats(half, kLayout.scales_per_section() + part); }

  private:
    F16 floats(int half, int index) const {
        return F16::load(reinterpret_cast<const float*>(bytes_ + (8 + index) * 128 + half * 64));
    }
    const char* bytes_;
};

// A section that is decoded when it is read, for rows to come.
template <WeightFormat F> class DecodingSection {
  public:
    static constexpr QuantLayout kLayout = quant_layout(F);
    static constexpr bool kFromMemory = false;
    DecodingSection(const QuantPanel& panel, int section)
        : section_(panel, section), to_(panel.decoded + section * kLayout.decoded_bytes()) {}
    template <int J> [[gnu::always_inline]] U16 quad(int half) const {
        const U16 quants = section_.template quad<J>(half);
        store(quants, to_ + J * 128 + half * 64);
        return quants;
    }
    [[gnu::always_inline]] F16 scale(int half, int part) const { return keep(section_.scale(half, part), half, part); }
    [[gnu::always_inline]] F16 minimum(int half, int part) const {
        return keep(section_.minimum(half, part), half, kLayout.scales_per_section() + part);
    }

  private:
    F16 keep(F16 x, int half, int index) const {
        x.store(reinterpret_cast<float*>(to_ + (8 + index) * 128 + half * 64));
        return x;
    }
    StoredSection<F> section_;
    char* to_;
};

}  // namespace octavo::OCTAVO_LEVEL
