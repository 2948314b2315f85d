// Random weights in every format, and the values that they stand for.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "harness.h"
#include "linear.h"

namespace octavo::test {

constexpr const char* kFormatNames[kNumWeightFormats] = {
    "bf16", "f32",  "compressed bf16", "Q4_0",   "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K",
    "Q5_K", "Q6_K", "IQ4_NL",          "IQ4_XS", "MXFP4"};

inline WeightFormat random_format() { return static_cast<WeightFormat>(random_int(0, kNumWeightFormats - 1)); }
// A number of inputs that the format allows, at most `most` but for a block's.
inline int64_t random_inputs(WeightFormat format, int most) {
    const int block = static_cast<int>(block_inputs(format));
    return block * random_int(1, std::max(1, most / block));
}
inline const char* name_of(WeightFormat format) { return kFormatNames[static_cast<int>(format)]; }

inline float half_to_float(uint16_t half) {
    const int exponent = half >> 10 & 31;
    const float fraction = static_cast<float>(half & 1023) / 1024;
    const float size = exponent ? std::ldexp(1 + fraction, exponent - 15) : std::ldexp(fraction, -14);
    return half & 0x8000 ? -size : size;
}

// The place of a block's numbers in fp16.
inline int halves_at(WeightFormat format) {
    const bool last = format == WeightFormat::q2_k || format == WeightFormat::q3_k || format == WeightFormat::q6_k;
    return last ? quant_layout(format).stored_bytes - 2 * quant_layout(format).halves : 0;
}

constexpr int kIq4Numbers[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Weight i of a block as GGUF stores it, by the format's definition.
inline double stored_weight(WeightFormat format, const uint8_t* block, int i) {
    using enum WeightFormat;
    const auto half = [&](int at) {
        return double{half_to_float(static_cast<uint16_t>(block[at] | block[at + 1] << 8))};
    };
    const auto nibble = [&](const uint8_t* from, int run) {  // low halves are a run of quants, high halves the next
        const int byte = from[i / (2 * run) * run + i % run];
        return i / run % 2 ? byte >> 4 : byte & 15;
    };
    if (format == q4_0) return half(0) * (nibble(block + 2, 16) - 8);
    if (format == q4_1) return half(0) * nibble(block + 4, 16) + half(2);
    if (format == q5_0) return half(0) * (nibble(block + 6, 16) + 16 * (block[2 + i / 8] >> i % 8 & 1) - 16);
    if (format == q5_1) return half(0) * (nibble(block + 8, 16) + 16 * (block[4 + i / 8] >> i % 8 & 1)) + half(2);
    if (format == q8_0) return half(0) * static_cast<int8_t>(block[2 + i]);
    if (format == iq4_nl) return half(0) * kIq4Numbers[nibble(block + 2, 16)];
    if (format == mxfp4) {
        const int code = nibble(block + 1, 16), exponent = code >> 1 & 3;
        const double size = exponent ? std::ldexp(1 + 0.5 * (code & 1), exponent - 1) : 0.5 * (code & 1);
        return std::ldexp(code & 8 ? -size : size, block[0] - 127);
    }
    const int run = i / 32;
    if (format == iq4_xs) {
        const int high = block[2 + run / 4] >> run % 4 * 2 & 3, low = block[4 + run / 2] >> run % 2 * 4 & 15;
        return half(0) * (low + 16 * high - 32) * kIq4Numbers[nibble(block + 8, 16)];
    }
    if (format == q2_k) {
        const int quant = block[16 + i / 128 * 32 + i % 32] >> run % 4 * 2 & 3, pair = block[i / 16];
        return half(80) * (pair & 15) * quant - half(82) * (pair >> 4);
    }
    if (format == q3_k) {
        const int low = block[32 + i / 128 * 32 + i % 32] >> run % 4 * 2 & 3, high = block[i % 32] >> run & 1;
        const uint8_t* scales = block + 96;
        const int at = i / 16, scale = (at < 8 ? scales[at] & 15 : scales[at - 8] >> 4) |
                                       (scales[8 + at % 4] >> at / 4 * 2 & 3) << 4;
        return half(108) * (scale - 32) * (low + 4 * high - 4);
    }
    if (format == q6_k) {
        const int byte = block[i / 128 * 64 + i % 64], low = i / 64 % 2 ? byte >> 4 : byte & 15;
        const int high = block[128 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
        return half(208) * static_cast<int8_t>(block[192 + i / 16]) * (low + 16 * high - 32);
    }
    const uint8_t* pairs = block + 4;
    const int scale = run < 4 ? pairs[run] & 63 : (pairs[run + 4] & 15) + (pairs[run - 4] >> 6) * 16;
    const int minimum = run < 4 ? pairs[run + 4] & 63 : (pairs[run + 4] >> 4) + (pairs[run] >> 6) * 16;
    const int quant =
        format == q4_k ? nibble(block + 16, 32) : nibble(block + 48, 32) + 16 * (block[16 + i % 32] >> run & 1);
    return half(0) * scale * quant - half(2) * minimum;
}

// A weight's rows as a checkpoint stores them, the values they stand for, and the packed rows.
struct TestWeight {
    int64_t outputs, inputs;
    WeightFormat format;
    std::unique_ptr<Buffer> stored, packed;
    std::vector<double> values;  // [outputs][inputs]

    TestWeight(WeightFormat format, int64_t outputs, int64_t inputs)
        : outputs(outputs), inputs(inputs), format(format), values(outputs * inputs) {
        const WeightFormat plain = format == WeightFormat::bf16_compressed ? WeightFormat::bf16 : format;
        const int64_t row_bytes = stored_row_bytes(plain, inputs);
        stored = std::make_unique<Buffer>(row_bytes * outputs);
        for (int64_t output = 0; output < outputs; ++output)
            if (is_quantised(format))
                draw_blocks(stored->data() + output * row_bytes, &values[output * inputs]);
            else
                draw_floats(stored->data() + output * row_bytes, &values[output * inputs]);
        packed = std::make_unique<Buffer>(packed_bytes(plain, outputs, inputs));
        std::memset(packed->data(), 0, packed->size());
        pack_rows({packed->data(), outputs, inputs, plain}, stored->data(), row_bytes, outputs, {0, 1});
        if (format == WeightFormat::bf16_compressed) compress_packed();
    }
    Weight weight() const { return {packed->data(), outputs, inputs, format}; }

  private:
    void draw_floats(char* to, double* meant) {
        const Storage storage = float_storage(format);
        for (int64_t i = 0; i < inputs; ++i) {
            // Some exponents are far from the rest: a compressed weight lists them as escapes.
            const float value = random_normal() * (random_int(0, 20) ? 1.0f : std::ldexp(1.0f, random_int(-60, 10)));
            store(random_int(0, 30) ? value : 0.0f, to, i, storage);
            meant[i] = load(to, i, storage);
        }
    }
    void draw_blocks(char* to, double* meant) {
        const QuantLayout& layout = quant_layout(format);
        for (int64_t first = 0; first < inputs; first += layout.inputs, to += layout.stored_bytes) {
            for (int i = 0; i < layout.stored_bytes; ++i) to[i] = static_cast<char>(random_int(0, 255));
            for (int i = 0; i < layout.halves; ++i) {
                // Between 2^-8 and 2^-4, some negative, some zero.
                const int half = random_int(7, 10) << 10 | random_int(0, 1023) | random_int(0, 1) << 15;
                const auto value = static_cast<uint16_t>(random_int(0, 15) ? half : 0);
                std::memcpy(to + halves_at(format) + 2 * i, &value, 2);
            }
            if (format == WeightFormat::mxfp4) to[0] = static_cast<char>(random_int(0, 15) ? random_int(118, 126) : 0);
            for (int i = 0; i < layout.inputs; ++i)
                meant[first + i] = stored_weight(format, reinterpret_cast<const uint8_t*>(to), i);
        }
    }
    void compress_packed() {
        const Weight plain{packed->data(), outputs, inputs, WeightFormat::bf16};
        const CompressionPlan plan = plan_compression(plain);
        auto compressed = std::make_unique<Buffer>(CompressedWeight(plain).bytes(plan.num_escapes));
        compress(plain, plan, compressed->data());
        packed = std::move(compressed);
        check_compressed(weight(), packed->size());
    }
};

}  // namespace octavo::test
