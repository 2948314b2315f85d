#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace octavo {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kLog2E = 1.44269504088896340736;
// Bound of the exponent's scale: the lowest temperature would make it infinite, and the most likely token's mass NaN.
constexpr double kSteepest = 1e30;
// Masses, at most 1, are binned by their exponent and the first bits of their mantissa: few share a bin with the last
// one that top_p keeps.
constexpr int kBinShift = 19, kBins = 2048;

// A token that filters may keep.
struct Candidate {
    float x;  // logit / temperature
    int32_t token_id;
    double mass;  // e^(x - the largest)
};

// Most likely first, ties by ascending id.
bool comes_before(const Candidate& a, const Candidate& b) {
    return a.x > b.x || (a.x == b.x && a.token_id < b.token_id);
}

// One thread's working memory, kept from row to row.
struct Scratch {
    std::vector<float> allowed_logits, kept_logits, maxima, chunk_maxima, chunk_masses, factors, values;
    std::vector<int32_t> allowed_ids, listed;
    std::vector<Candidate> candidates, by_mass;
    std::vector<double> cumulative, bins;
};

Scratch& scratch() {
    thread_local Scratch mine;
    return mine;
}

// What logits are multiplied by, so that masses are powers of two.
float scale_of(double temperature) { return static_cast<float>(std::min(kLog2E / temperature, kSteepest)); }

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The first index whose cumulative mass exceeds the target; *share is how far into that index's own mass the target
// lies.
int64_t invert(const double* cumulative, int64_t count, double target, double* share) {
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
    // `keeps`: whether `memory.values` receives each token's mass, which takes a pass of its own.
    Row(const float* logits, int64_t vocab, Scratch& memory, float scale = 0.0f, bool keeps = false)
        : x_(logits), vocab_(vocab), scale_(scale), memory_(memory) {
        memory.maxima.resize(static_cast<size_t>(divided_up(vocab, kVocabBlock)));
        keeps = keeps && scale > 0.0f;
        if (scale > 0.0f) make_chunks();
        numbers_ = scale > 0.0f && !keeps ? weigh_chunks()
                                          : kernels().block_maxima(logits, vocab, memory.maxima.data());
        const auto* maxima = reinterpret_cast<const char*>(memory.maxima.data());
        best_block_ = kernels().argmax[kF32](maxima, static_cast<int64_t>(memory.maxima.size()), &most_);
        if (keeps) memory.values.resize(static_cast<size_t>(vocab));
        if (keeps)
            for (int64_t chunk = 0; chunk < num_chunks(); ++chunk) weigh(chunk, most_, memory.values.data());
    }
    bool sound() const { return numbers_ && std::isfinite(most_); }
    bool numbers() const { return numbers_; }
    float most() const { return most_; }

    int64_t first_largest() const {
        return std::find(x_ + best_block_ * kVocabBlock, x_ + vocab_, most_) - x_;
    }

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

    // Inverts the cumulative distribution in `memory.cumulative`. Tokens for which kept(token id) is false count as
    // zero.
    template <class Kept> int64_t draw(double uniform, const Kept& kept) {
        const auto& chunks = memory_.cumulative;
        double share;
        const int64_t chunk =
            invert(chunks.data(), static_cast<int64_t>(chunks.size()), uniform * chunks.back(), &share);
        const int64_t begin = chunk * kVocabChunk, count = std::min(vocab_ - begin, int64_t{kVocabChunk});
        float inside[kVocabChunk];
        double cumulative[kVocabChunk], total = 0.0;
        kernels().vocab_masses(x_ + begin, count, most_, scale_, inside);
        for (int64_t i = 0; i < count; ++i) cumulative[i] = total += kept(begin + i) ? inside[i] : 0.0f;
        return begin + invert(cumulative, count, share * total, nullptr);
    }
    int64_t draw(double uniform) {
        return draw(uniform, [](int64_t) { return true; });
    }

    // The highest value that at least k tokens reach for certain, judging by the blocks' maxima.
    float reached_by(int64_t k) const {
        auto& values = memory_.values;
        if (k > static_cast<int64_t>(memory_.maxima.size())) return -kInfinity;
        values = memory_.maxima;
        std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
        return values[static_cast<size_t>(k - 1)];
    }

    // A logit that is lower, a little, than any whose mass is at least `mass`.
    float least_logit(float mass) const {
        if (!(mass > 0.0f)) return -kInfinity;
        return most_ + (std::log2(mass) - 0.01f) / scale_ - std::fabs(most_) * 1e-6f;
    }

    // Calls take(begin, end) for every block, in ascending order, that has logits not below the bound.
    template <class Take> void each_block_from(float bound, const Take& take) const {
        for (size_t block = 0; block < memory_.maxima.size(); ++block) {
            if (memory_.maxima[block] < bound) continue;
            const int64_t begin = static_cast<int64_t>(block) * kVocabBlock;
            take(begin, std::min(begin + kVocabBlock, vocab_));
        }
    }

    // Calls take(token id), in ascending order, for every logit that is not below the bound.
    template <class Take> void each_from(float bound, const Take& take) const {
        each_block_from(bound, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i)
                if (!(x_[i] < bound)) take(static_cast<int32_t>(i));
        });
    }

    float operator[](int64_t i) const { return x_[i]; }
    int64_t vocab() const { return vocab_; }

  private:
    int64_t num_chunks() const { return divided_up(vocab_, kVocabChunk); }
    void make_chunks() {
        const auto chunks = static_cast<size_t>(num_chunks());
        for (auto* each : {&memory_.chunk_maxima, &memory_.chunk_masses, &memory_.factors}) each->resize(chunks);
        memory_.cumulative.resize(chunks);
    }
    // Compares the row, and weighs each chunk relative to its own maximum, since nothing else is known of the row yet.
    // A chunk is weighed after the next one has been compared, which then does not wait for it.
    bool weigh_chunks() {
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
            if (chunk > 0) weigh(chunk - 1, before, nullptr);
            before = most;
        }
        return numbers;
    }
    // Masses relative to `most`, and those of tokens into `masses` [vocab], if not null.
    void weigh(int64_t chunk, float most, float* masses) {
        const int64_t begin = chunk * kVocabChunk, count = std::min<int64_t>(vocab_ - begin, kVocabChunk);
        memory_.chunk_maxima[static_cast<size_t>(chunk)] = most;
        float* const to = masses ? masses + begin : nullptr;
        memory_.chunk_masses[static_cast<size_t>(chunk)] =
            most > -kInfinity ? kernels().vocab_masses(x_ + begin, count, most, scale_, to) : 0.0f;
    }

    const float* x_;
    int64_t vocab_;
    float scale_;
    Scratch& memory_;
    bool numbers_;
    float most_;
    int64_t best_block_;  // the first that holds it
};

// The least likely candidate that top_p keeps: those before it have less mass than wanted, those up to and including it
// have as much. Partitions as nth_element does, in linear time.
Candidate last_of_nucleus(std::vector<Candidate>& all, double wanted) {
    wanted = std::max(wanted, std::numeric_limits<double>::min());  // the most likely is always kept
    auto low = all.begin(), high = all.end();
    double before = 0.0;
    while (low != high) {
        auto pivot = low + (high - low) / 2;
        std::iter_swap(pivot, high - 1);
        const Candidate middle = *(high - 1);
        const auto cut = std::partition(low, high - 1, [&](const Candidate& c) { return comes_before(c, middle); });
        double above = before;
        for (auto each = low; each != cut; ++each) above += each->mass;
        std::iter_swap(cut, high - 1);
        if (above >= wanted) {
            high = cut;
        } else if (above + middle.mass >= wanted) {
            return middle;
        } else {
            before = above + middle.mass;
            low = cut + 1;
        }
    }
    // Because of rounding, all of them together fall just short of the mass.
    return low == all.begin() ? *low : *(low - 1);
}

int bin_of(float mass) {
    uint32_t bits;
    std::memcpy(&bits, &mass, 4);
    return std::min(static_cast<int>(bits >> kBinShift), kBins - 1);
}
float lower_end(int bin) {
    const uint32_t bits = static_cast<uint32_t>(bin) << kBinShift;
    float mass;
    std::memcpy(&mass, &bits, 4);
    return mass;
}

// A draw with top_p alone, which may keep most of the vocabulary, so that no list of candidates is made.
int64_t draw_nucleus(Row& row, const Draw& draw, Scratch& memory) {
    const int64_t vocab = row.vocab();
    auto& masses = memory.values;
    const double total = row.add_up_masses(), wanted = draw.top_p * total;
    // Tokens with less than `least` have less mass together than top_p leaves out, by a margin for rounding: none of
    // them is kept. `least` is where a bin begins.
    constexpr double kMargin = 0.5, kLeastLeftOut = 1e-5;
    const double left_out = 1.0 - draw.top_p;
    const double least = kMargin * left_out * total / static_cast<double>(vocab);
    const int least_bin = left_out < kLeastLeftOut ? 0 : bin_of(static_cast<float>(least));
    auto& listed = memory.listed;
    listed.resize(static_cast<size_t>(vocab));
    int32_t* end = listed.data();
    const float bound = row.least_logit(lower_end(least_bin));
    row.each_block_from(bound, [&](int64_t begin, int64_t block_end) {
        for (int64_t i = begin; i < block_end; ++i) {
            *end = static_cast<int32_t>(i);
            end += bin_of(masses[static_cast<size_t>(i)]) >= least_bin;
        }
    });
    const std::span<const int32_t> ids(listed.data(), end);
    const auto mass_of = [&](int32_t token_id) -> float& { return masses[static_cast<size_t>(token_id)]; };
    auto& bins = memory.bins;
    bins.assign(kBins, 0.0);
    for (const int32_t id : ids) bins[static_cast<size_t>(bin_of(mass_of(id)))] += mass_of(id);
    int last_bin = kBins - 1;
    double above = 0.0;
    for (; last_bin > 0 && above + bins[static_cast<size_t>(last_bin)] < wanted; --last_bin)
        above += bins[static_cast<size_t>(last_bin)];
    auto& sharers = memory.by_mass;
    sharers.clear();
    for (const int32_t id : ids)
        if (bin_of(mass_of(id)) == last_bin) sharers.push_back({row[id] / draw.temperature, id, mass_of(id)});
    if (!sharers.empty()) {
        const Candidate last = last_of_nucleus(sharers, wanted - above);
        for (const Candidate& each : sharers)
            if (comes_before(last, each)) mass_of(each.token_id) = 0.0f;
    }
    auto& cumulative = memory.cumulative;
    double kept = 0.0;
    const int32_t* next = ids.data();
    for (size_t chunk = 0; chunk < cumulative.size(); ++chunk) {
        double sums[4] = {};
        for (; next < end && *next / kVocabChunk == static_cast<int64_t>(chunk); ++next) {
            const float mass = mass_of(*next);
            sums[*next % 4] += bin_of(mass) >= last_bin ? mass : 0.0f;  // without a branch, which no one could predict
        }
        cumulative[chunk] = kept += sums[0] + sums[1] + (sums[2] + sums[3]);
    }
    return row.draw(draw.uniform, [&](int64_t id) { return bin_of(masses[static_cast<size_t>(id)]) >= last_bin; });
}

// More tokens than this are not put into a list: that takes ten times as long as passes over the row.
constexpr int64_t kMostListed = 4096;

// A draw where min_p and top_k may keep much of the vocabulary: with -inf for what they drop, then with top_p alone.
// `cut` is the least logit / temperature that min_p keeps.
int64_t draw_among_many(const Row& row, const Draw& draw, float bound, float cut, Scratch& memory) {
    float least = cut;
    if (draw.top_k) {
        auto& values = memory.values;
        values.clear();
        row.each_from(bound, [&](int32_t token_id) { values.push_back(row[token_id]); });
        if (draw.top_k <= static_cast<int64_t>(values.size())) {
            const auto kth = values.begin() + (draw.top_k - 1);
            std::nth_element(values.begin(), kth, values.end(), std::greater<float>());
            least = std::max(least, *kth / draw.temperature);
        }
    }
    auto& kept = memory.kept_logits;
    kept.resize(static_cast<size_t>(row.vocab()));
    for (int64_t i = 0; i < row.vocab(); ++i) kept[i] = row[i] / draw.temperature < least ? -kInfinity : row[i];
    Row left(kept.data(), row.vocab(), memory, scale_of(draw.temperature), draw.top_p < 1.0);
    if (draw.top_p < 1.0) return draw_nucleus(left, draw, memory);
    left.add_up_masses();
    return left.draw(draw.uniform);
}

// A draw with top_k or min_p, and perhaps top_p, among the tokens that they may keep.
int64_t draw_filtered(Row& row, const Draw& draw, Scratch& memory) {
    const float temperature = draw.temperature, best = row.most() / temperature;
    const float cut = draw.min_p > 0.0f ? best + std::log(draw.min_p) : -kInfinity;
    // The bound is one of logits, and a little lower: different logits may be equal once divided by the temperature.
    const auto below = [](float x) { return std::isfinite(x) ? x - std::fabs(x) * 1e-6f : -kInfinity; };
    auto& candidates = memory.candidates;
    candidates.clear();
    const float bound = below(std::max(cut * temperature, draw.top_k ? row.reached_by(draw.top_k) : -kInfinity));
    int64_t count = 0;
    row.each_from(bound, [&](int32_t) { ++count; });
    if (count > kMostListed) return draw_among_many(row, draw, bound, cut, memory);
    row.each_from(bound, [&](int32_t token_id) {
        const float x = row[token_id] / temperature;
        if (x == -kInfinity || x < cut) return;
        candidates.push_back({x, token_id, std::exp(static_cast<double>(x - best))});
    });
    float kth = -kInfinity;
    if (draw.top_k && draw.top_k < static_cast<int64_t>(candidates.size())) {
        auto& values = memory.values;
        values.clear();
        for (const Candidate& each : candidates) values.push_back(each.x);
        std::nth_element(values.begin(), values.begin() + (draw.top_k - 1), values.end(), std::greater<float>());
        kth = values[static_cast<size_t>(draw.top_k - 1)];
    }
    std::erase_if(candidates, [&](const Candidate& each) { return each.x < kth; });
    if (draw.top_p < 1.0) {
        double total = 0.0;
        for (const Candidate& each : candidates) total += each.mass;
        memory.by_mass = candidates;
        const Candidate last = last_of_nucleus(memory.by_mass, draw.top_p * total);
        std::erase_if(candidates, [&](const Candidate& each) { return comes_before(last, each); });
    }
    auto& cumulative = memory.cumulative;
    cumulative.clear();
    double kept = 0.0;
    for (const Candidate& each : candidates) cumulative.push_back(kept += each.mass);
    const int64_t place =
        invert(cumulative.data(), static_cast<int64_t>(cumulative.size()), draw.uniform * kept, nullptr);
    return candidates[static_cast<size_t>(place)].token_id;
}

constexpr int64_t kFewAllowed = 4096;

// What a mask leaves of a row: the whole row with -inf for forbidden tokens or, if few are allowed, these alone by
// ascending id.
struct Allowed {
    const float* logits;
    int64_t count;
    const int32_t* token_ids;  // null: an index is a token id
};

// Most masks allow a few tokens of a large vocabulary, so these many are skipped at a time.
constexpr int64_t kSkippedTokens = 512;

bool allows_none(const uint32_t* words) {
    uint32_t any = 0;
    for (int64_t i = 0; i < kSkippedTokens / 32; ++i) any |= words[i];
    return any == 0;
}

Allowed only_allowed(const Draw& draw, int64_t vocab, Scratch& memory) {
    auto& kept = memory.allowed_logits;
    auto& ids = memory.allowed_ids;
    kept.clear();
    ids.clear();
    const auto word_at = [&](int64_t begin) {
        const uint32_t word = draw.allowed[begin / 32];
        return vocab - begin < 32 ? word & ((1u << (vocab - begin)) - 1) : word;
    };
    int64_t begin = 0;
    while (begin < vocab && static_cast<int64_t>(ids.size()) <= kFewAllowed) {
        const int64_t end = std::min(begin + kSkippedTokens, vocab);
        if (end - begin == kSkippedTokens && allows_none(draw.allowed + begin / 32)) {
            begin = end;
            continue;
        }
        for (; begin < end; begin += 32)
            for (uint32_t word = word_at(begin); word; word &= word - 1) {
                const int64_t token_id = begin + __builtin_ctz(word);
                kept.push_back(draw.logits[token_id]);
                ids.push_back(static_cast<int32_t>(token_id));
            }
    }
    if (begin >= vocab && !ids.empty()) return {kept.data(), static_cast<int64_t>(ids.size()), ids.data()};
    kept.resize(static_cast<size_t>(vocab));
    for (begin = 0; begin < vocab; begin += 32) {
        const int64_t count = std::min<int64_t>(32, vocab - begin);
        const uint32_t word = word_at(begin);
        for (int64_t i = 0; i < count; ++i) kept[begin + i] = word >> i & 1 ? draw.logits[begin + i] : -kInfinity;
    }
    return {kept.data(), vocab, nullptr};
}

Drawn draw_among(Draw draw, const Allowed& from, Scratch& memory) {
    if (draw.top_k >= from.count) draw.top_k = 0;
    const bool lists = draw.top_k || draw.min_p > 0.0f;  // few tokens, as a rule, whose masses are all that matter
    const float scale = draw.temperature == 0.0f || lists ? 0.0f : scale_of(draw.temperature);
    Row row(from.logits, from.count, memory, scale, draw.top_p < 1.0);
    if (!row.sound()) return {0, false};
    if (draw.temperature == 0.0f) return {row.first_largest(), true};
    if (std::isinf(row.most() / draw.temperature)) return {0, false};
    if (lists) return {draw_filtered(row, draw, memory), true};
    if (draw.top_p < 1.0) return {draw_nucleus(row, draw, memory), true};
    row.add_up_masses();
    return {row.draw(draw.uniform), true};
}

Drawn draw_one(const Draw& draw, int64_t vocab) {
    Scratch& memory = scratch();
    const Allowed from = draw.allowed ? only_allowed(draw, vocab, memory) : Allowed{draw.logits, vocab, nullptr};
    Drawn drawn = draw_among(draw, from, memory);
    if (from.token_ids) drawn.token_id = from.token_ids[drawn.token_id];
    return drawn;
}

void score_one(Score& score, int64_t vocab) {
    Scratch& memory = scratch();
    Row row(score.logits, vocab, memory, static_cast<float>(kLog2E));
    const float given = row[score.token_id];
    score.rank = kernels().count_above(score.logits, vocab, given) + 1;
    const auto log_of_total = row.sound() ? std::log(row.add_up_masses()) : std::numeric_limits<double>::quiet_NaN();
    const auto logprob = [&](float x) { return static_cast<float>(double{x} - row.most() - log_of_total); };
    score.logprob = logprob(given);
    if (!score.num_top) return;
    const auto key = [](float x) { return std::isnan(x) ? kInfinity : x; };
    auto& candidates = memory.candidates;
    candidates.clear();
    row.each_from(row.numbers() ? row.reached_by(score.num_top) : -kInfinity,
                  [&](int32_t token_id) { candidates.push_back({key(row[token_id]), token_id, 0.0}); });
    std::partial_sort(candidates.begin(), candidates.begin() + score.num_top, candidates.end(), comes_before);
    for (int64_t i = 0; i < score.num_top; ++i) {
        score.top_ids[i] = candidates[static_cast<size_t>(i)].token_id;
        score.top_logprobs[i] = logprob(row[score.top_ids[i]]);
    }
}

// The bound of penalties.py: no request can make its logits infinite.
constexpr float kLargestLogit = 1e30f;

void penalise_one(const Repetition& row, int64_t vocab) {
    const int64_t *sorted_end = row.token_ids + row.num_sorted, *end = row.token_ids + row.count;
    for (const int64_t* id = row.token_ids; id < end; ++id) {
        if (*id < 0 || *id >= vocab) continue;
        if (id >= sorted_end && std::binary_search(row.token_ids, sorted_end, *id)) continue;
        float& x = row.logits[*id];
        x = x > 0.0f ? std::min(x / row.penalty, kLargestLogit) : x * row.penalty;
    }
}

}  // namespace

void penalise_repetition(const Repetition* rows, int count, int64_t vocab) {
    parallel_for(count, [&](int i) { penalise_one(rows[i], vocab); });
}

void add_amounts(const Addition* rows, int count, int64_t vocab) {
    parallel_for(count, [&](int i) {
        const Addition& row = rows[i];
        for (int64_t place = 0; place < row.count; ++place) {
            const int64_t id = row.token_ids[place];
            if (id >= 0 && id < vocab) row.logits[id] += row.amounts[place];
        }
    });
}

void draw_tokens(const Draw* draws, int count, int64_t vocab, Drawn* drawn) {
    parallel_for(count, [&](int i) { drawn[i] = draw_one(draws[i], vocab); });
}

void score_tokens(Score* scores, int count, int64_t vocab) {
    parallel_for(count, [&](int i) { score_one(scores[i], vocab); });
}

}  // namespace octavo
