#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "thread_pool.h"
#include "vocab_row.h"

namespace octavo {
namespace {

constexpr double kLog2E = 1.44269504088896340736;
// Bound of the exponent's scale: the lowest temperature would make it infinite, and the most likely token's mass NaN.
constexpr double kSteepest = 1e30;
// Masses, at most 1, are binned by their exponent and the first bits of their mantissa: few share a bin with the last
// one that top_p keeps.
constexpr int kBinShift = 17, kBins = 127 * 64 + 1;

Scratch& scratch() {
    thread_local Scratch mine;
    return mine;
}

// What logits are multiplied by, so that masses are powers of two.
float scale_of(double temperature) { return static_cast<float>(std::min(kLog2E / temperature, kSteepest)); }

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

// The last bin for which it and those above have at least the wanted mass, if `first` and those above have it; `above`
// receives the mass of those above. It tries bins near `guess` first, unless that is 0.
int last_bin_of(const std::vector<float>& masses, double wanted, int first, int guess, double& above) {
    int low = first, high = kBins;
    above = 0.0;
    for (int step = 1; high - low > 1; step *= 2) {
        const auto inside = [&](int bin) { return guess > 0 && low < bin && bin < high; };
        const int bin = inside(guess - step)   ? guess - step
                        : inside(guess + step) ? guess + step
                                               : low + (high - low) / 2;
        const double mass = kernels().mass_from(masses.data(), static_cast<int64_t>(masses.size()), lower_end(bin));
        if (mass >= wanted) {
            low = bin;
        } else {
            high = bin;
            above = mass;
        }
    }
    return low;
}
// Where it probably is, judging by every sixteenth block.
int guess_last_bin(const std::vector<float>& masses, double wanted, double total, int first, std::vector<float>& some) {
    constexpr size_t kBlock = kVocabBlock, kStride = 16 * kBlock;
    some.clear();
    for (size_t i = 0; i < masses.size(); i += kStride)
        some.insert(some.end(), masses.begin() + static_cast<int64_t>(i),
                    masses.begin() + static_cast<int64_t>(i + kBlock));
    double above;
    const double share = kernels().mass_from(some.data(), static_cast<int64_t>(some.size()), 0.0f) / total;
    return last_bin_of(some, wanted * share, first, 0, above);
}

// Masses down to which top_p looks for the least likely token that it keeps, one after the other.
constexpr float kMassesTried[] = {0x1p-8f, 0x1p-12f, 0x1p-16f, 0.0f};

// A draw with top_p alone, which may keep most of the vocabulary, so that no list of candidates is made.
int64_t draw_nucleus(Row& row, const Draw& draw, Scratch& memory) {
    const double total = row.add_up_masses(), wanted = draw.top_p * total;
    // Tokens with less than `least` have less mass together than top_p leaves out, by a margin for rounding: none of
    // them is kept. `least` is where a bin begins.
    constexpr double kMargin = 0.5, kLeastLeftOut = 1e-5;
    const double left_out = 1.0 - draw.top_p;
    const double least = kMargin * left_out * total / static_cast<double>(row.vocab());
    const int least_bin = left_out < kLeastLeftOut ? 0 : bin_of(static_cast<float>(least));
    const auto& masses = memory.values;
    int first_bin = 0;
    double found = 0.0;
    // First among the likely tokens, which have enough mass unless the row is flat.
    for (const float tried : kMassesTried) {
        first_bin = std::max(least_bin, bin_of(tried));
        const float bound = row.least_logit(lower_end(first_bin));
        if (first_bin > least_bin && row.is_in_many_blocks(bound)) continue;
        row.weigh_blocks_from(bound);
        found = kernels().mass_from(masses.data(), static_cast<int64_t>(masses.size()), lower_end(first_bin));
        if (found >= wanted) break;
    }
    double above;
    const int guess = guess_last_bin(masses, wanted, found, first_bin, memory.sample);
    const int last_bin = last_bin_of(masses, wanted, first_bin, guess, above);
    const float from = lower_end(last_bin), beyond = last_bin + 1 < kBins ? lower_end(last_bin + 1) : kInfinity;
    auto& sharers = memory.by_mass;
    sharers.clear();
    memory.places.resize(masses.size());
    const int64_t num_sharers =
        kernels().list_between(masses.data(), static_cast<int64_t>(masses.size()), from, beyond, memory.places.data());
    for (int64_t i = 0; i < num_sharers; ++i) {
        const auto place = memory.places[i];
        const int64_t id = memory.listed[place / kVocabBlock] + static_cast<int64_t>(place % kVocabBlock);
        if (id < row.vocab())
            sharers.push_back({row[id] / draw.temperature, static_cast<int32_t>(id), double{masses[place]}});
    }
    const Candidate last = sharers.empty() ? Candidate{kInfinity, 0, 0.0} : last_of_nucleus(sharers, wanted - above);
    auto& cumulative = memory.cumulative;
    std::fill(cumulative.begin(), cumulative.end(), 0.0);
    for (size_t block = 0; block < memory.listed.size(); ++block) {
        const float* const own = masses.data() + block * kVocabBlock;
        cumulative[memory.listed[block] / kVocabChunk] += kernels().mass_from(own, kVocabBlock, beyond);
    }
    for (const Candidate& each : sharers)
        if (!comes_before(last, each)) cumulative[each.token_id / kVocabChunk] += each.mass;
    std::partial_sum(cumulative.begin(), cumulative.end(), cumulative.begin());
    return row.draw(draw.uniform, [&](int64_t id, float mass) {
        const Candidate each{row[id] / draw.temperature, static_cast<int32_t>(id), double{mass}};
        return mass >= beyond || (mass >= from && !comes_before(last, each));
    });
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
    kept.resize(row.vocab());
    for (int64_t i = 0; i < row.vocab(); ++i) kept[i] = row[i] / draw.temperature < least ? -kInfinity : row[i];
    Row left(kept.data(), row.vocab(), memory, scale_of(draw.temperature));
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
        kth = values[draw.top_k - 1];
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
    return candidates[place].token_id;
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
    kept.resize(vocab);
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
    Row row(from.logits, from.count, memory, scale);
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
    row.each_from(row.numbers() ? row.reached_by(score.num_top) : -kInfinity, [&](int32_t token_id) {
        candidates.push_back({key(row[token_id]), token_id, 0.0});
    });
    std::partial_sort(candidates.begin(), candidates.begin() + score.num_top, candidates.end(), comes_before);
    for (int64_t i = 0; i < score.num_top; ++i) {
        score.top_ids[i] = candidates[i].token_id;
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
