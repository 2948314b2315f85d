// Choosing tokens from rows of logits, and scoring them: what src/octavo/sampling/draw.py and logprobs.py do in torch.
//
// One thread works on a row, in an order that only the row determines: the result depends on that row alone.
#pragma once

#include <cstdint>

namespace octavo {

// One draw. The filters are those of draw.py.
struct Draw {
    const float* logits;      // [vocab]
    const uint32_t* allowed;  // one bit per token, 32 per word; null: all are allowed
    double uniform;           // in [0, 1)
    double top_p;             // 1: off
    float temperature;        // 0: take the largest logit
    float min_p;              // 0: off
    int64_t top_k;            // 0: off
};

struct Drawn {
    int64_t token_id;
    bool sound;  // whether the allowed logits form a distribution; if not, the token is void
};

void draw_tokens(const Draw* draws, int count, int64_t vocab, Drawn* drawn);

// A token's log-probability and rank in its row (1 for the most likely), and the row's most likely tokens.
struct Score {
    const float* logits;
    int64_t token_id;
    int64_t num_top;  // how many of the row's most likely tokens to return, at most the vocabulary
    int64_t* top_ids;
    float* top_logprobs;
    float logprob;
    int64_t rank;
};

void score_tokens(Score* scores, int count, int64_t vocab);

// A row in which some tokens are made less likely: x / penalty if x > 0, otherwise x * penalty.
struct Repetition {
    float* logits;              // [vocab], written to
    const int64_t* token_ids;   // [count]; ids outside the vocabulary are ignored
    int64_t num_sorted, count;  // the first num_sorted strictly increase; the others are distinct, in any order
    float penalty;
};

void penalise_repetition(const Repetition* rows, int count, int64_t vocab);

// A row, and amounts to add to the logits of some of its tokens.
struct Addition {
    float* logits;             // [vocab], written to
    const int64_t* token_ids;  // [count]; ids outside the vocabulary are ignored
    const float* amounts;      // [count]
    int64_t count;
};

void add_amounts(const Addition* rows, int count, int64_t vocab);

}  // namespace octavo
