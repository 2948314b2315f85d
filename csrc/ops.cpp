#include "ops.h"

#include <algorithm>
#include <vector>

#include "thread_pool.h"

namespace octavo {
namespace {

constexpr int64_t kElementsWorthAThread = 16384;  // about two microseconds, the cost of waking the threads

// Calls body(begin, end) over [0, rows), split so that each piece is worth a thread.
template <class Body> void parallel_rows(int64_t rows, int64_t elements_per_row, const Body& body) {
    if (rows == 0) return;
    const int64_t worth = rows * elements_per_row / kElementsWorthAThread;
    const int64_t pieces = std::clamp<int64_t>(worth, 1, std::min<int64_t>(rows, int64_t{num_threads()} * 4));
    parallel_for(static_cast<int>(pieces), [&](int i) { body(rows * i / pieces, rows * (i + 1) / pieces); });
}

// Calls body(i) for each row of x.
template <class Body> void each_row(const Matrix& x, const Body& body) {
    parallel_rows(x.rows, x.width, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) body(i);
    });
}

}  // namespace

void normalise(Storage of_x, Storage storage, const Matrix& x, const Matrix* y, const NormWeights& norm,
               const Matrix& out) {
    const auto kernel = kernels().normalise[of_x][storage][norm.kind];
    each_row(x, [&](int64_t i) {
        kernel(x.row(i), y ? y->row(i) : nullptr, norm, out.row(i), static_cast<int>(x.width));
    });
}

void add(Storage of_x, Storage storage, const Matrix& x, const Matrix& y) {
    const auto kernel = kernels().add[of_x][storage];
    each_row(x, [&](int64_t i) { kernel(x.row(i), y.row(i), x.width); });
}

void scale(Storage storage, const Matrix& x, float factor) {
    const auto kernel = kernels().scale[storage];
    each_row(x, [&](int64_t i) { kernel(x.row(i), factor, x.width); });
}

void weighted_sums(Storage storage, const Matrix& x, int count, const float* weights, const int32_t* places,
                   const Matrix& out) {
    const auto kernel = kernels().weighted_sum[storage];
    parallel_rows(out.rows, out.width * count, [&](int64_t begin, int64_t end) {
        std::vector<const char*> rows(count);
        for (int64_t i = begin; i < end; ++i) {
            for (int j = 0; j < count; ++j) rows[j] = x.row(places ? places[i * count + j] : i);
            kernel(rows.data(), weights + i * count, count, out.row(i), out.width);
        }
    });
}

void softcap(const Matrix& x, float cap) {
    const auto kernel = kernels().softcap;
    each_row(x, [&](int64_t i) { kernel(reinterpret_cast<float*>(x.row(i)), cap, x.width); });
}

void activate(Storage storage, Activation activation, const float* parameters, const Matrix& x) {
    const auto kernel = kernels().activate[storage][activation];
    each_row(x, [&](int64_t i) { kernel(x.row(i), parameters, x.width); });
}

void gated(Storage storage, Activation activation, const Matrix& gate_up, const Matrix& out) {
    const auto kernel = kernels().gated[storage][activation];
    const int64_t up = out.width * (storage == kBf16 ? 2 : 4);
    parallel_rows(out.rows, out.width * 4, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) kernel(gate_up.row(i), gate_up.row(i) + up, out.row(i), out.width);
    });
}

void rope_write(Storage storage, const RopeTask& task, int64_t num_tokens) {
    const auto kernel = kernels().rope_write[storage];
    const int64_t elements = int64_t{task.num_heads + task.kv->kv_heads} * task.key_dim * 4;
    // A cache line of keys holds 16 slots, see LayerKV: a piece ends where a line does.
    const auto line_end = [&](int64_t token) {
        while (token > 0 && token < num_tokens && task.slots[token] % 16 != 0 &&
               task.slots[token] == task.slots[token - 1] + 1)
            ++token;
        return token;
    };
    parallel_rows(num_tokens, elements, [&](int64_t begin, int64_t end) {
        if ((begin = line_end(begin)) < (end = line_end(end))) kernel(task, begin, end);
    });
}

void argmax(Storage storage, const Matrix& logits, int64_t* out) {
    const auto kernel = kernels().argmax[storage];
    const int64_t element = storage == kBf16 ? 2 : 4;
    const int64_t segments = logits.rows >= 2 * num_threads()
                                 ? 1
                                 : std::clamp<int64_t>(logits.width / kElementsWorthAThread, 1, num_threads());
    struct Best {
        float value;
        int64_t index;
    };
    std::vector<Best> best(logits.rows * segments);
    const auto find = [&](int i) {
        const int64_t row = i / segments, segment = i % segments;
        const int64_t begin = logits.width * segment / segments, end = logits.width * (segment + 1) / segments;
        best[i].index = begin + kernel(logits.row(row) + begin * element, end - begin, &best[i].value);
    };
    const auto choose = [&](int64_t row) {
        Best winner = best[row * segments];
        for (int64_t segment = 1; segment < segments; ++segment) {
            const Best& other = best[row * segments + segment];
            if (!(other.value <= winner.value) && winner.value == winner.value) winner = other;
        }
        out[row] = winner.index;
    };
    const int tasks = static_cast<int>(best.size());
    const bool worth_threads = logits.rows * logits.width >= 2 * kElementsWorthAThread;
    if (worth_threads) parallel_for(tasks, find);
    // One task wakes no thread, but compares subnormal numbers as they are, even if its thread flushes them.
    parallel_for(1, [&](int) {
        if (!worth_threads)
            for (int i = 0; i < tasks; ++i) find(i);
        for (int64_t row = 0; row < logits.rows; ++row) choose(row);
    });
}

}  // namespace octavo
