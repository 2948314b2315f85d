// Choosing tokens from rows of logits, and scoring them: what src/octavo/sampling/draw.py and logprobs.py do in torch.
//
// A row is worked on by one thread, in an order of its own: what comes of it depends on that row alone.
#pragma once

#include <cstdint>

namespace octavo {

// One draw. Filters are those of draw.py, and mean the same.
struct Draw {
    const float* logits;      // [vocab]
    const uint32_t* allowed;  // a bit a token, 32 in a word; null: every token is
    double uniform;           // in [0, 1)
    double top_p;             // 1: off
    float temperature;        // 0: the largest logit, and no draw
    float min_p;              // 0: off
    int64_t top_k;            // 0: off
};

struct Drawn {
    int64_t token_id;
    bool sound;  // the allowed logits make a distribution; else the token is void
};

void draw_tokens(const Draw* draws, int count, int64_t vocab, Drawn* drawn);

// What is known of a token beside its row: log-probability, and rank, 1 for the most likely.
struct Score {
    const float* logits;
    int64_t token_id;
    int64_t num_top;  // of the row's most likely tokens, at most as many as there are
    int64_t* top_ids;
    float* top_logprobs;
    float logprob;
    int64_t rank;
};

void score_tokens(Score* scores, int count, int64_t vocab);

// A row whose tokens are less likely to be drawn again: x / penalty where x > 0, x * penalty elsewhere.
struct Repetition {
    float* logits;              // [vocab], written to
    const int64_t* token_ids;   // [count]; those outside the vocabulary are passed over
    int64_t num_sorted, count;  // the first rise and are all different, so are the others in any order
    float penalty;
};

void penalise_repetition(const Repetition* rows, int count, int64_t vocab);

}  // namespace octavo
