// Mixtures of experts: which experts each row uses, and in which order rows are multiplied.
#pragma once

#include <cstdint>
#include <vector>

namespace octavo {

// Each row uses the `active` experts with the largest scores, of the `active_groups` groups with the largest, as
// `ExpertsConfig` documents. The weights are the softmax of all scores or, if `normalised`, of their own; of `sigmoid`
// and `corrected` scores, these or their shares of the sum.
struct ExpertChoice {
    int active;
    bool normalised, sigmoid = false;
    bool corrected = false;  // a bias only changes which experts are chosen
    float scale = 1.0f;      // of the weights
    int groups = 1, active_groups = 1;
};

// The pairs of a row and an expert that it uses, in the order of experts, then of rows:
//
//     rows    | 0: experts 5, 2 | 1: experts 2, 7 |
//     pairs   | 0 x 2 | 1 x 2 | 0 x 5 | 1 x 7 |         sources 0 1 0 1; places of row 0: 2, 0, of row 1: 1, 3
class ExpertPairs {
  public:
    // Adds the bias, if not null, to the scores [rows][num_experts], which are void after it. The first of equal scores
    // is preferred. A row's choice depends on that row alone.
    void choose(float* scores, const float* bias, int64_t rows, int num_experts, const ExpertChoice& choice);
    int64_t count() const { return static_cast<int64_t>(sources_.size()); }
    const int32_t* sources() const { return sources_.data(); }  // the row of each pair
    const int64_t* begins() const { return begins_.data(); }    // [num_experts + 1], the first pair of each expert
    // Of a row, the largest score first.
    const float* weights(int64_t row) const { return weights_.data() + row * active_; }
    const int32_t* places(int64_t row) const { return places_.data() + row * active_; }
    int active() const { return active_; }

  private:
    int active_ = 0;
    std::vector<float> weights_;                       // [rows][active]
    std::vector<int32_t> experts_, places_, sources_;  // [rows][active], the same, [pairs]
    std::vector<float> ranked_;                        // [rows][experts], with the correction
    std::vector<int64_t> begins_, next_;
};

}  // namespace octavo
