// Matrix products with quantised weights, for any number of rows.
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
// Activations are quantised to int8: a section of a row has the scale s, 1/127 of its largest magnitude, and is the
// integers xq times s:
//     sum (d (q - z) + m) x  =  s d (sum(q xq) - z sum(xq)) + m s sum(xq)
// where z is the format's zero, and a format has either z or minimums m. Factors multiply d and m; where they are of 16
// inputs each, a section has two sums. The integers are in groups of up to kQuantRows rows as in gemm.h, four
// to a unit.
//
// An outlier makes the rounding of the 32 numbers that share its scale coarse. A section whose squared scale is more
// than 0.34 of the sum of its row's, and than twice their mean, is therefore multiplied a second time, with what
// rounding took from it, as int8 with a scale of its own. A row has at most two such remainders. They follow a group's
// sections; rows of the group that have none there multiply zeros: a row's bits do not depend on the others.
//     | section 0 | section 1 | .. | last section | remainder of section 6 | of section 12 |
#pragma once

#include "level/gemm.h"
#include "level/interleave.h"
#include "level/row_pairs.h"

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

// The quants of quad J of sixteen outputs.
template <WeightFormat F, int J> [[gnu::always_inline]] inline U16 quad(const uint8_t* planes) {
    constexpr QuantLayout layout = quant_layout(F);
    const U16 low = plane_bits<layout.low, J, 0>(planes);
    if constexpr (layout.codebook != Codebook::none)
        return look_up(kCodeTable<F>.quants, low);
    else if constexpr (layout.high == 0)
        return low;
    else
        return low | plane_bits<layout.high, J, layout.low>(planes + layout.low * 128);
}

// A block's scale and minimum of the outputs of half a section, times their factors for the inputs of scale `part`.
// `halves` are the half's numbers in the block's header, `at` the section's factors.
template <WeightFormat F>
[[gnu::always_inline]] inline F16 section_scale(const uint16_t* halves, const uint8_t* at, int half, int part) {
    constexpr Factors kind = quant_layout(F).factors;
    const uint8_t* factors = at + part * kPanelOutputs + half * 16;
    if constexpr (kind == Factors::exponent) return as_float(shift_left<23>(widen(factors)));
    const F16 scale = F16::load_half(halves);
    if constexpr (kind == Factors::none) return scale;
    if constexpr (kind == Factors::two_scales || kind == Factors::one_scale)
        return scale * F16::from_int(widen_signed(factors));
    if constexpr (kind == Factors::two_pairs) return scale * F16::from_int(widen(factors) & U16::set1(15));
    return scale * F16::from_int(widen(factors));
}
template <WeightFormat F>
[[gnu::always_inline]] inline F16 section_minimum(const uint16_t* halves, const uint8_t* at, int half, int part) {
    constexpr Factors kind = quant_layout(F).factors;
    const F16 minimum = F16::load_half(halves + kPanelOutputs);
    if constexpr (kind == Factors::none) return minimum;
    const uint8_t* factors = at + (kind == Factors::two_pairs ? part : 1) * kPanelOutputs + half * 16;
    const U16 wide = widen(factors);
    return minimum * F16::from_int(kind == Factors::two_pairs ? shift_right<4>(wide) : wide);
}

// Without a single instruction for it, products of bytes are first summed in 16 bits, two sums to a lane, as long as
// these cannot overflow: a quant times an activation is at most 127 (2^bits - 1). Quants of eight bits are multiplied
// as signed numbers, without their zero.
#ifdef OCTAVO_SUMS_WORDS
constexpr bool kSumsWords = true;
#else
constexpr bool kSumsWords = false;
inline void keep_in_memory(F16&) {}
inline U16 dot_words(U16 words, U16, U16) { return words; }
inline U16 add_words(U16 acc, U16) { return acc; }
inline U16 dot_signed(U16 acc, U16 a, U16 b) { return dot_bytes(acc, a ^ U16::set1(0x80808080u), b); }
#endif
// How many of the quads that share a scale are summed in words; 1: none.
template <WeightFormat F> constexpr int quads_in_words() {
    constexpr QuantLayout layout = quant_layout(F);
    int quads = 8 / layout.scales_per_section();
    while (quads > 1 && (!kSumsWords || quads * 2 * 127 * ((1 << layout.quant_bits()) - 1) > 32767)) quads /= 2;
    return quads;
}
template <WeightFormat F> [[gnu::always_inline]] inline U16 dot_quad(U16 acc, U16 weights, U16 x) {
    if constexpr (quant_layout(F).quant_bits() < 8) return dot_small(acc, weights, x);
    if constexpr (kSumsWords) return dot_signed(acc, weights ^ U16::set1(0x80808080u), x);
    return dot_bytes(acc, weights, x);
}

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

static_assert(kQuantRows <= kMostQuantRows);

// Appends the remainders of a group of R rows, and returns their number.
template <Storage S, int R>
int append_remainders(const char* const* bytes, int units, const QuantRows& to) {
    float limits[R] = {};
    for (int section = 0; section < units; ++section)
        for (int r = 0; r < R; ++r) limits[r] += to.scales[section * R + r] * to.scales[section * R + r];
    for (int r = 0; r < R; ++r) limits[r] *= units < 6 ? 2.0f / static_cast<float>(units) : 0.34f;
    int count = 0;
    for (int section = 0; section < units; ++section) {
        const float* steps = to.scales + section * R;
        bool any = false;
        for (int r = 0; r < R; ++r) any |= steps[r] * steps[r] > limits[r];
        if (!any) continue;
        const int at = units + count;
        int8_t quants[R][32] = {};
        const char* rows[R];
        for (int r = 0; r < R; ++r) {
            rows[r] = reinterpret_cast<const char*>(quants[r]);
            to.scales[at * R + r] = 0.0f;
            if (!(steps[r] * steps[r] > limits[r])) continue;
            const auto* x = reinterpret_cast<const Element<S>*>(bytes[r]) + section * 32;
            const F16 inverse = F16::set1(127.0f) / F16::set1(__builtin_bit_cast(float, largest_size(x)));
            alignas(64) float rest[32];
            for (int half = 0; half < 32; half += 16) {
                round_to_int8(F16::load(x + half) * inverse, quants[r]);
                const F16 rounded = F16::from_int(widen_signed(reinterpret_cast<const uint8_t*>(quants[r])));
                fma(rounded, F16::set1(-steps[r]), F16::load(x + half)).store(rest + half);
            }
            const int32_t size = largest_size(rest);
            const float largest = is_usual_size(size) ? __builtin_bit_cast(float, size) : 0.0f;
            to.scales[at * R + r] = largest / 127.0f;
            const F16 finer = F16::set1(largest > 0.0f ? 127.0f / largest : 0.0f);
            round_to_int8(F16::load(rest) * finer, quants[r]);
            round_to_int8(F16::load(rest + 16) * finer, quants[r] + 16);
        }
        interleave_rows<R>(rows, 8, to.quants + int64_t{at} * 8 * R);
        to.remainders[++count] = section;
    }
    return to.remainders[0] = count;
}

// Sums the quants of a group of R rows, at the end: a load of sixteen lanes waits until the narrower stores of them
// have reached the cache. No load reaches beyond the group's room, where another thread may write.
template <int R> void sum_quants(const QuantLayout& layout, int sections, const QuantRows& to) {
    const int parts = layout.scales_per_section(), units = 8 / parts;
    for (int first = 0; first < sections; first += kQuantChunk) {
        const int chunk = min(sections - first, kQuantChunk), count = chunk * 8 * R;
        alignas(64) int32_t quads[kQuantChunk * 8 * R + 15];  // sums of four
        for (int i = 0; i < count; i += 16) {
            const int at = i + 16 <= count || count < 16 ? i : count - 16;
            store(dot_small(U16::zero(), U16::set1(0x01010101), U16::load(to.quants + first * 8 * R + at)), quads + at);
        }
        for (int part = 0; part < chunk * parts; ++part) {
            U16 sum = U16::zero();
            for (int u = 0; u < units; ++u) sum = sum + U16::load(quads + (part * units + u) * R);
            alignas(64) int32_t lanes[16];
            store(sum, lanes);
            const float* scales = to.scales + (first + part / parts) * R;
            for (int r = 0; r < R; ++r)
                to.sums[(first * parts + part) * R + r] = layout.has_minimums()
                                                              ? float_bits(static_cast<float>(lanes[r]) * scales[r])
                                                              : static_cast<uint32_t>(-layout.zero * lanes[r]);
        }
    }
}

// Quantises a group of R rows.
template <Storage S, int R>
void quantise_group(const QuantLayout& layout, const char* const* bytes, int width, const QuantRows& to) {
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
    const int sections = width / 32 + append_remainders<S, R>(bytes, width / 32, to);
    sum_quants<R>(layout, sections, to);
}
template <Storage S>
void quantise_rows(const QuantLayout& layout, const char* const* rows, int count, int width, const QuantRows& to) {
    with_constant<kQuantRows>(count, [&](auto constant) { quantise_group<S, constant>(layout, rows, width, to); });
}

// The integer sums of R rows with T halves of a section, 16 outputs each, for the inputs that share the scale `Part`.
// A broadcast activation is used for all halves: one port loads, one multiplies.
template <WeightFormat F, int R, int T, int Part>
[[gnu::always_inline]] inline void dot_part(const uint8_t* planes, const uint32_t* x, const uint32_t* sums,
                                            U16 (&dots)[R][T]) {
    constexpr QuantLayout layout = quant_layout(F);
    constexpr int kQuads = 8 / layout.scales_per_section(), kTogether = quads_in_words<F>();
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL for (int t = 0; t < T; ++t)
            dots[r][t] = layout.has_minimums() || (kSumsWords && layout.quant_bits() == 8) ? U16::zero()
                                                                                           : U16::set1(sums[r]);
    if constexpr (kInPairs<R>) {
        join_pairs(dots);
        each_constant<kQuads / 2>([&](auto pair) __attribute__((always_inline)) {
            constexpr int j = Part * kQuads + pair * 2;
            add_pairs(dots, quad<F, j>(planes), quad<F, j + 1>(planes), x + j * R);
        });
        return split_pairs(dots);
    }
    each_constant<kQuads / kTogether>([&](auto chunk) __attribute__((always_inline)) {
        U16 words[R][T];
        OCTAVO_UNROLL for (int r = 0; r < R; ++r)
            OCTAVO_UNROLL for (int t = 0; t < T; ++t) words[r][t] = U16::zero();
        each_constant<kTogether>([&](auto index) __attribute__((always_inline)) {
            constexpr int j = Part * kQuads + chunk * kTogether + index;
            U16 weights[T];
            OCTAVO_UNROLL for (int t = 0; t < T; ++t) weights[t] = quad<F, j>(planes + t * 64);
            OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
                const U16 broadcast = U16::set1(x[j * R + r]);
                OCTAVO_UNROLL for (int t = 0; t < T; ++t)
                    if constexpr (kTogether > 1)
                        words[r][t] = dot_words(words[r][t], weights[t], broadcast);
                    else
                        dots[r][t] = dot_quad<F>(dots[r][t], weights[t], broadcast);
            }
        });
        if constexpr (kTogether > 1)
            OCTAVO_UNROLL for (int r = 0; r < R; ++r)
                OCTAVO_UNROLL for (int t = 0; t < T; ++t) dots[r][t] = add_words(dots[r][t], words[r][t]);
    });
}

// Adds the products of R rows with T halves of a section, from `first` on, to totals[row][half].
template <WeightFormat F, int R, int T, int Part>
[[gnu::always_inline]] inline void add_part(const uint16_t* header, const uint8_t* factors, const uint8_t* planes,
                                            int first, const uint32_t* x, const float* steps, const uint32_t* sums,
                                            F16 (&totals)[R][2]) {
    constexpr QuantLayout layout = quant_layout(F);
    U16 dots[R][T];
    dot_part<F, R, T, Part>(planes + first * 64, x, sums, dots);
    F16 scale[T], minimum[T];
    OCTAVO_UNROLL for (int t = 0; t < T; ++t) {
        scale[t] = section_scale<F>(header + (first + t) * 16, factors, first + t, Part);
        if constexpr (layout.has_minimums())
            minimum[t] = section_minimum<F>(header + (first + t) * 16, factors, first + t, Part);
    }
    OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
        const F16 step = F16::set1(steps[r]);
        OCTAVO_UNROLL for (int t = 0; t < T; ++t) {
            F16& total = totals[r][first + t];
            total = fma(F16::from_int(dots[r][t]), scale[t] * step, total);
            if constexpr (layout.has_minimums()) total = fma(minimum[t], as_float(U16::set1(sums[r])), total);
            if constexpr (kSumsWords) keep_in_memory(total);
        }
    }
}

// 32 outputs of R rows. Where there are too few registers for the sums of both halves of a panel, a section's halves
// follow each other, so that its lines are read once.
template <WeightFormat F, int R>
[[gnu::noinline]] void quant_panel(const ProductTask& task, const char* weight, int64_t index, int64_t row,
                                   PanelPrefetch prefetch) {
    constexpr QuantLayout layout = quant_layout(F);
    constexpr int kParts = layout.scales_per_section(), kTogether = R <= kQuantRowsOfBothHalves ? 2 : 1;
    constexpr int kLines = layout.section_bytes() / 64;
    prefetch_outputs<R>(task.out, row, index);
    const auto* panel = reinterpret_cast<const uint8_t*>(weight);
    const QuantRows group = task.quants.at(row - task.first_row, task.units, kParts);
    const uint32_t *x = group.quants, *sums = group.sums;
    const float* steps = group.scales;
    F16 totals[R][2];
    OCTAVO_UNROLL for (int r = 0; r < R; ++r) totals[r][0] = totals[r][1] = F16::zero();
    for (int step = 0; step < task.units + group.remainders[0]; ++step, sums += kParts * R, x += 8 * R, steps += R) {
        const int section = step < task.units ? step : group.remainders[1 + step - task.units];
        const int in_block = section % layout.sections();
        const uint8_t* header = panel + section / layout.sections() * layout.block_bytes();
        const uint8_t* at = header + layout.header_bytes() + in_block * layout.section_bytes();
        const uint8_t* factors = layout.factors_of(header, in_block, at);
        if constexpr (R > kQuantRowsThatWait) {
            prefetch.to_l1();
        } else {
            for (int line = 0; in_block == 0 && line < layout.header_bytes(); line += 64)
                __builtin_prefetch(header + kQuantPrefetch + line, 0, 3);
            OCTAVO_UNROLL for (int line = 0; line < kLines; ++line)
                __builtin_prefetch(at + kQuantPrefetch + line * 64, 0, 3);
        }
#pragma GCC unroll 1
        for (int first = 0; first < 2; first += kTogether)
            each_constant<kParts>([&](auto part) __attribute__((always_inline)) {
                add_part<F, R, kTogether, part>(reinterpret_cast<const uint16_t*>(header), factors,
                                                at + layout.planes_at(), first, x, steps, sums + part * R, totals);
            });
    }
    store_sums(task.out, row, index, totals);
}

template <WeightFormat F>
void quant_linear(const ProductTask& task, int64_t group_begin, int64_t group_end, int64_t panel_begin,
                  int64_t panel_end) {
    constexpr QuantLayout layout = quant_layout(F);
    each_panel<kQuantRows>(task, group_begin, group_end, panel_begin, panel_end,
                           layout.panel_bytes(task.units), task.units,
                           [&](auto count, auto... of) { quant_panel<F, count>(task, of...); });
}

}  // namespace octavo::OCTAVO_LEVEL
