// Compresses bf16 weights to twelve bits, and decompresses them a row at a time: see compressed.h.
#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "linear.h"
#include "thread_pool.h"

namespace octavo {
namespace {

constexpr int kCodes = 16, kUnitElements = 2 * kPanelOutputs;
static_assert(kMostCompressionBase + kCodes == 256);
constexpr uint32_t kNoUnit = ~0u;

int exponent_of(uint16_t bits) { return bits >> 7 & 255; }
int code_of(uint16_t bits, int base) {  // -1: there is none
    const int exponent = exponent_of(bits);
    if (exponent == 0) return 0;
    return exponent > base && exponent < base + kCodes ? exponent - base : -1;
}

// The elements of one panel in the layout of `gemm`.
struct Panel {
    const uint16_t* elements;
    int64_t units;
    Panel(const Weight& weight, int64_t index) : units((weight.inputs + 1) / 2) {
        elements = reinterpret_cast<const uint16_t*>(weight.packed) + index * units * kUnitElements;
    }
    template <class Body> void each(const Body& body) const {
        for (int64_t unit = 0; unit < units; ++unit)
            for (int element = 0; element < kUnitElements; ++element)
                body(static_cast<uint32_t>(unit), element, elements[unit * kUnitElements + element]);
    }
};

using Histogram = std::array<int64_t, 256>;

void compress_panel(const Panel& panel, int base, char* to, Escape* escape) {
    panel.each([&](uint32_t unit, int element, uint16_t bits) {
        char* pair = to + unit / 2 * kCompressedPairBytes;
        const int at = compressed_position(element), code = code_of(bits, base);
        pair[unit % 2 * 64 + at] = static_cast<char>((bits >> 8 & 128) | (bits & 127));
        if (code < 0)
            *escape++ = {unit, static_cast<uint16_t>(element), bits};
        else
            pair[128 + at] = static_cast<char>(pair[128 + at] | code << (unit % 2 * 4));
    });
    *escape = {kNoUnit, 0, 0};
}

}  // namespace

CompressionPlan plan_compression(const Weight& weight) {
    const CompressedWeight compressed(weight);
    std::vector<Histogram> each(compressed.panels);
    parallel_for(static_cast<int>(compressed.panels), [&](int panel) {
        Histogram counts{};
        Panel(weight, panel).each([&](uint32_t, int, uint16_t bits) { ++counts[exponent_of(bits)]; });
        each[panel] = counts;
    });
    Histogram all{};
    for (const Histogram& counts : each)
        for (int exponent = 0; exponent < 256; ++exponent) all[exponent] += counts[exponent];
    CompressionPlan best{0, -1};
    for (int base = 0; base <= kMostCompressionBase; ++base) {
        int64_t escapes = 0;
        for (int exponent = 1; exponent < 256; ++exponent)
            if (exponent <= base || exponent >= base + kCodes) escapes += all[exponent];
        if (best.num_escapes < 0 || escapes < best.num_escapes) best = {base, escapes};
    }
    return best;
}

void compress(const Weight& weight, const CompressionPlan& plan, char* to) {
    const CompressedWeight compressed(weight);
    char* panels = to + CompressedWeight::header_bytes;
    const int64_t panels_end = CompressedWeight::header_bytes + compressed.panels * compressed.panel_bytes();
    std::memset(to, 0, CompressedWeight::header_bytes);
    std::memset(to + panels_end, 0, compressed.bytes(plan.num_escapes) - panels_end);
    auto* tables = reinterpret_cast<uint8_t*>(to);
    for (int code = 1; code < kCodes; ++code) {
        tables[code] = static_cast<uint8_t>((plan.base + code) >> 1);
        tables[kCodes + code] = static_cast<uint8_t>((plan.base + code) << 7);
    }
    std::memcpy(to + 2 * kCodes, &plan.num_escapes, sizeof plan.num_escapes);
    auto* first_escape = reinterpret_cast<int32_t*>(to + panels_end);
    auto* escapes = reinterpret_cast<Escape*>(to + compressed.escapes_at());
    parallel_for(static_cast<int>(compressed.panels), [&](int panel) {
        int32_t count = 1;
        Panel(weight, panel).each([&](uint32_t, int, uint16_t bits) { count += code_of(bits, plan.base) < 0; });
        first_escape[panel] = count;
    });
    int32_t before = 0;
    for (int64_t panel = 0; panel < compressed.panels; ++panel) {
        const int32_t count = first_escape[panel];
        first_escape[panel] = before;
        before += count;
    }
    if (const int64_t found = before - compressed.panels; found != plan.num_escapes)
        throw std::invalid_argument("from exponent " + std::to_string(plan.base) + " the weight has " +
                                    std::to_string(found) + " escapes, not " + std::to_string(plan.num_escapes));
    // Each thread clears what it writes: with several, first touch spreads the pages over the threads' memory nodes.
    parallel_for(static_cast<int>(compressed.panels), [&](int panel) {
        char* codes = panels + panel * compressed.panel_bytes();
        std::memset(codes, 0, compressed.panel_bytes());
        compress_panel({weight, panel}, plan.base, codes, escapes + first_escape[panel]);
    });
}

void check_compressed(const Weight& weight, int64_t bytes) {
    const CompressedWeight compressed(weight);
    int64_t num_escapes = -1;
    if (bytes >= CompressedWeight::header_bytes)
        std::memcpy(&num_escapes, weight.packed + 2 * kCodes, sizeof num_escapes);
    if (num_escapes < 0 || num_escapes > bytes || bytes != compressed.bytes(num_escapes))
        throw std::invalid_argument("a compressed weight of " + std::to_string(weight.outputs) + " x " +
                                    std::to_string(weight.inputs) + " does not have " + std::to_string(bytes) +
                                    " bytes");
}

void decompress_row(const Weight& weight, int64_t output, char* to) {
    const CompressedWeight compressed(weight);
    const CompressedPanels view = compressed.view(weight.packed);
    const int64_t panel = output / kPanelOutputs;
    const char* from = weight.packed + CompressedWeight::header_bytes + panel * compressed.panel_bytes();
    const Escape* escape = view.escapes + view.first_escape[panel];
    for (int64_t input = 0; input < weight.inputs; ++input) {
        const int64_t unit = input / 2;
        const int element = static_cast<int>(output % kPanelOutputs * 2 + input % 2), at = compressed_position(element);
        const char* pair = from + unit / 2 * kCompressedPairBytes;
        const auto rest = static_cast<uint8_t>(pair[unit % 2 * 64 + at]), codes = static_cast<uint8_t>(pair[128 + at]);
        const int code = codes >> (unit % 2 * 4) & 15;
        auto bits =
            static_cast<uint16_t>(((rest & 128) | view.tables[code]) << 8 | (rest & 127) | view.tables[kCodes + code]);
        while (escape->unit < unit || (escape->unit == unit && escape->element < element)) ++escape;
        if (escape->unit == unit && escape->element == element) bits = escape->bits;
        std::memcpy(to + input * 2, &bits, 2);
    }
}

}  // namespace octavo
