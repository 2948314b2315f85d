// Row-wise kernels and copies over whole tensors: how they are cut among threads.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace octavo {

struct Matrix {  // rows of contiguous elements
    char* base;
    int64_t rows, width, stride;  // stride in bytes
    char* row(int64_t index) const { return base + index * stride; }
};

void rms_norm(Storage, const Matrix& x, const Matrix* residual, const char* weight, const Matrix& out, float eps);
void gated(Storage, Activation, const Matrix& gate_up, const Matrix& out);  // [T, 2 I] -> [T, I]
void rope_write(Storage, const RopeTask&, int64_t num_tokens);
void argmax(Storage, const Matrix& logits, int64_t* out);
// Deal a GGUF weight [outputs][inputs / 32] of blocks into tiles of 16 outputs, the last one padded with zeros.
void pack_quant(QuantFormat, const uint8_t* blocks, int64_t outputs, int64_t inputs, uint8_t* packed);
int gguf_block_bytes(QuantFormat);  // of 32 weights of one output
// out = x @ weight.T + bias, the bias in `out.storage`.
void quant_linear(QuantFormat, const uint8_t* packed, Storage x_storage, const Matrix& x, const LinearOutput& out);
void bf16_linear(const char* weight, int64_t weight_stride, const Matrix& x, const LinearOutput& out);
// Copy blocks, (source, destination) pairs; every source is read before any destination is written.
void copy_blocks(char* arena, int64_t block_bytes, const int64_t* pairs, int64_t count);

}  // namespace octavo
