// A row of logits, whose tokens are weighed by their probabilities: what draws and scores are made of (sampling.cpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "kernels.h"

namespace octavo {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A token that filters may keep.
struct Candidate {
    float x;  // logit / temperature
    int32_t token_id;
    double mass;  // e^(x - the largest)
};

// Most likely first, ties by ascending id.
inline bool comes_before(const Candidate& a, const Candidate& b) {
    return a.x > b.x || (a.x == b.x && a.token_id < b.token_id);
}

// One thread's working memory, kept from row to row.
struct Scratch {
    std::vector<float> allowed_logits, kept_logits, maxima, chunk_maxima, chunk_masses, factors, values, sample;
    std::vector<int32_t> allowed_ids, listed, places;
    std::vector<Candidate> candidates, by_mass;
    std::vector<double> cumulative;
};

inline int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The first index whose cumulative mass exceeds the target; *share is how far into that index's own mass the target
// lies.
inline int64_t invert(const double* cumulative, int64_t count, double target, double* share) {
    // The total times u < 1 may round up to the total itself.
    target = std::min(target, std::nextafter(cumulative[count - 1], 0.0));
    const int64_t place =
        std::min<int64_t>(std::upper_bound(cumulative, cumulative + count, target) - cumulative, count - 1);
    const double before = place ? cumulative[place - 1] : 0.0;
    if (share) *share = (target - before) / (cumulative[place] - before);
    return place;
}

// A row of logits, and the maximum of each of its blocks. With a scale, the same pass over the row adds up the masses
// of each chunk: a row of a large vocabulary comes from memory, which leaves time for them.
class Row {
  public:
    Row(const float* logits, int64_t vocab, Scratch& memory, float scale = 0.0f)
        : x_(logits), vocab_(vocab), scale_(scale), memory_(memory) {
        memory.maxima.resize(divided_up(vocab, kVocabBlock));
        numbers_ = scale > 0.0f ? weigh_chunks() : kernels().block_maxima(logits, vocab, memory.maxima.data());
        const auto* maxima = reinterpret_cast<const char*>(memory.maxima.data());
        best_block_ = kernels().argmax[kF32](maxima, static_cast<int64_t>(memory.maxima.size()), &most_);
    }
    bool sound() const { return numbers_ && std::isfinite(most_); }
    bool numbers() const { return numbers_; }
    float most() const { return most_; }

    int64_t first_largest() const { return std::find(x_ + best_block_ * kVocabBlock, x_ + vocab_, most_) - x_; }

    // Puts the running sum of the chunks' masses into `memory.cumulative` and returns the total.
    double add_up_masses() {
        const int64_t chunks = num_chunks();
        float* const factors = memory_.factors.data();
        for (int64_t begin = 0; begin < chunks; begin += kVocabChunk)
            kernels().vocab_masses(memory_.chunk_maxima.data() + begin, std::min<int64_t>(chunks - begin, kVocabChunk),
                                   most_, scale_, factors + begin);
        double total = 0.0;
        for (int64_t chunk = 0; chunk < chunks; ++chunk)
            memory_.cumulative[chunk] = total += double{memory_.chunk_masses[chunk]} * factors[chunk];
        return total;
    }

    // Inverts the cumulative distribution in `memory.cumulative`. Tokens for which kept(token id, mass) is false count
    // as zero.
    template <class Kept> int64_t draw(double uniform, const Kept& kept) {
        const auto& chunks = memory_.cumulative;
        double share;
        const int64_t chunk =
            invert(chunks.data(), static_cast<int64_t>(chunks.size()), uniform * chunks.back(), &share);
        const int64_t begin = chunk * kVocabChunk, count = std::min(vocab_ - begin, int64_t{kVocabChunk});
        float inside[kVocabChunk];
        double cumulative[kVocabChunk], total = 0.0;
        kernels().vocab_masses(x_ + begin, count, most_, scale_, inside);
        for (int64_t i = 0; i < count; ++i) cumulative[i] = total += kept(begin + i, inside[i]) ? inside[i] : 0.0f;
        return begin + invert(cumulative, count, share * total, nullptr);
    }
    int64_t draw(double uniform) {
        return draw(uniform, [](int64_t, float) { return true; });
    }

    // The highest value that at least k tokens reach for certain, judging by the blocks' maxima.
    float reached_by(int64_t k) const {
        const auto& maxima = memory_.maxima;
        auto& values = memory_.values;
        const auto blocks = static_cast<int64_t>(maxima.size());
        if (k > blocks) return -kInfinity;
        // The maxima of several blocks together are nearly as good, as long as there are a few for each of k.
        const int64_t count = divided_up(blocks, std::max<int64_t>(1, blocks / (4 * k)));
        values.assign(maxima.begin(), maxima.begin() + count);
        for (int64_t begin = count; begin < blocks; begin += count)
            for (int64_t i = 0; i < std::min(count, blocks - begin); ++i)
                values[i] = std::max(values[i], maxima[begin + i]);
        std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
        return values[k - 1];
    }

    // A logit that is lower, a little, than any whose mass is at least `mass`.
    float least_logit(float mass) const {
        if (!(mass > 0.0f)) return -kInfinity;
        return most_ + (std::log2(mass) - 0.01f) / scale_ - std::fabs(most_) * 1e-6f;
    }

    // Calls take(token id), in ascending order, for every logit that is not below the bound.
    template <class Take> void each_from(float bound, const Take& take) const {
        for (size_t block = 0; block < memory_.maxima.size(); ++block) {
            if (memory_.maxima[block] < bound) continue;
            const int64_t begin = static_cast<int64_t>(block) * kVocabBlock;
            for (int64_t i = begin; i < std::min(begin + kVocabBlock, vocab_); ++i)
                if (!(x_[i] < bound)) take(static_cast<int32_t>(i));
        }
    }

    // Whether more than a quarter of the blocks have logits not below the bound.
    bool is_in_many_blocks(float bound) const {
        const auto& maxima = memory_.maxima;
        const auto count = std::count_if(maxima.begin(), maxima.end(), [&](float most) { return !(most < bound); });
        return count > static_cast<int64_t>(maxima.size()) / 4;
    }

    // Weighs the blocks that have logits not below the bound: `memory.listed` receives the first token of each, and
    // `memory.values` its tokens' masses, [blocks][kVocabBlock], zeros past the vocabulary's end.
    void weigh_blocks_from(float bound) {
        auto& firsts = memory_.listed;
        firsts.clear();
        for (size_t block = 0; block < memory_.maxima.size(); ++block)
            if (!(memory_.maxima[block] < bound)) firsts.push_back(static_cast<int32_t>(block) * kVocabBlock);
        memory_.values.resize(firsts.size() * kVocabBlock);
        for (size_t i = 0, next; i < firsts.size(); i = next) {
            next = i + 1;  // neighbours are weighed together
            while (next < firsts.size() && next - i < kVocabChunk / kVocabBlock &&
                   firsts[next] == firsts[next - 1] + kVocabBlock)
                ++next;
            const auto room = static_cast<int64_t>(next - i) * kVocabBlock;
            const int64_t count = std::min(room, vocab_ - firsts[i]);
            float* const to = memory_.values.data() + i * kVocabBlock;
            kernels().vocab_masses(x_ + firsts[i], count, most_, scale_, to);
            std::fill(to + count, to + room, 0.0f);
        }
    }

    float operator[](int64_t i) const { return x_[i]; }
    int64_t vocab() const { return vocab_; }

  private:
    int64_t num_chunks() const { return divided_up(vocab_, kVocabChunk); }
    // Compares the row, and weighs each chunk relative to its own maximum, since nothing else is known of the row yet.
    // A chunk is weighed after the next one has been compared, which then does not wait for it.
    bool weigh_chunks() {
        const auto chunks = num_chunks();
        for (auto* each : {&memory_.chunk_maxima, &memory_.chunk_masses, &memory_.factors}) each->resize(chunks);
        memory_.cumulative.resize(chunks);
        bool numbers = true;
        float before = -kInfinity;
        for (int64_t chunk = 0; chunk <= num_chunks(); ++chunk) {
            float most = -kInfinity;
            if (chunk < num_chunks()) {
                const int64_t begin = chunk * kVocabChunk, count = std::min<int64_t>(vocab_ - begin, kVocabChunk);
                float* const maxima = memory_.maxima.data() + begin / kVocabBlock;
                numbers &= kernels().block_maxima(x_ + begin, count, maxima);
                for (int64_t i = 0; i < divided_up(count, kVocabBlock); ++i) most = std::max(most, maxima[i]);
            }
            if (chunk > 0) weigh(chunk - 1, before);
            before = most;
        }
        return numbers;
    }
    // Masses relative to `most`.
    void weigh(int64_t chunk, float most) {
        const int64_t begin = chunk * kVocabChunk, count = std::min<int64_t>(vocab_ - begin, kVocabChunk);
        memory_.chunk_maxima[chunk] = most;
        memory_.chunk_masses[chunk] =
            most > -kInfinity ? kernels().vocab_masses(x_ + begin, count, most, scale_, nullptr) : 0.0f;
    }

    const float* x_;
    int64_t vocab_;
    float scale_;
    Scratch& memory_;
    bool numbers_;
    float most_;
    int64_t best_block_;  // the first that holds it
};

}  // namespace octavo
