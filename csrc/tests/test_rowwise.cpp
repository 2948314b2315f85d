// Row-wise kernels, argmax.
#include <algorithm>
#include <cmath>
#include <vector>

#include "harness.h"
#include "ops.h"
#include "thread_pool.h"

namespace octavo::test {
namespace {

// Rows with gaps in between, the last of which ends the buffer.
struct Rows {
    Storage storage;
    int64_t rows, width, stride;
    Buffer buffer;
    Rows(Storage storage, int64_t rows, int64_t width)
        : storage(storage),
          rows(rows),
          width(width),
          stride((width + random_int(0, 5)) * element_bytes(storage)),
          buffer(rows ? (rows - 1) * stride + width * element_bytes(storage) : 0,
                 random_int(0, 3) * element_bytes(storage)) {
        fill_normal(buffer, storage);
    }
    Matrix matrix() const { return {buffer.data(), rows, width, stride}; }
    float at(int64_t row, int64_t column) const { return load(buffer.data() + row * stride, column, storage); }
    void set(int64_t row, int64_t column, float value) { store(value, buffer.data() + row * stride, column, storage); }
};

double rounded(double value, Storage storage) {
    return storage == kBf16 ? bf16_to_float(float_to_bf16(static_cast<float>(value))) : value;
}

TEST(norms_agree_with_float64) {
    for (int i = cases(40); i > 0; --i) {
        const Storage of_x = static_cast<Storage>(random_int(0, 1)),
                      storage = of_x == kBf16 ? kBf16 : static_cast<Storage>(random_int(0, 1));
        const int64_t rows = random_int(0, 60), width = random_int(1, 700);
        const auto kind = static_cast<NormKind>(random_int(0, kNumNormKinds - 1));
        const bool add = random_bool(), in_place = random_bool(), biased = kind == kLayerNorm && random_bool();
        set_num_threads(random_int(1, 4));
        describe_case(std::to_string(rows) + " x " + std::to_string(width) + " storage " + std::to_string(of_x) + " " +
                      std::to_string(storage));
        const Rows x(of_x, rows, width), residual(storage, rows, width), other(storage, rows, width),
            weight(kind == kRmsNorm ? storage : kF32, 1, width), bias(kF32, 1, width);
        const Rows& out = in_place ? residual : other;
        std::vector<double> sums(rows * width);
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t column = 0; column < width; ++column)
                sums[row * width + column] =
                    rounded(double{x.at(row, column)} + (add ? residual.at(row, column) : 0.0), of_x);
        const Matrix added = residual.matrix();
        const NormWeights norm{kind, weight.buffer.data(), biased ? bias.buffer.as<float>() : nullptr, 1e-5f};
        normalise(of_x, storage, x.matrix(), add ? &added : nullptr, norm, out.matrix());
        for (int64_t row = 0; row < rows; ++row) {
            double squares = 0, mean = 0;
            for (int64_t c = 0; c < width && kind == kLayerNorm; ++c)
                mean += sums[row * width + c] / static_cast<double>(width);
            for (int64_t c = 0; c < width; ++c) squares += std::pow(sums[row * width + c] - mean, 2);
            for (int64_t c = 0; c < width; ++c) {
                const double sum = sums[row * width + c];
                if (add) CHECK_NEAR(x.at(row, c), sum, std::abs(sum) * 2 * rounding(of_x), "a residual");
                const double deviation = std::sqrt(squares / static_cast<double>(width) + 1e-5);
                const double factor = kind == kNoNorm ? 1 : weight.at(0, c) / deviation;
                const double shift = biased ? bias.at(0, c) : 0;
                const double spread = kind == kLayerNorm ? std::sqrt(squares / static_cast<double>(width)) : 0;
                const double size = (std::abs(sum) + spread) * std::abs(factor) + std::abs(shift);
                const double expected = (sum - mean) * factor + shift;
                CHECK_NEAR(out.at(row, c), expected, size * (3 * rounding(storage) + 1e-6) + 1e-30, "a norm");
            }
        }
    }
}

TEST(activations_sums_and_factors_agree_with_float64) {
    for (int i = cases(40); i > 0; --i) {
        const Storage storage = static_cast<Storage>(random_int(0, 1)),
                      of_y = storage == kBf16 ? kBf16 : static_cast<Storage>(random_int(0, 1));
        const auto activation = static_cast<Activation>(random_int(0, kNumActivations - 1));
        const int64_t rows = random_int(0, 20), width = random_int(1, 300);
        set_num_threads(random_int(1, 4));
        const Rows x(storage, rows, width), y(of_y, rows, width), capped(kF32, rows, width);
        const float parameters[kXieluParameters] = {0.8f, 0.9f, 0.5f};
        std::vector<double> expected;
        for (int64_t at = 0; at < rows * width; ++at)
            expected.push_back(activated(activation, x.at(at / width, at % width), parameters));
        activate(storage, activation, parameters, x.matrix());
        for (int64_t at = 0; at < rows * width; ++at)
            CHECK_NEAR(x.at(at / width, at % width), expected[at],
                       std::abs(expected[at]) * (rounding(storage) + 1e-5) + 1e-6, "an activation");
        for (int64_t at = 0; at < rows * width; ++at)
            expected[at] = rounded(double{x.at(at / width, at % width)} + y.at(at / width, at % width), storage) * 1.25;
        add(storage, of_y, x.matrix(), y.matrix());
        scale(storage, x.matrix(), 1.25f);
        for (int64_t at = 0; at < rows * width; ++at)
            CHECK_NEAR(x.at(at / width, at % width), expected[at], std::abs(expected[at]) * 2 * rounding(storage),
                       "a scaled sum");
        for (int64_t at = 0; at < rows * width; ++at)
            expected[at] = 3 * std::tanh(double{capped.at(at / width, at % width)} / 3);
        softcap(capped.matrix(), 3.0f);
        for (int64_t at = 0; at < rows * width; ++at)
            CHECK_NEAR(capped.at(at / width, at % width), expected[at], 1e-6, "a capped number");
    }
}

TEST(gates_agree_with_float64) {
    for (int i = cases(40); i > 0; --i) {
        const Storage storage = static_cast<Storage>(random_int(0, 1));
        const auto activation = static_cast<Activation>(random_int(0, kNumGates - 1));
        const int64_t rows = random_int(0, 40), width = random_int(1, 300);
        set_num_threads(random_int(1, 4));
        Rows in(storage, rows, 2 * width);
        const Rows out(storage, rows, width);
        for (int64_t row = 0; row < rows; ++row)
            if (random_int(0, 3) == 0)
                in.set(row, 0, (random_bool() ? 1 : -1) * (activation == kRelu2 ? 1e15f : 1e30f));
        gated(storage, activation, in.matrix(), out.matrix());
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t c = 0; c < width; ++c) {
                const double x = in.at(row, c), up = in.at(row, width + c);
                const double opened = activated(activation, x);
                CHECK_NEAR(out.at(row, c), opened * up,
                           std::abs(opened * up) * (3 * rounding(storage) + 1e-5) + std::abs(up) * 1e-6,
                           "a gated value");
            }
    }
}

TEST(argmax_is_the_first_of_the_largest_or_the_first_nan) {
    for (int i = cases(60); i > 0; --i) {
        const Storage storage = static_cast<Storage>(random_int(0, 1));
        const int64_t rows = random_int(0, 5), width = random_int(0, 3) ? random_int(1, 400) : random_int(30000, 70000);
        set_num_threads(random_int(1, 4));
        Rows x(storage, rows, width);
        const int kind = random_int(0, 4);
        for (int64_t row = 0; row < rows; ++row) {
            const auto place = [&] { return random_int(0, static_cast<int>(width) - 1); };
            if (kind == 0) x.set(row, place(), NAN), x.set(row, place(), NAN);
            if (kind == 1) x.set(row, place(), 9.0f), x.set(row, place(), 9.0f);
            if (kind == 2)
                for (int64_t c = 0; c < width; ++c) x.set(row, c, -INFINITY);
            if (kind == 3) x.set(row, place(), INFINITY);
        }
        std::vector<int64_t> found(rows, -1);
        argmax(storage, x.matrix(), found.data());
        for (int64_t row = 0; row < rows; ++row) {
            int64_t expected = 0;
            for (int64_t c = 0; c < width && !std::isnan(x.at(row, expected)); ++c)
                if (std::isnan(x.at(row, c)) || x.at(row, c) > x.at(row, expected)) expected = c;
            CHECK(found[row] == expected);
        }
    }
}

}  // namespace
}  // namespace octavo::test
