// Attention over coded keys and values that are decoded to bf16 first: a span of one KV head into the core's
// first-level cache, once for all rows of the task, and then multiplied in vectors as plain blocks are (see
// plain_attention.h). Queries (rotated if keys are) and weights (times their token's scale) are rounded to bf16, as for
// plain blocks.
#pragma once

#include "level/decoded_rows.h"
#include "level/decode_span.h"
#include "level/plain_attention.h"

namespace octavo::OCTAVO_LEVEL {

// One decoded span for rows [first_row, first_row + R).
template <int R>
[[gnu::noinline]] void decoded_rows(const AttendTask& task, const LayerKV& kv, const SpanPair& spans, int first_row,
                                    const uint32_t* query, const Rows& rows, AttendScratch& scratch) {
    const Visible visible = visible_tokens(task, spans.now.begin, first_row, R);
    if (visible.nothing()) return;
    score_rows<kBf16, R, false>(kv, spans, visible, query, scratch.scores);
    float rescale[R];
    weigh_decoded_rows(task, spans.now.begin, visible, scratch.factors, first_row, R, rows, scratch, rescale);
    // What a row does not see has weight zero, and decoded values are finite.
    const int begin_unit = visible.low / 2, end_unit = (visible.high + 1) / 2;
    all_values<kBf16, R, false>(kv, spans, begin_unit, end_unit, scratch.weights, rescale, rows, first_row);
}

class DecodedRowPasses {
  public:
    explicit DecodedRowPasses(const LayerKV& kv) : decoded_(kv) {
        decoded_.key_units = kv.key_units / 2;
        decoded_.block_size = 16;
    }

    static void pack(const AttendTask& task, int head, uint32_t* packed, AttendScratch&) {
        bf16 query[kMaxRows][kMaxHeadDim];
        pack_groups<1>(task.rows_per_head(), task.kv->key_units / 2, packed, [&](int row, int r, const char** from) {
            load_rounded_query(task, head, row, query[r]);
            *from = reinterpret_cast<const char*>(query[r]);
        });
    }

    void add(const AttendTask& task, const Split& split, const Rows& rows, AttendScratch& scratch) const {
        const LayerKV& kv = *task.kv;
        const int num_rows = task.rows_per_head();
        each_span(task, split, [&](int head, const SpanPair& spans) {
            const Visible visible = visible_tokens(task, spans.now.begin, 0, num_rows);
            if (visible.nothing()) return;
            decode_to_plain(kv, spans, visible, scratch.keys, scratch.decoded);
            load_factors(task, spans.now, head, visible, scratch.factors);
            Span plain{};
            plain.begin = spans.now.begin;
            for (int v = 0; v < kVectors; ++v) {
                plain.key[v] = reinterpret_cast<const char*>(scratch.keys + v * 16 * decoded_.key_units);
                plain.value[v] = reinterpret_cast<const char*>(scratch.decoded + v * 8 * decoded_.value_dim);
            }
            const uint32_t* of_head = scratch.query + head * num_rows * kv.key_units;
            each_group(num_rows, decoded_.key_units, of_head, [&](int first, int count, const uint32_t* query) {
                with_constant<kMaxRows>(count, [&](auto constant) {
                    decoded_rows<constant>(task, decoded_, {plain, plain}, first, query, rows.from(head * num_rows),
                                           scratch);
                });
            });
        });
    }

  private:
    LayerKV decoded_;
};

}  // namespace octavo::OCTAVO_LEVEL
