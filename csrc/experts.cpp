#include "experts.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "thread_pool.h"

namespace octavo {
namespace {

constexpr int64_t kRowsPerTask = 32;

// The `most` largest of `count` numbers, the largest first; the first of equal ones is preferred.
int largest(const float* numbers, int count, int most, int32_t* found) {
    int num_found = 0;
    for (int i = 0; i < count; ++i) {
        if (num_found == most && !(numbers[i] > numbers[found[num_found - 1]])) continue;
        int place = num_found < most ? num_found++ : num_found - 1;
        for (; place > 0 && numbers[i] > numbers[found[place - 1]]; --place) found[place] = found[place - 1];
        found[place] = i;
    }
    return num_found;
}

// Takes the experts outside the chosen groups out of the choice.
void mask_groups(float* ranked, int num_experts, const ExpertChoice& choice) {
    const int size = num_experts / choice.groups;
    std::vector<float> best(choice.groups);
    std::vector<int32_t> kept(choice.active_groups);
    for (int group = 0; group < choice.groups; ++group) {
        int32_t two[2];
        const float* own = ranked + group * size;
        const int count = largest(own, size, choice.corrected ? 2 : 1, two);
        best[group] = own[two[0]] + (count > 1 ? own[two[1]] : 0.0f);
    }
    largest(best.data(), choice.groups, choice.active_groups, kept.data());
    std::sort(kept.begin(), kept.end());
    for (int group = 0; group < choice.groups; ++group)
        if (!std::binary_search(kept.begin(), kept.end(), group))
            std::fill_n(ranked + group * size, size, -std::numeric_limits<float>::infinity());
}

// Whether scores become weights, by their sigmoid or softmax, before experts are chosen.
bool scores_first(const ExpertChoice& choice) { return choice.sigmoid || choice.corrected; }

void score(float* scores, int num_experts, const ExpertChoice& choice) {
    if (choice.sigmoid) {
        for (int expert = 0; expert < num_experts; ++expert) scores[expert] = 1.0f / (1.0f + std::exp(-scores[expert]));
        return;
    }
    const float most = *std::max_element(scores, scores + num_experts);
    float sum = 0.0f;
    for (int expert = 0; expert < num_experts; ++expert) sum += scores[expert] = std::exp(scores[expert] - most);
    for (int expert = 0; expert < num_experts; ++expert) scores[expert] /= sum;
}

// The experts with the largest numbers in `ranked`, and their weights.
void choose_row(const float* scores, const float* ranked, int num_experts, const ExpertChoice& choice,
                int32_t* experts, float* weights) {
    largest(ranked, num_experts, choice.active, experts);
    float sum = 0.0f;
    if (scores_first(choice)) {
        for (int i = 0; i < choice.active; ++i) sum += weights[i] = scores[experts[i]];
        sum = choice.normalised ? sum + 1e-20f : 1.0f;
    } else {
        const float most = scores[experts[0]];
        for (int i = 0; i < choice.active; ++i) sum += weights[i] = std::exp(scores[experts[i]] - most);
        if (!choice.normalised) {
            sum = 0.0f;
            for (int expert = 0; expert < num_experts; ++expert) sum += std::exp(scores[expert] - most);
        }
    }
    for (int i = 0; i < choice.active; ++i) weights[i] = weights[i] / sum * choice.scale;
}

}  // namespace

void ExpertPairs::choose(float* scores, const float* bias, int64_t rows, int num_experts, const ExpertChoice& choice) {
    active_ = choice.active;
    const int64_t pairs = rows * active_;
    weights_.resize(pairs);
    experts_.resize(pairs);
    places_.resize(pairs);
    sources_.resize(pairs);
    const bool copies = choice.corrected || choice.groups > 1;  // the choice and the weights look at different numbers
    if (copies) ranked_.resize(rows * num_experts);
    parallel_for(static_cast<int>((rows + kRowsPerTask - 1) / kRowsPerTask), [&](int task) {
        for (int64_t row = task * kRowsPerTask; row < std::min(rows, (task + 1) * kRowsPerTask); ++row) {
            float* own = scores + row * num_experts;
            float* ranked = copies ? ranked_.data() + row * num_experts : own;
            if (scores_first(choice)) score(own, num_experts, choice);
            if (copies) std::copy_n(own, num_experts, ranked);
            for (int expert = 0; bias && expert < num_experts; ++expert) ranked[expert] += bias[expert];
            if (choice.groups > 1) mask_groups(ranked, num_experts, choice);
            choose_row(own, ranked, num_experts, choice, experts_.data() + row * active_,
                       weights_.data() + row * active_);
        }
    });
    begins_.assign(num_experts + 1, 0);
    for (const int32_t expert : experts_) ++begins_[expert + 1];
    for (int expert = 0; expert < num_experts; ++expert) begins_[expert + 1] += begins_[expert];
    next_ = begins_;
    for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t place = next_[experts_[pair]]++;
        places_[pair] = static_cast<int32_t>(place);
        sources_[place] = static_cast<int32_t>(pair / active_);
    }
}

}  // namespace octavo
