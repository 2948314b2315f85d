// Draws and scores of rows of logits, against float64.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "harness.h"
#include "sampling.h"
#include "thread_pool.h"

namespace octavo::test {
namespace {

constexpr int kVocabs[] = {1, 5, 16, 31, 33, 64, 65, 255, 256, 257, 700, 3001};

// A row that ends with its buffer, and a mask that ends with its own.
struct MaskedRow {
    int64_t vocab;
    Buffer logits, words;
    explicit MaskedRow(int64_t vocab)
        : vocab(vocab), logits(vocab * 4, 4 * random_int(0, 3)), words((vocab + 31) / 32 * 4, 4 * random_int(0, 3)) {
        const float scale = random_bool() ? 1.0f : 6.0f;
        for (int64_t i = 0; i < vocab; ++i) logits.as<float>()[i] = random_normal() * scale;
        for (int64_t i = 0; i < (vocab + 31) / 32; ++i)
            words.as<uint32_t>()[i] = static_cast<uint32_t>(random_engine()() & random_engine()());
        allow(random_int(0, static_cast<int>(vocab) - 1));
    }
    void allow(int64_t token_id) { words.as<uint32_t>()[token_id / 32] |= 1u << token_id % 32; }
    bool allows(int64_t token_id) const { return words.as<uint32_t>()[token_id / 32] >> token_id % 32 & 1; }
    double at(int64_t token_id) const { return logits.as<float>()[token_id]; }
};

TEST(a_draw_inverts_the_distribution_of_what_is_allowed) {
    for (int i = cases(60); i > 0; --i) {
        const MaskedRow row(random_of(kVocabs));
        const bool masked = random_bool();
        const float temperatures[] = {0.0f, 0.05f, 0.7f, 1.0f, 3.0f};
        Draw draw{};
        draw.logits = row.logits.as<float>();
        draw.allowed = masked ? row.words.as<uint32_t>() : nullptr;
        draw.uniform = std::uniform_real_distribution<double>()(random_engine());
        draw.top_p = 1.0;
        draw.temperature = random_of(temperatures);
        describe_case("vocab " + std::to_string(row.vocab) + " masked " + std::to_string(masked) + " temperature " +
                      std::to_string(draw.temperature));
        Drawn drawn{};
        draw_tokens(&draw, 1, row.vocab, &drawn);
        CHECK(drawn.sound && drawn.token_id >= 0 && drawn.token_id < row.vocab);
        CHECK(!masked || row.allows(drawn.token_id));
        double most = -INFINITY, total = 0, before = 0;
        for (int64_t t = 0; t < row.vocab; ++t)
            if (!masked || row.allows(t)) most = std::max(most, row.at(t));
        if (draw.temperature == 0.0f) {
            CHECK(row.at(drawn.token_id) == most);
            continue;
        }
        for (int64_t t = 0; t < row.vocab; ++t) {
            const double mass = !masked || row.allows(t) ? std::exp((row.at(t) - most) / draw.temperature) : 0.0;
            total += mass;
            if (t < drawn.token_id) before += mass;
        }
        const double own = std::exp((row.at(drawn.token_id) - most) / draw.temperature);
        CHECK(draw.uniform > before / total - 1e-5 && draw.uniform < (before + own) / total + 1e-5);
    }
}

TEST(filters_keep_the_most_likely) {
    for (int i = cases(60); i > 0; --i) {
        const MaskedRow row(random_of(kVocabs));
        Draw draw{};
        draw.logits = row.logits.as<float>();
        draw.uniform = std::uniform_real_distribution<double>()(random_engine());
        draw.temperature = 1.0f;
        draw.top_k = random_bool() ? random_int(1, 80) : 0;
        draw.top_p = random_bool() ? std::uniform_real_distribution<double>(0.01, 1.0)(random_engine()) : 1.0;
        draw.min_p = random_bool() ? 0.05f : 0.0f;
        if (draw.top_k >= row.vocab) draw.top_k = 0;
        describe_case("vocab " + std::to_string(row.vocab) + " top_k " + std::to_string(draw.top_k) + " top_p " +
                      std::to_string(draw.top_p) + " min_p " + std::to_string(draw.min_p));
        Drawn drawn{};
        draw_tokens(&draw, 1, row.vocab, &drawn);
        CHECK(drawn.sound);
        std::vector<double> masses;
        for (int64_t t = 0; t < row.vocab; ++t) masses.push_back(std::exp(row.at(t)));
        const double own = masses[drawn.token_id];
        std::sort(masses.begin(), masses.end(), std::greater<double>());
        CHECK(own >= draw.min_p * masses[0] * (1 - 1e-5));
        if (draw.top_k) CHECK(own >= masses[draw.top_k - 1]);
        double above = 0, total = 0;
        for (size_t t = 0; t < masses.size(); ++t) {
            if (draw.top_k && masses[t] < masses[draw.top_k - 1]) break;
            if (masses[t] < draw.min_p * masses[0]) break;
            total += masses[t];
            if (masses[t] > own) above += masses[t];
        }
        CHECK(above < draw.top_p * total + 1e-5 * total);
    }
}

TEST(a_row_without_a_distribution_is_said_to_be_none) {
    for (const float value : {NAN, INFINITY}) {
        MaskedRow row(300);
        const int place = random_int(0, 299);
        row.logits.as<float>()[place] = value;
        Draw draw{};
        draw.logits = row.logits.as<float>();
        draw.top_p = random_bool() ? 0.5 : 1.0;
        draw.temperature = random_bool() ? 1.0f : 0.0f;
        Drawn drawn{};
        draw_tokens(&draw, 1, row.vocab, &drawn);
        CHECK(!drawn.sound);
        for (int64_t w = 0; w < 10; ++w) row.words.as<uint32_t>()[w] = 0;
        draw.allowed = row.words.as<uint32_t>();
        draw_tokens(&draw, 1, row.vocab, &drawn);
        CHECK(!drawn.sound);
        row.allow((place + 1) % 300);
        draw_tokens(&draw, 1, row.vocab, &drawn);
        CHECK(drawn.sound && drawn.token_id == (place + 1) % 300);
    }
}

TEST(scores_are_log_probabilities_and_ranks) {
    for (int i = cases(40); i > 0; --i) {
        const MaskedRow row(random_of(kVocabs));
        const int64_t most = random_int(0, static_cast<int>(std::min<int64_t>(20, row.vocab)));
        std::vector<int64_t> ids(most);
        std::vector<float> logprobs(ids.size());
        Score score{row.logits.as<float>(),
                    random_int(0, static_cast<int>(row.vocab) - 1),
                    most,
                    ids.data(),
                    logprobs.data(),
                    0.0f,
                    0};
        describe_case("vocab " + std::to_string(row.vocab) + " top " + std::to_string(most));
        score_tokens(&score, 1, row.vocab);
        double total = 0;
        int64_t rank = 1;
        for (int64_t t = 0; t < row.vocab; ++t) {
            total += std::exp(row.at(t));
            rank += row.at(t) > row.at(score.token_id);
        }
        CHECK(score.rank == rank);
        CHECK_NEAR(score.logprob, row.at(score.token_id) - std::log(total), 1e-4, "a log-probability");
        std::vector<int64_t> order(row.vocab);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return row.at(a) > row.at(b); });
        for (size_t t = 0; t < ids.size(); ++t) {
            CHECK(ids[t] == order[t]);
            CHECK_NEAR(logprobs[t], row.at(order[t]) - std::log(total), 1e-4, "one of the likeliest");
        }
    }
}

TEST(a_penalty_is_applied_to_each_token_once) {
    for (int i = cases(30); i > 0; --i) {
        const MaskedRow row(random_of(kVocabs));
        std::vector<float> expected(row.logits.as<float>(), row.logits.as<float>() + row.vocab);
        std::vector<int64_t> ids;
        for (int64_t t = 0; t < row.vocab + 2; ++t)
            if (random_bool()) ids.push_back(t);
        const auto sorted = static_cast<int64_t>(ids.size());
        for (int64_t t = row.vocab + 1; t >= -1; --t)
            if (random_bool()) ids.push_back(t);
        std::vector<bool> penalised(expected.size());
        for (const int64_t id : ids)
            if (id >= 0 && id < row.vocab) penalised[id] = true;
        for (size_t t = 0; t < expected.size(); ++t)
            if (penalised[t]) expected[t] = expected[t] > 0 ? expected[t] / 1.5f : expected[t] * 1.5f;
        const Repetition repetition{row.logits.as<float>(), ids.data(), sorted, static_cast<int64_t>(ids.size()), 1.5f};
        penalise_repetition(&repetition, 1, row.vocab);
        for (size_t t = 0; t < expected.size(); ++t) CHECK(row.logits.as<float>()[t] == expected[t]);
    }
}

TEST(amounts_are_added_to_the_tokens_that_there_are) {
    for (int i = cases(20); i > 0; --i) {
        const MaskedRow row(random_of(kVocabs));
        std::vector<float> expected(row.logits.as<float>(), row.logits.as<float>() + row.vocab);
        std::vector<int64_t> ids;
        std::vector<float> amounts;
        for (int64_t t = row.vocab + 2; t >= -2; --t)
            if (random_bool()) {
                ids.push_back(t);
                amounts.push_back(0.5f * static_cast<float>(t % 7));
                if (t >= 0 && t < row.vocab) expected[t] += amounts.back();
            }
        const Addition addition{row.logits.as<float>(), ids.data(), amounts.data(), static_cast<int64_t>(ids.size())};
        add_amounts(&addition, 1, row.vocab);
        for (size_t t = 0; t < expected.size(); ++t) CHECK(row.logits.as<float>()[t] == expected[t]);
    }
}

TEST(rows_are_drawn_alike_by_any_number_of_threads) {
    std::vector<Draw> draws;
    const Buffer logits(64 * 500 * 4);
    fill_normal(logits, kF32, 2.0f);
    for (int i = 0; i < 64; ++i)
        draws.push_back(
            {logits.as<float>() + i * 500, nullptr, (i + 0.5) / 64, i % 3 ? 1.0 : 0.8, 1.0f, 0.0f, i % 4 ? 0 : 9});
    std::vector<Drawn> alone(64), together(64);
    for (size_t i = 0; i < 64; ++i) draw_tokens(&draws[i], 1, 500, &alone[i]);
    set_num_threads(random_int(2, 4));
    draw_tokens(draws.data(), 64, 500, together.data());
    for (size_t i = 0; i < 64; ++i) CHECK(alone[i].token_id == together[i].token_id && together[i].sound);
}

}  // namespace
}  // namespace octavo::test
