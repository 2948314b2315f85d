// Row-wise kernels over whole tensors, split among threads.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace octavo {

struct Matrix {  // rows of contiguous elements
    char* base;
    int64_t rows, width, stride;  // stride in bytes
    char* row(int64_t index) const { return base + index * stride; }
};

// x += y, if not null; then out = the normalised x. x may be in float32 where y, weights and out are not.
void normalise(Storage of_x, Storage, const Matrix& x, const Matrix* y, const NormWeights&, const Matrix& out);
void add(Storage of_x, Storage, const Matrix& x, const Matrix& y);  // x += y
void scale(Storage, const Matrix& x, float factor);
// out's row i = sum of weights[i * count + j] times x's row places[i * count + j]; or x's own row i, if places is null.
// Sums are in float32 and in the order of j. out may be x if it is a sum of one row.
void weighted_sums(Storage, const Matrix& x, int count, const float* weights, const int32_t* places, const Matrix& out);
void softcap(const Matrix& x, float cap);  // of float32
void activate(Storage, Activation, const float* parameters, const Matrix& x);  // parameters of kXielu
void gated(Storage, Activation, const Matrix& gate_up, const Matrix& out);  // [T, 2 I] -> [T, I]
void rope_write(Storage, const RopeTask&, int64_t num_tokens);
void argmax(Storage, const Matrix& logits, int64_t* out);

}  // namespace octavo
