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
    indices(rows, "rows", count, matrix.rows);
    return matrix;
}

// Some rows of logits, in ascending order, so that each is one thread's; row i's tokens are ids[bounds[i], bounds[i +
// 1]).
struct RowsWithTokens {
    Matrix logits;
    const int64_t *rows, *bounds, *ids;
    int64_t count, num_ids;
    RowsWithTokens(const Tensor& logits_, const Tensor& rows_, const Tensor& bounds_, const Tensor& ids_)
        : count(rows_.shape[0]), num_ids(ids_.shape[0]) {
        rows = dense<int64_t>(rows_, "rows", {-1});
        ids = dense<int64_t>(ids_, "token_ids", {-1});
        logits = logits_of(logits_, rows_, count);
        bounds = indices(bounds_, "bounds", count + 1, num_ids + 1);
        for (int64_t i = 0; i < count; ++i) {
            require(bounds[i] <= bounds[i + 1], "bounds must rise");
            require(i == 0 || rows[i] > rows[i - 1], "rows must rise");
        }
    }
    float* row(int64_t i) const { return reinterpret_cast<float*>(logits.row(rows[i])); }
    int64_t length(int64_t i) const { return bounds[i + 1] - bounds[i]; }
};

void py_draw_tokens(const Tensor& logits, const Tensor& rows, const Tensor& numbers, const Tensor& allowed,
                    const Tensor& mask_of, const Tensor& token_ids, const Tensor& sound) {
    const double* number = dense<double>(numbers, "numbers", {-1, 5});
    const int64_t count = numbers.shape[0];
    const Matrix matrix = logits_of(logits, rows, count);
    const int64_t words = (matrix.width + 31) / 32;
    const bool masked = !allowed.is_null();
    require(masked != mask_of.is_null(), "allowed and mask_of come together");
    const uint32_t* masks = masked ? dense<uint32_t>(allowed, "allowed", {-1, words}) : nullptr;
    const int64_t* each_mask = masked ? indices(mask_of, "mask_of", count, allowed.shape[0], -1) : nullptr;
    int64_t* const ids = dense<int64_t>(token_ids, "token_ids", {count});
    uint8_t* const valid = dense<uint8_t>(sound, "sound", {count});
    std::vector<Draw> draws(count);
    for (int64_t i = 0; i < count; ++i, number += 5) {
        const auto [uniform, temperature, min_p, top_p, top_k] =
            std::tuple{number[0], number[1], number[2], number[3], number[4]};
        require(uniform >= 0.0 && uniform < 1.0 && temperature >= 0.0 && min_p >= 0.0 && top_p > 0.0 && top_k >= 0.0,
                "numbers[" + std::to_string(i) +
                    "] must be a uniform number in [0, 1), a temperature, min_p, top_p "
                    "above 0 and top_k");
        const int64_t mask = masked ? each_mask[i] : -1;
        draws[i] = {
            .logits = reinterpret_cast<const float*>(matrix.row(rows.data<int64_t>()[i])),
            .allowed = mask < 0 ? nullptr : masks + mask * words,
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
        ids[i] = drawn[i].token_id;
        valid[i] = drawn[i].sound;
    }
}

void py_score_tokens(const Tensor& logits, const Tensor& rows, const Tensor& token_ids, const Tensor& num_top,
                     const Tensor& logprobs, const Tensor& ranks, const Tensor& top_ids, const Tensor& top_logprobs) {
    check_shape(token_ids, "token_ids", {-1});
    check_shape(top_ids, "top_ids", {-1, -1});
    const int64_t count = token_ids.shape[0], most = top_ids.shape[1];
    const Matrix matrix = logits_of(logits, rows, count);
    const int64_t* ids = indices(token_ids, "token_ids", count, matrix.width);
    const int64_t* each_num_top = indices(num_top, "num_top", count, std::min(most, matrix.width) + 1);
    float* const each_logprob = dense<float>(logprobs, "logprobs", {count});
    int64_t* const each_rank = dense<int64_t>(ranks, "ranks", {count});
    int64_t* const all_top_ids = dense<int64_t>(top_ids, "top_ids", {count, most});
    float* const all_top_logprobs = dense<float>(top_logprobs, "top_logprobs", {count, most});
    std::vector<Score> scores(count);
    for (int64_t i = 0; i < count; ++i)
        scores[i] = {
            .logits = reinterpret_cast<const float*>(matrix.row(rows.data<int64_t>()[i])),
            .token_id = ids[i],
            .num_top = each_num_top[i],
            .top_ids = all_top_ids + i * most,
            .top_logprobs = all_top_logprobs + i * most,
            .logprob = 0.0f,
            .rank = 0,
        };
    {
        nb::gil_scoped_release release;
        score_tokens(scores.data(), static_cast<int>(count), matrix.width);
    }
    for (int64_t i = 0; i < count; ++i) {
        each_logprob[i] = scores[i].logprob;
        each_rank[i] = scores[i].rank;
    }
}

void py_penalise_repetition(const Tensor& logits, const Tensor& row_indices, const Tensor& bounds,
                            const Tensor& num_sorted, const Tensor& token_ids, const Tensor& penalties) {
    const RowsWithTokens rows(logits, row_indices, bounds, token_ids);
    const int64_t* sorted = dense<int64_t>(num_sorted, "num_sorted", {rows.count});
    const float* penalty = dense<float>(penalties, "penalties", {rows.count});
    std::vector<Repetition> penalised;
    for (int64_t i = 0; i < rows.count; ++i) {
        require(sorted[i] >= 0 && sorted[i] <= rows.length(i), "num_sorted[" + std::to_string(i) + "] is " +
                                                                   std::to_string(sorted[i]) + " of " +
                                                                   std::to_string(rows.length(i)));
        penalised.push_back({rows.row(i), rows.ids + rows.bounds[i], sorted[i], rows.length(i), penalty[i]});
    }
    nb::gil_scoped_release release;
    penalise_repetition(penalised.data(), static_cast<int>(rows.count), rows.logits.width);
}

void py_add_amounts(const Tensor& logits, const Tensor& row_indices, const Tensor& bounds, const Tensor& token_ids,
                    const Tensor& amounts) {
    const RowsWithTokens rows(logits, row_indices, bounds, token_ids);
    const float* amount = dense<float>(amounts, "amounts", {rows.num_ids});
    std::vector<Addition> additions;
    for (int64_t i = 0; i < rows.count; ++i)
        additions.push_back({rows.row(i), rows.ids + rows.bounds[i], amount + rows.bounds[i], rows.length(i)});
    nb::gil_scoped_release release;
    add_amounts(additions.data(), static_cast<int>(rows.count), rows.logits.width);
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
