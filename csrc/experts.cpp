#include "experts.h"

#include <algorithm>
#include <cmath>

#include "thread_pool.h"

namespace octavo {
namespace {

constexpr int64_t kRowsPerTask = 32;

// The experts with the largest scores, and their weights.
void choose_row(const float* scores, int num_experts, const ExpertChoice& choice, int32_t* experts, float* weights) {
    int count = 0;
    for (int expert = 0; expert < num_experts; ++expert) {
        if (count == choice.active && !(scores[expert] > scores[experts[count - 1]])) continue;
        int place = count < choice.active ? count++ : count - 1;
        for (; place > 0 && scores[expert] > scores[experts[place - 1]]; --place) experts[place] = experts[place - 1];
        experts[place] = expert;
    }
    const float largest = scores[experts[0]];
    float sum = 0.0f;
    for (int i = 0; i < choice.active; ++i) sum += weights[i] = std::exp(scores[experts[i]] - largest);
    if (!choice.normalised) {
        sum = 0.0f;
        for (int expert = 0; expert < num_experts; ++expert) sum += std::exp(scores[expert] - largest);
    }
    for (int i = 0; i < choice.active; ++i) weights[i] /= sum;
}

}  // namespace

void ExpertPairs::choose(float* scores, const float* bias, int64_t rows, int num_experts, const ExpertChoice& choice) {
    active_ = choice.active;
    const int64_t pairs = rows * active_;
    weights_.resize(pairs);
    experts_.resize(pairs);
    places_.resize(pairs);
    sources_.resize(pairs);
    parallel_for(static_cast<int>((rows + kRowsPerTask - 1) / kRowsPerTask), [&](int task) {
        for (int64_t row = task * kRowsPerTask; row < std::min(rows, (task + 1) * kRowsPerTask); ++row) {
            float* own = scores + row * num_experts;
            for (int expert = 0; bias && expert < num_experts; ++expert) own[expert] += bias[expert];
            choose_row(own, num_experts, choice, experts_.data() + row * active_, weights_.data() + row * active_);
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
