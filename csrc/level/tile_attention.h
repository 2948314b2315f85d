// Attention in bf16 tiles: of rows enough to be faster than vectors (attend.h), or of any if that must not show.
//
//     scores     up to 16 rows x 64 tokens     tiles 0 .. 3 += queries (4) . keys (5), 16 units at a time; if a head
//                                              has eight units more, half a step at the end, in tiles 6 and 7 (heads
//                                              of no multiple of eight units are not multiplied in tiles)
//     weights    in vectors
//     values     up to 16 rows x 64 dims       tiles 0 .. 3 += weights (4) . values (5), 32 tokens at a time
//
// Keys are tiles as stored in a block, 16 units x 16 tokens. Values of 32 tokens may be in two blocks of 16, and some
// may not have been written yet: those of a span of 64 are copied first, with zeros for what no row sees and a
// column of ones after them:
//
//     scratch.values     pair 0    | dim 0 | dim 1 | .. | 1 0 0 .. |      the product with the ones is
//                        pair 1    | ..                            |      the sum of the weights
//
// Every row goes through the same steps whatever rows it shares a tile with and whatever the size of a block.
#pragma once

#include "level/latent.h"
#include "level/simd/tiles.h"

namespace octavo::OCTAVO_LEVEL {

constexpr int kTileRows = 16;
constexpr int kTileTokens = 32;  // in one step of values

// Key heads of other sizes are left to vectors, for prompts and lone tokens alike, so that both have the same bits.
inline bool keys_fill_tiles(const LayerKV& kv) { return kv.key_units % 8 == 0; }

// What both kinds of passes share: tiles 0 .. 3 are sums, tile 4 the queries or weights, tile 5 keys or values; tiles 6
// and 7 are `Half` a step, or 6 is another tile of keys or values.
template <bool Half> class MatrixTiles {
  public:
    ~MatrixTiles() {
        if (rows_) release_tiles();
    }

  protected:
    static constexpr int kOther = Half ? 5 : 6;  // what odd vectors of keys or values are loaded into

    void configure(int rows) {
        if (rows == rows_) return;
        rows_ = rows;
        TileConfig config;
        for (int tile = 0; tile < 5; ++tile) config.set(tile, rows, 64);
        config.set(5, 16, 64);
        config.set(6, Half ? rows : 16, Half ? 32 : 64);
        config.set(7, 8, 64);
        load_tile_config(config);
    }

    template <int Queries, int Even, int Odd>
    static void add_scores(const Span& span, const Visible& visible, int64_t at, int64_t stride) {
        each_constant<kVectors>([&](auto v) __attribute__((always_inline)) {
            if (v < visible.first_vector || v >= visible.end_vector) return;
            constexpr int kKeys = v % 2 ? Odd : Even;
            tile_load<kKeys>(span.key[v] + at, stride);
            tile_dot_bf16<v, Queries, kKeys>();
        });
    }
    // Keys are [unit][16 tokens], with units `stride` bytes apart; a row of queries has units in `row_units`.
    template <bool Prefetch>
    static void score(const SpanPair& spans, const Visible& visible, int units, int64_t stride, const uint32_t* query,
                      int64_t row_units, float* scores) {
        each_constant<kVectors>([](auto v) { tile_zero<v>(); });
        int unit = 0;
        for (; unit + 16 <= units; unit += 16) {
            tile_load<4>(query + unit, row_units * 4);
            add_scores<4, 5, kOther>(spans.now, visible, unit * stride, stride);
            if constexpr (Prefetch)
                for (int u = unit; u < unit + 16; ++u)
                    for (int v = 0; v < kVectors; ++v) __builtin_prefetch(spans.next.key[v] + u * stride, 0, 2);
        }
        if constexpr (Half)
            if (unit < units) {
                tile_load<6>(query + unit, row_units * 4);
                add_scores<6, 7, 7>(spans.now, visible, unit * stride, stride);
            }
        each_constant<kVectors>([&](auto v) { tile_store<v>(scores + v * 16, kSpan * 4); });
    }

    static void rescale_rows(const Rows& rows, int first, int count, int width, const float* rescale) {
        for (int r = 0; r < count; ++r) {
            if (rescale[r] == 1.0f) continue;
            float* values = rows.values(first + r);
            for (int d = 0; d < width; d += 16) (F16::load(values + d) * F16::set1(rescale[r])).store(values + d);
        }
    }

    // N x 16 columns of the state. Values are [pair][column], with pairs `pair_units` apart.
    template <int N>
    static void add_columns(const uint32_t* weights, const uint32_t* values, int64_t pair_units,
                            const Visible& visible, float* sums, int64_t sums_stride) {
        const int begin = visible.low / kTileTokens * (kTileTokens / 2);
        const int end = (visible.high + kTileTokens - 1) / kTileTokens * (kTileTokens / 2);
        each_constant<N>([&](auto n) { tile_load<n>(sums + n * 16, sums_stride); });
        for (int pair = begin; pair < end; pair += kTileTokens / 2) {
            tile_load<4>(weights + pair, kSpan * 4);
            each_constant<N>([&](auto n) __attribute__((always_inline)) {
                constexpr int kValues = n % 2 ? kOther : 5;
                tile_load<kValues>(values + pair * pair_units + n * 16, pair_units * 4);
                tile_dot_bf16<n, 4, kValues>();
            });
        }
        each_constant<N>([&](auto n) { tile_store<n>(sums + n * 16, sums_stride); });
    }

  private:
    int rows_ = 0;  // that tiles are configured for; 0: none
};

class TilePasses : MatrixTiles<true> {
  public:
    TilePasses(int value_dim, AttendScratch& scratch) : stride_(value_dim + 16) {
        for (int pair = 0; pair < kSpan / 2; ++pair) {
            uint32_t* column = scratch.values + pair * stride_ + value_dim;
            store(U16::zero(), column);
            column[0] = 0x3f803f80;
        }
    }

    // Queries as [row][unit].
    static void pack(const AttendTask& task, int head, uint32_t* packed, AttendScratch&) {
        const int units = task.kv->key_units;
        for (int r = 0; r < task.rows_per_head(); ++r, packed += units)
            __builtin_memcpy(packed, query_row(task, head, r), units * sizeof(uint32_t));
    }

    void add(const AttendTask& task, const Split& split, const Rows& rows, AttendScratch& scratch) {
        const int num_rows = task.rows_per_head();
        each_span(task, split, [&](int head, const SpanPair& spans) {
            add_head(task, spans, scratch.query + head * num_rows * task.kv->key_units, rows.from(head * num_rows),
                     scratch);
        });
    }

  private:
    // All rows of one KV head over one span of the context.
    void add_head(const AttendTask& task, const SpanPair& stored, const uint32_t* query, const Rows& rows,
                  AttendScratch& scratch) {
        const int num_rows = task.rows_per_head();
        const Visible visible = visible_tokens(task, stored.now.begin, 0, num_rows);
        if (visible.nothing()) return;
        Span latents;
        const SpanPair spans{with_values<kBf16>(*task.kv, stored.now, visible, scratch, latents), stored.next};
        const bool one_pass = num_rows <= kTileRows;
        const bool finite = one_pass ? copy_values<true>(*task.kv, spans, visible, scratch.values)
                                     : copy_values<false>(*task.kv, spans, visible, scratch.values);
        if (finite) return pass_rows(task, spans, query, rows, scratch, 0, num_rows);
        // Zero times infinity is NaN: each token's rows are multiplied alone, with zeros for what they do not see.
        for (int row = 0; row < num_rows; row += task.group_size) {
            const Visible of_token = visible_tokens(task, spans.now.begin, row, task.group_size);
            if (of_token.nothing()) continue;
            copy_values<false>(*task.kv, spans, of_token, scratch.values);
            pass_rows(task, spans, query, rows, scratch, row, task.group_size);
        }
    }

    // Rows [begin, begin + count), divided into tiles as evenly as possible.
    void pass_rows(const AttendTask& task, const SpanPair& spans, const uint32_t* query, const Rows& rows,
                   AttendScratch& scratch, int begin, int count) {
        const RowGroups groups(count, kTileRows);
        for (int64_t group = 0; group < groups.count; ++group) {
            const int first = begin + static_cast<int>(groups.begin(group));
            const int num_rows = begin + static_cast<int>(groups.begin(group + 1)) - first;
            const Visible visible = visible_tokens(task, spans.now.begin, first, num_rows);
            if (visible.nothing()) continue;
            configure(num_rows);
            const int units = task.kv->key_units;
            const auto scores = task.rows_per_head() <= kTileRows ? score<true> : score<false>;
            scores(spans, visible, units, int64_t{task.kv->block_size} * 4, query + int64_t{first} * units, units,
                   scratch.scores);
            float rescale[kTileRows];
            softmax_rows<kBf16>(
                task, spans.now.begin, visible, first, num_rows, rows, rescale,
                [&](int r, int v) { return F16::load(scratch.scores + r * kSpan + v * 16); }, [](int) {},
                [&](int r, int v, F16 low, F16 high, float) {
                    store_both(low, high, reinterpret_cast<bf16*>(scratch.weights + r * kSpan) + v * 16);
                });
            rescale_rows(rows, first, num_rows, stride_, rescale);
            add_values(visible, first, rows, scratch);
        }
    }

    // Copies the values of the span's visible tokens, with zeros for the others. Returns false if a row that does not
    // see all of them might be multiplied by one that is not finite.
    template <bool Prefetch>
    bool copy_values(const LayerKV& kv, const SpanPair& spans, const Visible& visible, uint32_t* to) const {
        U16 special = U16::zero();
        const int64_t row_bytes = int64_t{kv.value_dim} * 4;
        to += visible.first_vector / 2 * 16 * stride_;
        for (int v = visible.first_vector / 2 * 2; v < (visible.end_vector + 1) / 2 * 2; ++v) {
            const char *from = spans.now.value[v], *next = spans.next.value[v];
            const bool whole = visible.low <= v * 16 && v * 16 + 16 <= visible.high;
            for (int pair = 0; pair < 8; ++pair, from += row_bytes, next += row_bytes, to += stride_) {
                const int token = v * 16 + pair * 2;
                const auto half = [&](int t) { return t >= visible.low && t < visible.high ? 0xffffu : 0u; };
                const uint32_t mask = whole ? 0xffffffffu : half(token) | half(token + 1) << 16;
                for (int dim = 0; dim < kv.value_dim; dim += 16) {
                    if constexpr (Prefetch) __builtin_prefetch(next + dim * 4, 0, 2);
                    if (mask == 0) {
                        store(U16::zero(), to + dim);
                        continue;
                    }
                    U16 values = U16::load(from + dim * 4);
                    if (!visible.all) {
                        values = values & U16::set1(mask);
                        // An exponent of all ones carries into the sign.
                        special = special | ((values & U16::set1(0x7f807f80)) + U16::set1(0x00800080));
                    }
                    store(values, to + dim);
                }
            }
        }
        return reduce_max(shift_right<15>(special) & U16::set1(0x00010001)) == 0;
    }

    // The columns are dimensions, and the sum after the last of them.
    void add_values(const Visible& visible, int first_row, const Rows& rows, const AttendScratch& scratch) const {
        const auto add = [&]<int N>(int column) {
            add_columns<N>(scratch.weights, scratch.values + column, stride_, visible,
                           rows.values(first_row) + column, int64_t{rows.stride()} * 4);
        };
        int column = 0;
        for (; column + 64 <= stride_; column += 64) add.template operator()<4>(column);
        if (column < stride_)
            with_constant<3>((stride_ - column) / 16, [&](auto columns) { add.template operator()<columns>(column); });
    }

    int stride_;  // of scratch.values, in units
};

}  // namespace octavo::OCTAVO_LEVEL
