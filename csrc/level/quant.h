// Matrix products with the quantised weights of quant_panels.h, for any number of rows.
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
#include "level/quant_panels.h"
#include "level/row_pairs.h"

namespace octavo::OCTAVO_LEVEL {

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
constexpr int quads_in_words(const QuantLayout& layout) {
    int quads = 8 / layout.scales_per_section();
    while (quads > 1 && (!kSumsWords || quads * 2 * 127 * ((1 << layout.quant_bits()) - 1) > 32767)) quads /= 2;
    return quads;
}
template <int Bits> [[gnu::always_inline]] inline U16 dot_quad(U16 acc, U16 weights, U16 x) {
    if constexpr (Bits < 8) return dot_small(acc, weights, x);
    if constexpr (kSumsWords) return dot_signed(acc, weights ^ U16::set1(0x80808080u), x);
    return dot_bytes(acc, weights, x);
}

// What differs between decoded panels: formats share the products with them.
template <WeightFormat F> constexpr QuantLayout kDecodedLayout = [] {
    constexpr QuantLayout layout = quant_layout(F);
    constexpr int bits = layout.quant_bits();
    return QuantLayout{0, 0, kSumsWords || bits == 8 ? bits : 7, 0, layout.has_minimums() ? 2 : 1,
                       layout.scales_per_section() == 2 ? Factors::two_scales : Factors::none, 0};
}();

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
template <class Section, int R, int T, int Part>
[[gnu::always_inline]] inline void dot_part(const Section& section, int first, const uint32_t* x, const uint32_t* sums,
                                            U16 (&dots)[R][T]) {
    constexpr QuantLayout layout = Section::kLayout;
    constexpr int kQuads = 8 / layout.scales_per_section(), kTogether = quads_in_words(layout);
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL for (int t = 0; t < T; ++t)
            dots[r][t] = layout.has_minimums() || (kSumsWords && layout.quant_bits() == 8) ? U16::zero()
                                                                                           : U16::set1(sums[r]);
    if constexpr (kInPairs<R>) {
        join_pairs(dots);
        each_constant<kQuads / 2>([&](auto pair) __attribute__((always_inline)) {
            constexpr int j = Part * kQuads + pair * 2;
            add_pairs(dots, section.template quad<j>(first), section.template quad<j + 1>(first), x + j * R);
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
            OCTAVO_UNROLL for (int t = 0; t < T; ++t) weights[t] = section.template quad<j>(first + t);
            OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
                const U16 broadcast = U16::set1(x[j * R + r]);
                OCTAVO_UNROLL for (int t = 0; t < T; ++t)
                    if constexpr (kTogether > 1)
                        words[r][t] = dot_words(words[r][t], weights[t], broadcast);
                    else
                        dots[r][t] = dot_quad<layout.quant_bits()>(dots[r][t], weights[t], broadcast);
            }
        });
        if constexpr (kTogether > 1)
            OCTAVO_UNROLL for (int r = 0; r < R; ++r)
                OCTAVO_UNROLL for (int t = 0; t < T; ++t) dots[r][t] = add_words(dots[r][t], words[r][t]);
    });
}

// Adds the products of R rows with T halves of a section, from `first` on, to totals[row][half].
template <class Section, int R, int T, int Part>
[[gnu::always_inline]] inline void add_part(const Section& section, int first, const uint32_t* x, const float* steps,
                                            const uint32_t* sums, F16 (&totals)[R][2]) {
    U16 dots[R][T];
    dot_part<Section, R, T, Part>(section, first, x, sums, dots);
    F16 scale[T], minimum[T];
    OCTAVO_UNROLL for (int t = 0; t < T; ++t) {
        scale[t] = section.scale(first + t, Part);
        if constexpr (Section::kLayout.has_minimums()) minimum[t] = section.minimum(first + t, Part);
    }
    OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
        const F16 step = F16::set1(steps[r]);
        OCTAVO_UNROLL for (int t = 0; t < T; ++t) {
            F16& total = totals[r][first + t];
            total = fma(F16::from_int(dots[r][t]), scale[t] * step, total);
            if constexpr (Section::kLayout.has_minimums())
                total = fma(minimum[t], as_float(U16::set1(sums[r])), total);
            if constexpr (kSumsWords) keep_in_memory(total);
        }
    }
}

// 32 outputs of R rows. Where there are too few registers for the sums of both halves of a panel, a section's halves
// follow each other, so that its lines are read once.
template <class Section, int R>
[[gnu::noinline]] void quant_panel(const ProductTask& task, const char* weight, int64_t index, int64_t row,
                                   PanelPrefetch prefetch) {
    constexpr QuantLayout layout = Section::kLayout;
    constexpr int kParts = layout.scales_per_section(), kTogether = R <= kQuantRowsOfBothHalves ? 2 : 1;
    constexpr bool kWaits = Section::kFromMemory && R <= kQuantRowsThatWait;
    prefetch_outputs<R>(task.out, row, index);
    const QuantPanel panel{reinterpret_cast<const uint8_t*>(weight), task.decoded};
    const QuantRows group = task.quants.at(row - task.first_row, task.units, kParts);
    const uint32_t *x = group.quants, *sums = group.sums;
    const float* steps = group.scales;
    F16 totals[R][2];
    OCTAVO_UNROLL for (int r = 0; r < R; ++r) totals[r][0] = totals[r][1] = F16::zero();
    const auto add = [&](int index_in_panel) __attribute__((always_inline)) {
        const Section section(panel, index_in_panel);
        if constexpr (!kWaits) prefetch.to_l1();
#pragma GCC unroll 1
        for (int first = 0; first < 2; first += kTogether)
            each_constant<kParts>([&](auto part) __attribute__((always_inline)) {
                add_part<Section, R, kTogether, part>(section, first, x, steps, sums + part * R, totals);
            });
        if constexpr (kWaits) section.prefetch();  // behind the section's own loads, which would wait for them
        x += 8 * R;
        steps += R;
        sums += kParts * R;
    };
    const int sections = task.units, remainders = group.remainders[0];
    if constexpr (kWaits) {  // few rows notice what it takes to choose
        for (int i = 0; i < sections; ++i) add(i);
        for (int i = 0; i < remainders; ++i) add(group.remainders[1 + i]);
    } else {
        for (int i = 0; i < sections + remainders; ++i) add(i < sections ? i : group.remainders[1 + i - sections]);
    }
    store_sums(task.out, row, index, totals);
}

template <WeightFormat F>
void quant_linear(const ProductTask& task, int64_t group_begin, int64_t group_end, int64_t panel_begin,
                  int64_t panel_end) {
    const int64_t panel_bytes = quant_layout(F).panel_bytes(task.units);
    if (!kDecodesOnce<F> || !task.decoded)
        return each_panel<kQuantRows>(
            task, group_begin, group_end, panel_begin, panel_end, panel_bytes, task.units,
            [&](auto count, auto... of) { quant_panel<StoredSection<F>, count>(task, of...); });
    if constexpr (kDecodesOnce<F>)
        each_panel<kQuantRows, (kQuantRows + 1) / 2>(  // rows are split evenly
            task, group_begin, group_end, panel_begin, panel_end, panel_bytes, task.units,
            [&](auto count, const char* panel, int64_t index, int64_t row, PanelPrefetch prefetch) {
                if (row == task.first_row)
                    quant_panel<DecodingSection<F>, count>(task, panel, index, row, prefetch);
                else
                    quant_panel<DecodedSection<kDecodedLayout<F>>, count>(task, panel, index, row, prefetch);
            });
}

}  // namespace octavo::OCTAVO_LEVEL
