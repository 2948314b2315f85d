// The bindings of src/octavo/kernels/sampling.py.
#include "sampling.h"

#include <nanobind/nanobind.h>

#include <limits>
#include <vector>

#include "bind/arguments.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

// Checks logits [rows, vocab] and `rows`, the row that each of `count` draws looks at.
Matrix logits_of(const Tensor& logits, const Tensor& rows, int64_t count) {
    const Matrix matrix = octavo::matrix(logits, "logits", DType::f32);
    require(matrix.width > 0, "logits has no columns");
    require(matrix.width < std::numeric_limits<int32_t>::max(), "logits has too many columns");
    check_dense(rows, "rows", DType::i64, {count});
    check_range(rows.data<int64_t>(), count, matrix.rows, "rows");
    return matrix;
}

void py_draw_tokens(const Tensor& logits, const Tensor& rows, const Tensor& numbers, const Tensor& allowed,
                    const Tensor& mask_of, const Tensor& token_ids, const Tensor& sound) {
    check_shape(numbers, "numbers", {-1, 5});
    const int64_t count = numbers.shape[0];
    check_dense(numbers, "numbers", DType::f64, {count, 5});
    const Matrix matrix = logits_of(logits, rows, count);
    const int64_t words = (matrix.width + 31) / 32;
    const bool masked = !allowed.is_null();
    require(masked != mask_of.is_null(), "allowed and mask_of come together");
    if (masked) {
        check_shape(allowed, "allowed", {-1, words});
        check_dense(allowed, "allowed", DType::i32, {allowed.shape[0], words});
        check_dense(mask_of, "mask_of", DType::i64, {count});
        check_range(mask_of.data<int64_t>(), count, allowed.shape[0], "mask_of", -1);
    }
    check_dense(token_ids, "token_ids", DType::i64, {count});
    check_dense(sound, "sound", DType::u8, {count});
    std::vector<Draw> draws(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
        const double* number = numbers.data<double>() + i * 5;
        const auto [uniform, temperature, min_p, top_p, top_k] =
            std::tuple{number[0], number[1], number[2], number[3], number[4]};
        require(uniform >= 0.0 && uniform < 1.0 && temperature >= 0.0 && min_p >= 0.0 && top_p > 0.0 && top_k >= 0.0,
                "numbers[" + std::to_string(i) + "] must be a uniform number in [0, 1), a temperature, min_p, top_p "
                "above 0 and top_k");
        const int64_t mask = masked ? mask_of.data<int64_t>()[i] : -1;
        draws[static_cast<size_t>(i)] = {
            .logits = reinterpret_cast<const float*>(matrix.row(rows.data<int64_t>()[i])),
            .allowed = mask < 0 ? nullptr : allowed.data<const uint32_t>() + mask * words,
            .uniform = uniform,
            .top_p = top_p,
            .temperature = static_cast<float>(temperature),
            .min_p = static_cast<float>(min_p),
            // A top_k of the vocabulary's size or more keeps every token, as 0 does.
            .top_k = top_k < static_cast<double>(matrix.width) ? static_cast<int64_t>(top_k) : 0,
        };
    }
    std::vector<Drawn> drawn(draws.size());
    {
        nb::gil_scoped_release release;
        draw_tokens(draws.data(), static_cast<int>(count), matrix.width, drawn.data());
    }
    for (int64_t i = 0; i < count; ++i) {
        token_ids.data<int64_t>()[i] = drawn[static_cast<size_t>(i)].token_id;
        sound.data<uint8_t>()[i] = drawn[static_cast<size_t>(i)].sound;
    }
}

void py_score_tokens(const Tensor& logits, const Tensor& rows, const Tensor& token_ids, const Tensor& num_top,
                     const Tensor& logprobs, const Tensor& ranks, const Tensor& top_ids, const Tensor& top_logprobs) {
    check_shape(token_ids, "token_ids", {-1});
    check_shape(top_ids, "top_ids", {-1, -1});
    const int64_t count = token_ids.shape[0], most = top_ids.shape[1];
    const Matrix matrix = logits_of(logits, rows, count);
    check_dense(token_ids, "token_ids", DType::i64, {count});
    check_range(token_ids.data<int64_t>(), count, matrix.width, "token_ids");
    check_dense(num_top, "num_top", DType::i64, {count});
    check_range(num_top.data<int64_t>(), count, std::min(most, matrix.width) + 1, "num_top");
    check_dense(logprobs, "logprobs", DType::f32, {count});
    check_dense(ranks, "ranks", DType::i64, {count});
    check_dense(top_ids, "top_ids", DType::i64, {count, most});
    check_dense(top_logprobs, "top_logprobs", DType::f32, {count, most});
    std::vector<Score> scores(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i)
        scores[static_cast<size_t>(i)] = {
            .logits = reinterpret_cast<const float*>(matrix.row(rows.data<int64_t>()[i])),
            .token_id = token_ids.data<int64_t>()[i],
            .num_top = num_top.data<int64_t>()[i],
            .top_ids = top_ids.data<int64_t>() + i * most,
            .top_logprobs = top_logprobs.data<float>() + i * most,
            .logprob = 0.0f,
            .rank = 0,
        };
    {
        nb::gil_scoped_release release;
        score_tokens(scores.data(), static_cast<int>(count), matrix.width);
    }
    for (int64_t i = 0; i < count; ++i) {
        logprobs.data<float>()[i] = scores[static_cast<size_t>(i)].logprob;
        ranks.data<int64_t>()[i] = scores[static_cast<size_t>(i)].rank;
    }
}

void py_penalise_repetition(const Tensor& logits, const Tensor& rows, const Tensor& bounds, const Tensor& num_sorted,
                            const Tensor& token_ids, const Tensor& penalties) {
    check_shape(rows, "rows", {-1});
    check_shape(token_ids, "token_ids", {-1});
    const int64_t count = rows.shape[0], num_ids = token_ids.shape[0];
    const Matrix matrix = logits_of(logits, rows, count);
    check_dense(bounds, "bounds", DType::i64, {count + 1});
    check_dense(num_sorted, "num_sorted", DType::i64, {count});
    check_dense(token_ids, "token_ids", DType::i64, {num_ids});
    check_dense(penalties, "penalties", DType::f32, {count});
    check_range(bounds.data<int64_t>(), count + 1, num_ids + 1, "bounds");
    std::vector<Repetition> penalised(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
        const int64_t begin = bounds.data<int64_t>()[i], length = bounds.data<int64_t>()[i + 1] - begin;
        const int64_t sorted = num_sorted.data<int64_t>()[i], row = rows.data<int64_t>()[i];
        require(sorted >= 0 && sorted <= length,
                "num_sorted[" + std::to_string(i) + "] is " + std::to_string(sorted) + " of " + std::to_string(length));
        require(i == 0 || row > rows.data<int64_t>()[i - 1], "rows must rise");  // each is one thread's
        penalised[static_cast<size_t>(i)] = {reinterpret_cast<float*>(matrix.row(row)),
                                             token_ids.data<int64_t>() + begin, sorted, length,
                                             penalties.data<float>()[i]};
    }
    nb::gil_scoped_release release;
    penalise_repetition(penalised.data(), static_cast<int>(count), matrix.width);
}

void py_add_amounts(const Tensor& logits, const Tensor& rows, const Tensor& bounds, const Tensor& token_ids,
                    const Tensor& amounts) {
    check_shape(rows, "rows", {-1});
    check_shape(token_ids, "token_ids", {-1});
    const int64_t count = rows.shape[0], num_ids = token_ids.shape[0];
    const Matrix matrix = logits_of(logits, rows, count);
    check_dense(bounds, "bounds", DType::i64, {count + 1});
    check_dense(amounts, "amounts", DType::f32, {num_ids});
    check_range(bounds.data<int64_t>(), count + 1, num_ids + 1, "bounds");
    std::vector<Addition> additions(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
        const int64_t begin = bounds.data<int64_t>()[i], length = bounds.data<int64_t>()[i + 1] - begin;
        const int64_t row = rows.data<int64_t>()[i];
        require(length >= 0, "bounds must rise");
        require(i == 0 || row > rows.data<int64_t>()[i - 1], "rows must rise");  // each is one thread's
        additions[static_cast<size_t>(i)] = {reinterpret_cast<float*>(matrix.row(row)),
                                             token_ids.data<int64_t>() + begin, amounts.data<float>() + begin, length};
    }
    nb::gil_scoped_release release;
    add_amounts(additions.data(), static_cast<int>(count), matrix.width);
}

}  // namespace

void bind_sampling(nb::module_& m) {
    m.def("draw_tokens", &py_draw_tokens, "logits"_a, "rows"_a, "numbers"_a, "allowed"_a.none(), "mask_of"_a.none(),
          "token_ids"_a, "sound"_a);
    m.def("score_tokens", &py_score_tokens, "logits"_a, "rows"_a, "token_ids"_a, "num_top"_a, "logprobs"_a, "ranks"_a,
          "top_ids"_a, "top_logprobs"_a);
    m.def("penalise_repetition", &py_penalise_repetition, "logits"_a, "rows"_a, "bounds"_a, "num_sorted"_a,
          "token_ids"_a, "penalties"_a);
    m.def("add_amounts", &py_add_amounts, "logits"_a, "rows"_a, "bounds"_a, "token_ids"_a, "amounts"_a);
}

}  // namespace octavo
