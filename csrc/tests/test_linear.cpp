// Products in every weight format, and packing.
#include <cmath>
#include <memory>
#include <stdexcept>
#include <vector>

#include "harness.h"
#include "linear.h"
#include "thread_pool.h"
#include "weight_case.h"

namespace octavo::test {
namespace {

// Rounds 32 numbers to integers times a scale, as the kernels do, and returns the scale.
float quantise_block(const float* x, double* rounded) {
    float largest = 0.0f;
    for (int i = 0; i < 32; ++i) largest = std::max(largest, std::abs(x[i]));
    const bool usual = largest >= 0x1p-90f;
    const float inverse = usual ? 127.0f / largest : 0.0f, scale = usual ? largest / 127.0f : 0.0f;
    for (int i = 0; i < 32; ++i) rounded[i] = std::nearbyint(x[i] * inverse) * scale;
    return scale;
}

// A row of activations as the kernels quantise it: computed in the same floats. Where a scale is large compared with
// the row's others, what rounding took is quantised too.
std::vector<double> quantised_row(const char* row, int64_t width, Storage storage) {
    std::vector<double> rounded(width);
    std::vector<float> scales, x(width);
    for (int64_t i = 0; i < width; ++i) x[i] = load(row, i, storage);
    for (int64_t block = 0; block < width; block += 32) scales.push_back(quantise_block(&x[block], &rounded[block]));
    float limit = 0.0f;
    for (const float scale : scales) limit += scale * scale;
    limit *= scales.size() < 6 ? 2.0f / static_cast<float>(scales.size()) : 0.34f;
    for (int64_t block = 0; block < width; block += 32) {
        const float scale = scales[block / 32];
        if (!(scale * scale > limit)) continue;
        float rest[32];
        double finer[32];
        for (int i = 0; i < 32; ++i) rest[i] = static_cast<float>(x[block + i] - rounded[block + i]);
        quantise_block(rest, finer);
        for (int i = 0; i < 32; ++i) rounded[block + i] += finer[i];
    }
    return rounded;
}

// Rows of normal numbers, some with outliers, at any inputs or at those that other rows have them at.
void fill_rows(const Buffer& x, Storage storage, int64_t rows, int64_t inputs, int64_t stride) {
    fill_normal(x, storage);
    const int common = random_int(0, static_cast<int>(inputs) - 1);
    for (int64_t row = 0; row < rows; ++row)
        for (int count = random_int(0, 2); count > 0; --count) {
            const int at = random_bool() ? common : random_int(0, static_cast<int>(inputs) - 1);
            store(100.0f * random_normal(), x.data() + row * stride, at, storage);
        }
}

struct Product {
    int64_t rows;
    Storage x_storage, out_storage;
    bool with_bias, exact;
    Epilogue epilogue;
};

template <class Number> double largest(const Number* numbers, int64_t count) {
    double most = 0;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, std::abs(static_cast<double>(numbers[i])));
    return most;
}

// Compares one product with sums in float64: each number must be within what rounding explains.
void check_product(const TestWeight& weight, const Product& product) {
    const int64_t inputs = weight.inputs, outputs = weight.outputs;
    const bool gate = product.epilogue != kPlain, quantised = is_quantised(weight.format);
    const int x_element = element_bytes(product.x_storage), out_element = element_bytes(product.out_storage);
    const int64_t width = gate ? outputs / 2 : outputs;
    // Rows may be further apart than they are long; the last one ends with the buffer.
    const int64_t x_stride = (inputs + random_int(0, 3)) * x_element,
                  out_stride = (width + random_int(0, 3)) * out_element;
    const Buffer x(product.rows ? (product.rows - 1) * x_stride + inputs * x_element : 0, random_int(0, 3) * x_element);
    const Buffer out(product.rows ? (product.rows - 1) * out_stride + width * out_element : 0,
                     random_int(0, 3) * out_element);
    const Buffer bias(outputs * out_element, random_int(0, 3) * out_element);
    fill_rows(x, product.x_storage, product.rows, inputs, x_stride);
    fill_normal(bias, product.out_storage);
    linear(weight.weight(), product.x_storage, {x.data(), product.rows, inputs, x_stride},
           {out.data(), out_stride, width, product.with_bias ? bias.data() : nullptr, product.out_storage,
            product.epilogue},
           product.exact);

    const bool integers = quantised && (product.exact || !kernels().pack_tile_rows || product.x_storage != kBf16 ||
                                        product.rows < kernels().gemm_quant_rows);
    // bf16 tiles see quantised weights rounded to bf16.
    const double part = quantised && !integers ? 0x1p-8 : 0x1p-21 * std::sqrt(static_cast<double>(inputs));
    for (int64_t row = 0; row < product.rows; ++row) {
        std::vector<double> xs(inputs);
        if (integers)
            xs = quantised_row(x.data() + row * x_stride, inputs, product.x_storage);
        else
            for (int64_t i = 0; i < inputs; ++i) xs[i] = load(x.data() + row * x_stride, i, product.x_storage);
        const auto sum = [&](int64_t output) {
            struct {
                double value = 0, error = 1e-30;
            } s;
            for (int64_t i = 0; i < inputs; ++i) {
                const double term = xs[i] * weight.values[output * inputs + i];
                s.value += term;
                s.error += std::abs(term);
            }
            // Q4 quants are stored with an offset, which is subtracted again.
            if (integers)
                for (int64_t i = 0; i < inputs; ++i) s.error += std::abs(xs[i]) * 0.01;
            s.error *= part;
            // What is in the middle between two integers may become either of them. In the remainder of an outlier's
            // section, where floats are coarse enough for that, they differ by 1/127^2 of half the outlier.
            if (integers)
                s.error += largest(xs.data(), inputs) * largest(&weight.values[output * inputs], inputs) * 0x1p-15;
            if (product.with_bias) s.value += load(bias.data(), output, product.out_storage);
            s.error += std::abs(s.value) * rounding(product.out_storage);
            return s;
        };
        for (int64_t column = 0; column < width; ++column) {
            const float got = load(out.data() + row * out_stride, column, product.out_storage);
            if (!gate) {
                const auto expected = sum(column);
                CHECK_NEAR(got, expected.value, expected.error, "an output");
                continue;
            }
            const auto gated = sum(column / 16 * 32 + column % 16), up = sum(column / 16 * 32 + 16 + column % 16);
            const double opened = activated(static_cast<Activation>(product.epilogue - kSiluGate), gated.value);
            const double slope = product.epilogue == kRelu2Gate ? 2 * (std::abs(gated.value) + gated.error) : 1.2;
            const double error =
                slope * gated.error + (std::abs(opened) + 1e-6) * (rounding(product.out_storage) + 1e-6);
            CHECK_NEAR(got, opened * up.value,
                       error * (std::abs(up.value) + up.error) +
                           std::abs(opened) * (up.error + std::abs(up.value) * rounding(product.out_storage)),
                       "a gated output");
        }
    }
}

TEST(products_agree_with_float64) {
    for (int i = cases(90); i > 0; --i) {
        const WeightFormat format = random_format();
        const bool quantised = is_quantised(format);
        Product product{};
        product.rows = random_int(0, 2) ? random_int(0, 14) : random_int(15, 90);
        product.x_storage = quantised ? static_cast<Storage>(random_int(0, 1)) : float_storage(format);
        product.out_storage = static_cast<Storage>(random_int(0, 1));
        product.with_bias = random_bool();
        product.exact = random_bool();
        product.epilogue = static_cast<Epilogue>(random_int(kPlain, kRelu2Gate));
        const int64_t inputs = random_inputs(format, quantised ? 520 : 150);
        const int64_t outputs = product.epilogue == kPlain ? random_int(1, 110) : 32 * random_int(1, 4);
        set_num_threads(random_int(1, 6));  // up to four threads, each packs rows for itself
        describe_case(std::string(name_of(format)) + ", " + std::to_string(product.rows) + " x " +
                      std::to_string(inputs) + " -> " + std::to_string(outputs) + ", x " +
                      std::to_string(product.x_storage) + " out " + std::to_string(product.out_storage) + " bias " +
                      std::to_string(product.with_bias) + " exact " + std::to_string(product.exact) + " epilogue " +
                      std::to_string(product.epilogue) + " threads " + std::to_string(num_threads()));
        check_product(TestWeight(format, outputs, inputs), product);
    }
}

TEST(a_row_has_the_bits_that_it_has_alone) {
    for (int i = cases(16); i > 0; --i) {
        const WeightFormat format = random_format();
        const Storage storage = is_quantised(format) ? kBf16 : float_storage(format);
        const int64_t rows = random_int(2, 70), inputs = random_inputs(format, 520);
        const int64_t outputs = random_int(1, 100), x_stride = inputs * element_bytes(storage),
                      out_stride = outputs * 4;
        const TestWeight weight(format, outputs, inputs);
        describe_case(std::string(name_of(format)) + ", " + std::to_string(rows) + " x " + std::to_string(inputs) +
                      " -> " + std::to_string(outputs));
        const Buffer x(rows * x_stride), together(rows * out_stride), alone(out_stride);
        fill_rows(x, storage, rows, inputs, x_stride);
        set_num_threads(random_int(1, 6));
        linear(weight.weight(), storage, {x.data(), rows, inputs, x_stride},
               {together.data(), out_stride, outputs, nullptr, kF32, kPlain});
        set_num_threads(random_int(1, 6));
        for (int64_t row = 0; row < rows; ++row) {
            linear(weight.weight(), storage, {x.data() + row * x_stride, 1, inputs, x_stride},
                   {alone.data(), out_stride, outputs, nullptr, kF32, kPlain});
            for (int64_t output = 0; output < outputs; ++output) {
                const float single = load(alone.data(), output, kF32);
                CHECK_NEAR(load(together.data() + row * out_stride, output, kF32), single, 0.0,
                           "output " + std::to_string(output) + " of row " + std::to_string(row));
            }
        }
    }
}

// Levels with fused multiply-adds have the same bits, on x86-64 as on Arm, but for products in bf16 where instructions
// for it round otherwise.
TEST(products_have_the_recorded_bits) {
    const Isa level = current_isa();
    if (level == kPortable || level == kAmxEmulated) return;
    random_engine().seed(1);
    uint64_t quantised = 14695981039346656037u, plain = quantised;  // FNV-1a
    const auto draw = [](const Buffer& to) {
        for (int64_t i = 0; i < to.size() / 2; ++i)
            store(static_cast<float>(random_int(-8192, 8191)) / 4096, to.data(), i, kBf16);
    };
    for (int i = 0; i < kNumWeightFormats; ++i) {
        const auto format = static_cast<WeightFormat>(i);
        if (format != WeightFormat::bf16 && !is_quantised(format)) continue;
        const int64_t inputs = 512, outputs = 70;
        const TestWeight weight(is_quantised(format) ? format : WeightFormat::q8_0, outputs, inputs);
        const Buffer stored(outputs * inputs * 2), packed(packed_bytes(WeightFormat::bf16, outputs, inputs));
        draw(stored);
        std::memset(packed.data(), 0, packed.size());
        const Weight floats{packed.data(), outputs, inputs, WeightFormat::bf16};
        pack_rows(floats, stored.data(), inputs * 2, outputs, {0, 1});
        for (const int64_t rows : {1, 2, 3, 4, 5, 8, 13}) {
            const Buffer x(rows * inputs * 2), out(rows * outputs * 4);
            draw(x);
            linear(is_quantised(format) ? weight.weight() : floats, kBf16, {x.data(), rows, inputs, inputs * 2},
                   {out.data(), outputs * 4, outputs, nullptr, kF32, kPlain});
            uint64_t& hash = is_quantised(format) ? quantised : plain;
            for (int64_t byte = 0; byte < out.size(); ++byte)
                hash = (hash ^ static_cast<unsigned char>(out.data()[byte])) * 1099511628211u;
        }
    }
    describe_case("quantised " + std::to_string(quantised) + ", bf16 " + std::to_string(plain));
    CHECK(quantised == 14387828400486263974u);
    CHECK(plain == (level == kAmx          ? 4475254588007171458u
                    : level == kAvx512Bf16 ? 11284528765021828361u
                    : level == kNeonBf16   ? 13866640742177653327u
                                           : 705004001237559182u));
}

// Products in tiles keep sums in memory between blocks of inputs if there are several groups of rows.
TEST(rows_in_many_groups_have_the_bits_of_rows_in_one) {
    for (int i = cases(8); i > 0; --i) {
        const WeightFormat format = random_format();
        const Storage storage = is_quantised(format) ? kBf16 : float_storage(format);
        const int64_t part = random_int(32, 40), rows = part * random_int(2, 5), outputs = random_int(1, 400);
        const int64_t inputs = std::max(random_inputs(format, 1800), 2 * block_inputs(format));
        const int64_t x_stride = inputs * element_bytes(storage), out_stride = outputs * 4;
        const TestWeight weight(format, outputs, inputs);
        describe_case(std::string(name_of(format)) + ", " + std::to_string(rows) + " x " + std::to_string(inputs) +
                      " -> " + std::to_string(outputs));
        const Buffer x(rows * x_stride), together(rows * out_stride), apart(rows * out_stride);
        fill_normal(x, storage);
        const auto multiply = [&](const Buffer& out, int64_t first, int64_t count, bool exact) {
            set_num_threads(random_int(1, 6));
            linear(weight.weight(), storage, {x.data() + first * x_stride, count, inputs, x_stride},
                   {out.data() + first * out_stride, out_stride, outputs, nullptr, kF32, kPlain}, exact);
        };
        const bool exact = !is_quantised(format) && random_bool();
        multiply(together, 0, rows, exact);
        const int64_t step = is_quantised(format) ? 32 : random_int(6, 32);  // no fewer than tiles are used for
        for (int64_t first = 0; first < rows; first += step) multiply(apart, std::min(first, rows - step), step, exact);
        CHECK(std::memcmp(together.data(), apart.data(), rows * out_stride) == 0);
    }
}

TEST(a_row_with_no_number_spoils_itself_alone) {
    constexpr uint32_t kPoisons[] = {0x7f800000, 0xff800000, 0x7fc00000};
    for (int i = cases(12); i > 0; --i) {
        const WeightFormat format = random_format();
        const Storage storage = is_quantised(format) ? static_cast<Storage>(random_int(0, 1)) : float_storage(format);
        const int64_t rows = random_int(2, 40), inputs = random_inputs(format, 130);
        const int64_t outputs = random_int(1, 60), x_stride = inputs * element_bytes(storage), out_stride = outputs * 4;
        const TestWeight weight(format, outputs, inputs);
        const Buffer x(rows * x_stride), sound(rows * out_stride), spoilt(rows * out_stride);
        fill_normal(x, storage);
        const auto multiply = [&](const Buffer& out) {
            linear(weight.weight(), storage, {x.data(), rows, inputs, x_stride},
                   {out.data(), out_stride, outputs, nullptr, kF32, kPlain});
        };
        multiply(sound);
        const uint32_t bits = random_of(kPoisons);
        float poison;
        std::memcpy(&poison, &bits, 4);
        const int row = random_int(0, static_cast<int>(rows) - 1);
        store(poison, x.data(), row * inputs + random_int(0, static_cast<int>(inputs) - 1), storage);
        multiply(spoilt);
        describe_case(std::string(name_of(format)) + ", row " + std::to_string(row) + " of " + std::to_string(rows));
        for (int64_t other = 0; other < rows; ++other) {
            const size_t bytes = out_stride;
            if (other != row)
                CHECK(std::memcmp(sound.data() + other * out_stride, spoilt.data() + other * out_stride, bytes) == 0);
            else if (is_quantised(format))
                for (int64_t o = 0; o < outputs; ++o)
                    CHECK(std::isnan(load(spoilt.data() + row * out_stride, o, kF32)));
        }
    }
}

// Rows of several matrices are packed into one, in any order, and each of them is read back.
TEST_ONCE(rows_come_back_as_they_were_put) {
    for (int i = cases(60); i > 0; --i) {
        const WeightFormat format = random_format();
        const bool quantised = is_quantised(format);
        const int64_t outputs = random_int(1, 150), inputs = random_inputs(format, 520);
        const TestWeight weight(format, outputs, inputs);
        describe_case(std::string(name_of(format)) + " " + std::to_string(outputs) + " x " + std::to_string(inputs));
        const Storage storage = quantised ? static_cast<Storage>(random_int(0, 1)) : float_storage(format);
        for (int64_t output = 0; output < outputs; ++output) {
            const Buffer row(inputs * element_bytes(storage));
            unpack_row(weight.weight(), output, storage, row.data());
            for (int64_t input = 0; input < inputs; ++input) {
                const double expected = weight.values[output * inputs + input];
                CHECK_NEAR(load(row.data(), input, storage), expected,
                           quantised ? std::abs(expected) * rounding(storage) + 1e-7 : 0.0, "an unpacked weight");
            }
        }
        if (quantised || format == WeightFormat::bf16_compressed) continue;
        // Gates and ups alternate, see Placement.
        const Buffer packed(packed_bytes(format, 2 * ((outputs + 15) / 16 * 16), inputs));
        const Weight both{packed.data(), 2 * ((outputs + 15) / 16 * 16), inputs, format};
        std::memset(packed.data(), 0, packed.size());
        for (int64_t first : {0, 16})
            pack_rows(both, weight.stored->data(), stored_row_bytes(format, inputs), outputs, {first, 2});
        for (int64_t output = 0; output < outputs; ++output)
            for (int64_t first : {0, 16}) {
                const Buffer row(inputs * element_bytes(storage));
                unpack_row(both, Placement{first, 2}.output(output), storage, row.data());
                const char* stored = weight.stored->data() + output * stored_row_bytes(format, inputs);
                CHECK(std::memcmp(row.data(), stored, row.size()) == 0);
            }
    }
}

TEST_ONCE(a_damaged_weight_is_refused) {
    const auto refused = [](auto call) {
        try {
            call();
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    for (int i = static_cast<int>(WeightFormat::q4_0); i < kNumWeightFormats; ++i) {
        const auto format = static_cast<WeightFormat>(i);
        const int64_t inputs = 2 * block_inputs(format), row_bytes = stored_row_bytes(format, inputs);
        const TestWeight weight(format, 200, inputs);
        const uint16_t infinite = format == WeightFormat::mxfp4 ? 0xff : 0x7c00;  // an exponent of eight bits
        const int64_t at = row_bytes / 2 + halves_at(format);
        std::memcpy(weight.stored->data() + 133 * row_bytes + at, &infinite, 2);
        set_num_threads(2);
        CHECK(refused([&] { pack_rows(weight.weight(), weight.stored->data(), row_bytes, 200, {0, 1}); }));
    }
    const TestWeight plain(WeightFormat::bf16, 70, 33), compressed(WeightFormat::bf16_compressed, 70, 33);
    const CompressionPlan plan = plan_compression(plain.weight());
    const Buffer to(CompressedWeight(plain.weight()).bytes(plan.num_escapes + 1));
    CHECK(refused([&] { compress(plain.weight(), {plan.base, plan.num_escapes + 1}, to.data()); }));
    CHECK(refused([&] { check_compressed(compressed.weight(), compressed.packed->size() - 1); }));
    CHECK(refused([&] { check_compressed(compressed.weight(), 3); }));
}

}  // namespace
}  // namespace octavo::test
