// The running state of attention: merging the states of parts of a context, and writing the output.
#pragma once

#include "level/hadamard.h"

namespace octavo::OCTAVO_LEVEL {

constexpr float kNoScore = -1e25f;  // the maximum of no scores: finite, so that differences are finite too

inline float exp2_scalar(float x) {
    float lanes[16];
    exp2(F16::set1(x)).store(lanes);
    return lanes[0];
}

// The state of rows: [row] of {weighted values [value_dim], sum [16 lanes], max, padding}. The sum is over the weights,
// for plain blocks as rounded for the product with the values; its lanes are added up once, at the end.
struct Rows {
    float* base;
    int value_dim;
    int first = 0;  // which of the task's rows is row 0
    int stride() const { return value_dim + kRowState; }
    float* values(int row) const { return base + row * stride(); }
    float* sum(int row) const { return values(row) + value_dim; }
    float& max(int row) const { return values(row)[value_dim + 16]; }
    Rows from(int row) const { return {values(row), value_dim, first + row}; }
    void clear(int rows) const {
        for (int r = 0; r < rows; ++r) {
            for (int d = 0; d < stride(); d += 16) F16::zero().store(values(r) + d);
            max(r) = kNoScore;
        }
    }
    // Adds the state of the same rows over a later part of the context: softmax is associative up to the rescaling of
    // sums to a common maximum. A part of which a row sees nothing leaves the row's bits unchanged.
    void merge(const Rows& later, int rows) const {
        for (int first = 0; first < rows; first += 16) {
            const int count = rows - first < 16 ? rows - first : 16;
            alignas(64) float mine[16] = {}, theirs[16] = {};
            for (int r = 0; r < count; ++r) mine[r] = max(first + r), theirs[r] = later.max(first + r);
            const F16 before = F16::load(mine), after = F16::load(theirs), top = OCTAVO_LEVEL::max(before, after);
            alignas(64) float tops[16], keep[16], add[16];
            top.store(tops);
            exp2(before - top).store(keep);
            exp2(after - top).store(add);
            for (int r = 0; r < count; ++r) {
                max(first + r) = tops[r];
                float *to = values(first + r), *from = later.values(first + r);
                for (int d = 0; d < value_dim + 16; d += 16)  // the sum follows the values
                    fma(F16::load(from + d), F16::set1(add[r]), F16::load(to + d) * F16::set1(keep[r])).store(to + d);
            }
        }
    }
};

// States of successive parts of a context, merged in a binary tree that depends on the parts' absolute indices alone:
//
//     part       0   1   2   3   4   5   6         of parts 0 .. 6, at most 0-3, 4-5 and 6 are kept at once;
//                 \ /     \ /     \ /   /          a node with one child is that child
//                0-1     2-3     4-5   6
//                   \   /           \ /
//                    0-3            4-6
//                       \          /
//                           0-6
class StateTree {
  public:
    StateTree(float* memory, int rows, int value_dim) : memory_(memory), rows_(rows), value_dim_(value_dim) {}
    // Where to write the next part's state before `add`ing it.
    Rows next() const { return at(count_); }
    void add(int index) {
        int level = 0;
        for (; index % 2; index /= 2, ++level) {
            if (count_ == 0 || nodes_[count_ - 1].level != level || nodes_[count_ - 1].index != index - 1) continue;
            at(count_ - 1).merge(at(count_), rows_);
            --count_;
        }
        nodes_[count_++] = {level, index};
    }
    Rows total() {
        for (; count_ > 1; --count_) at(count_ - 2).merge(at(count_ - 1), rows_);
        return at(0);
    }

  private:
    struct Node {
        int level, index;
    };
    Rows at(int node) const { return {memory_ + int64_t{node} * rows_ * (value_dim_ + kRowState), value_dim_}; }

    float* memory_;
    int rows_, value_dim_, count_ = 0;
    Node nodes_[kTreeStates];
};

// Zeros are written as +0. The sign of a sum that underflows depends on the rows that share its pass: -0 stays -0
// alone, and is +0 after zero times the value of a token that only another row sees.
template <class T> void write_rows(const AttendTask& task, const Rows& total) {
    const int num_rows = task.kv_heads * task.rows_per_head();
    for (int r = 0; r < num_rows; ++r) {
        const int in_head = r % task.rows_per_head(), token = in_head / task.group_size;
        const int head = r / task.rows_per_head() * task.group_size + in_head % task.group_size;
        float keep = 1.0f, sum = reduce_add(F16::load(total.sum(r))), top = total.max(r);
        if (task.sinks) {
            const float sink = task.sinks[head] * kLog2E;
            top = sink > top ? sink : top;
            keep = exp2_scalar(total.max(r) - top);
            sum = sum * keep + exp2_scalar(sink - top);
        }
        if (task.mass) task.mass[(r + 1) * task.mass_stride - 1] = {sum, top};
        const F16 factor = F16::set1(keep / sum);
        auto* out = reinterpret_cast<T*>(task.out + token * task.out_token_stride + head * task.out_head_stride);
        for (int d = 0; d < task.kv->value_dim; d += 16)
            (F16::load(total.values(r) + d) * factor + F16::zero()).store(out + d);
    }
}

}  // namespace octavo::OCTAVO_LEVEL
