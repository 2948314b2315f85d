// Attention over coded keys and values, and their encoding.
#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "attention.h"
#include "harness.h"
#include "ops.h"
#include "thread_pool.h"

namespace octavo::test {
namespace {

struct Sequence {
    int context, queries;
};
struct Codes {
    Code key, value;
    const char* name;
};
constexpr Codes kCodes[] = {{kCodeE4m3, kCodeE4m3, "fp8_e4m3"},
                            {kCodeE5m2, kCodeE5m2, "fp8_e5m2"},
                            {kCodeInt8, kCodeInt8, "int8"},
                            {kCodeInt8, kCodeInt4, "k8v4"},
                            {kCodeInt4, kCodeInt4, "int4"}};
bool is_float8(Code code) { return code == kCodeE4m3 || code == kCodeE5m2; }

double decode_float8(Code code, uint8_t bits) {
    const int mantissa_bits = code == kCodeE4m3 ? 3 : 2, bias = code == kCodeE4m3 ? 7 : 15;
    const int exponent = (bits & 0x7f) >> mantissa_bits, fraction = bits & ((1 << mantissa_bits) - 1);
    if (code == kCodeE4m3 ? (bits & 0x7f) == 0x7f : exponent == 31) return NAN;
    const double size = exponent ? std::ldexp((1 << mantissa_bits) + fraction, exponent - bias - mantissa_bits)
                                 : std::ldexp(fraction, 1 - bias - mantissa_bits);
    return bits & 0x80 ? -size : size;
}

// R x, as storage/codec/hadamard.py says; R^T x where `back`.
void rotate(std::vector<double>& x, bool back) {
    constexpr uint32_t kSigns[] = {0x8A5CD789, 0xD4E9AC3F, 0x2D1B7F46, 0x61E80B95,
                                   0xB7A39E12, 0x0C5D48F6, 0x93F2616B, 0x4E879AD0};
    const auto flip = [&] {
        for (size_t d = 0; d < x.size(); ++d)
            if (kSigns[d / 32] >> d % 32 & 1) x[d] = -x[d];
    };
    if (!back) flip();
    for (size_t begin = 0; begin < x.size();) {
        const size_t size = std::bit_floor(x.size() - begin);
        for (size_t stride = 1; stride < size; stride *= 2)
            for (size_t d = begin; d < begin + size; ++d)
                if (((d - begin) & stride) == 0) {
                    const double low = x[d], high = x[d + stride];
                    x[d] = low + high;
                    x[d + stride] = low - high;
                }
        for (size_t d = begin; d < begin + size; ++d) x[d] /= std::sqrt(static_cast<double>(size));
        begin += size;
    }
    if (back) flip();
}

// The keys or the values of a layer in buffers that are not a byte too long: codes, scales and zero points.
class Side {
  public:
    Side(Code code, bool keys, int64_t blocks, int heads, int dim, int block_size)
        : code_(code),
          keys_(keys),
          heads_(heads),
          dim_(dim),
          block_size_(block_size),
          bytes_(code == kCodeInt4 ? dim / 2 : dim),
          codes(blocks * heads * block_size * bytes_),
          scales(blocks * heads * block_size * 2),
          zeros(blocks * heads * block_size) {
        for (int head = 0; head < heads; ++head) head_scales_.push_back(std::ldexp(1.0f, random_int(-3, 3)) * 1.25f);
    }
    CodedSide side() const {
        CodedSide side{};
        side.code = code_;
        side.code_bytes = bytes_;
        if (is_float8(code_)) {
            side.head_scales = head_scales_.data();
            return side;
        }
        side.field[0] = scales.data();
        side.field_block_stride[0] = int64_t{heads_} * block_size_ * 2;
        side.field_head_stride[0] = block_size_ * 2;
        if (code_ == kCodeInt4) {
            side.field[1] = zeros.data();
            side.field_block_stride[1] = int64_t{heads_} * block_size_;
            side.field_head_stride[1] = block_size_;
        }
        return side;
    }
    int64_t head_stride() const { return block_size_ * bytes_; }

    // Any codes that an encoder writes: no -128, none that is no number.
    void draw(int64_t block, int head, int offset) {
        for (int d = 0; d < dim_; ++d) {
            uint8_t bits = static_cast<uint8_t>(random_int(0, 255));
            if (code_ == kCodeE4m3 && (bits & 0x7f) == 0x7f) bits ^= 1;
            if (code_ == kCodeE5m2) bits &= random_int(0, 9) ? 0xbf : 0x83;  // below 2, and some subnormals
            if (code_ == kCodeInt8 && bits == 0x80) bits = 0x81;
            set(block, head, offset, d, bits);
        }
        set_scale(block, head, offset, std::ldexp(1.0f + 0.25f * random_int(0, 3), random_int(-9, -5)));
        zeros.as<uint8_t>()[token(block, head, offset)] = static_cast<uint8_t>(random_int(0, 15));
    }
    void set_scale(int64_t block, int head, int offset, float scale) {
        scales.as<uint16_t>()[token(block, head, offset)] = float_to_bf16(scale);
    }
    // One vector, in the rotated space of int4.
    std::vector<double> decode(int64_t block, int head, int offset) const {
        std::vector<double> x;
        const double scale = is_float8(code_) ? head_scales_[static_cast<size_t>(head)]
                                              : bf16_to_float(scales.as<uint16_t>()[token(block, head, offset)]);
        const int zero = code_ == kCodeInt4 ? zeros.as<uint8_t>()[token(block, head, offset)] : 0;
        for (int d = 0; d < dim_; ++d) {
            const uint8_t bits = get(block, head, offset, d);
            x.push_back(scale * (is_float8(code_)     ? decode_float8(code_, bits)
                                 : code_ == kCodeInt8 ? static_cast<int8_t>(bits)
                                                      : bits - zero));
        }
        return x;
    }
    // What half a step of a code is worth, at a value of that size.
    double half_step(int64_t block, int head, int offset, double size) const {
        if (!is_float8(code_)) return 0.5 * bf16_to_float(scales.as<uint16_t>()[token(block, head, offset)]);
        const double scale = head_scales_[static_cast<size_t>(head)];
        const double least = std::ldexp(scale, code_ == kCodeE4m3 ? -10 : -17);
        return std::max(least, size * (code_ == kCodeE4m3 ? 0x1p-4 : 0x1p-3));
    }

  private:
    int64_t token(int64_t block, int head, int offset) const { return (block * heads_ + head) * block_size_ + offset; }
    // Which byte a dimension is in; of int4, and which nibble.
    int64_t place(int64_t block, int head, int offset, int d, int& shift) const {
        const int64_t base = (block * heads_ + head) * block_size_ * bytes_;
        shift = 0;
        if (!keys_) {
            const int half = dim_ / 2;
            shift = code_ == kCodeInt4 && d >= half ? 4 : 0;
            if (is_float8(code_)) return base + offset * bytes_ + d;
            return base + offset / 4 * 4 * bytes_ + (code_ == kCodeInt4 ? d % half : d) * 4 + offset % 4;
        }
        const int64_t group = base + offset / 16 * 16 * bytes_, lane = offset % 16;
        if (is_float8(code_)) return group + d * 16 + lane;
        if (code_ == kCodeInt8) return group + d / 4 * 64 + lane * 4 + d % 4;
        shift = d % 8 / 4 * 4;
        return group + d / 8 * 64 + lane * 4 + d % 4;
    }
    uint8_t get(int64_t block, int head, int offset, int d) const {
        int shift;
        const uint8_t byte = codes.as<uint8_t>()[place(block, head, offset, d, shift)];
        return code_ == kCodeInt4 ? byte >> shift & 15 : byte;
    }
    void set(int64_t block, int head, int offset, int d, uint8_t bits) {
        int shift;
        uint8_t& byte = codes.as<uint8_t>()[place(block, head, offset, d, shift)];
        byte = code_ == kCodeInt4 ? static_cast<uint8_t>((byte & ~(15 << shift)) | (bits & 15) << shift) : bits;
    }

    Code code_;
    bool keys_;
    int heads_, dim_, block_size_;
    int64_t bytes_;
    std::vector<float> head_scales_;

  public:
    const Buffer codes, scales, zeros;
};

// A batch over a shuffled pool. What nobody wrote is no number, where the format has one: codes of fp8, others' scales.
class Batch {
  public:
    Codes code;
    Storage storage;
    int key_dim, value_dim, kv_heads, group, block_size, window;
    float softcap;
    std::vector<Sequence> sequences;

    Batch() {
        constexpr int kDims[] = {64, 64, 128, 192, 256, 32, 80, 96}, kGroups[] = {1, 2, 3, 4, 7, 8, 20},
                      kBlocks[] = {16, 16, 32, 128}, kWindows[] = {0, 0, 0, 1, 7, 64, 100, 300};
        code = random_of(kCodes);
        storage = static_cast<Storage>(random_int(0, 2) == 0);
        key_dim = random_of(kDims);
        do value_dim = random_int(0, 2) ? key_dim : random_of(kDims);
        while (code.value == kCodeInt4 && value_dim % 32);
        kv_heads = random_int(1, 3);
        group = random_of(kGroups);
        block_size = random_of(kBlocks);
        window = random_of(kWindows);
        softcap = random_int(0, 3) ? 0.0f : 5.0f;
        for (int i = random_int(1, 3); i > 0; --i) {
            const int context = random_int(0, 7) ? random_int(1, 160) : random_int(500, 1300);
            sequences.push_back({context, random_bool() ? 1 : std::min(context, random_int(0, 40))});
        }
    }
    int heads() const { return kv_heads * group; }
    std::string describe() const {
        std::string text = std::string(code.name) + ", storage " + std::to_string(storage) + " key " +
                           std::to_string(key_dim) + " value " + std::to_string(value_dim) + " kv heads " +
                           std::to_string(kv_heads) + " group " + std::to_string(group) + " block " +
                           std::to_string(block_size) + " window " + std::to_string(window) + " softcap " +
                           std::to_string(softcap) + " threads " + std::to_string(num_threads());
        for (const Sequence& s : sequences)
            text += ", " + std::to_string(s.queries) + " of " + std::to_string(s.context);
        return text;
    }
};

class Memory {
  public:
    explicit Memory(const Batch& batch)
        : batch_(batch),
          start_(1, 0),
          blocks_(count_blocks(batch)),
          keys(batch.code.key, true, blocks_, batch.kv_heads, batch.key_dim, batch.block_size),
          values(batch.code.value, false, blocks_, batch.kv_heads, batch.value_dim, batch.block_size),
          query(count_queries(batch) * batch.heads() * batch.key_dim * element_bytes(batch.storage)),
          out(count_queries(batch) * batch.heads() * batch.value_dim * element_bytes(batch.storage)) {
        std::vector<int32_t> free;
        for (int32_t block = 1; block < blocks_; ++block) free.push_back(block);
        std::shuffle(free.begin(), free.end(), random_engine());
        for (const Sequence& s : batch.sequences) stride_ = std::max(stride_, blocks_of(batch, s));
        tables_.assign(batch.sequences.size() * static_cast<size_t>(stride_), 0);
        for (size_t i = 0; i < batch.sequences.size(); ++i) {
            const Sequence& s = batch.sequences[i];
            rows_.push_back(static_cast<int64_t>(i));
            start_.push_back(start_.back() + s.queries);
            contexts_.push_back(s.context);
            const int seen = batch.window ? std::max(0, s.context - s.queries - batch.window + 1) : 0;
            for (int64_t block = seen / batch.block_size; block < blocks_of(batch, s); ++block) {
                tables_[i * static_cast<size_t>(stride_) + static_cast<size_t>(block)] = free.back();
                free.pop_back();
            }
            for (int token = seen; token < s.context; ++token)
                for (int head = 0; head < batch.kv_heads; ++head) {
                    keys.draw(block(i, token), head, token % batch.block_size);
                    values.draw(block(i, token), head, token % batch.block_size);
                }
        }
        fill_normal(query, batch.storage, 0.05f);
    }
    int64_t block(size_t seq, int token) const {
        return tables_[seq * static_cast<size_t>(stride_) + static_cast<size_t>(token / batch_.block_size)];
    }
    // Of the first sequence's queries [first, first + count) alone, with the context that the last of them sees.
    AttentionCall part(int first, int count) {
        contexts_[0] = batch_.sequences[0].context - batch_.sequences[0].queries + first + count;
        start_ = {0, count};
        AttentionCall all = call();
        all.num_seqs = 1;
        all.query += first * all.query_token_stride;
        all.out += first * all.out_token_stride;
        all.num_tokens = count;
        return all;
    }
    AttentionCall call() const {
        AttentionCall call{};
        LayerKV& kv = call.kv;
        kv.key = keys.codes.data();
        kv.value = values.codes.data();
        kv.key_head_stride = keys.head_stride();
        kv.key_block_stride = batch_.kv_heads * kv.key_head_stride;
        kv.value_head_stride = values.head_stride();
        kv.value_block_stride = batch_.kv_heads * kv.value_head_stride;
        kv.num_blocks = blocks_;
        kv.kv_heads = batch_.kv_heads;
        kv.key_units = batch_.key_dim;
        kv.value_dim = batch_.value_dim;
        kv.block_size = batch_.block_size;
        kv.storage = batch_.storage;
        kv.key_side = keys.side();
        kv.value_side = values.side();
        call.query = query.data();
        call.out = out.data();
        call.query_head_stride = batch_.key_dim * element_bytes(batch_.storage);
        call.query_token_stride = batch_.heads() * call.query_head_stride;
        call.out_head_stride = batch_.value_dim * element_bytes(batch_.storage);
        call.out_token_stride = batch_.heads() * call.out_head_stride;
        call.block_tables = tables_.data();
        call.table_rows = rows_.data();
        call.query_start = start_.data();
        call.context_lens = contexts_.data();
        call.block_table_stride = call.max_blocks = stride_;
        call.num_tokens = start_.back();
        call.scale = 1.0f / std::sqrt(static_cast<float>(batch_.key_dim));
        call.softcap = batch_.softcap;
        call.num_seqs = static_cast<int>(batch_.sequences.size());
        call.num_heads = batch_.heads();
        call.window = batch_.window;
        return call;
    }
    std::vector<char> output() const { return {out.data(), out.data() + out.size()}; }
    int start(size_t seq) const { return start_[seq]; }

  private:
    static int64_t blocks_of(const Batch& batch, const Sequence& s) {
        return (s.context + batch.block_size - 1) / batch.block_size;
    }
    static int64_t count_blocks(const Batch& batch) {
        int64_t count = 2;  // the null block, and one of nobody
        for (const Sequence& s : batch.sequences) count += blocks_of(batch, s);
        return count;
    }
    static int64_t count_queries(const Batch& batch) {
        int64_t count = 0;
        for (const Sequence& s : batch.sequences) count += s.queries;
        return count;
    }

    const Batch& batch_;
    std::vector<int32_t> start_, contexts_, tables_;
    std::vector<int64_t> rows_;
    int64_t blocks_, stride_ = 0;

  public:
    Side keys, values;
    const Buffer query, out;
};

// The textbook's sums over what the codes stand for, one query row at a time.
void check_row(const Batch& batch, const Memory& memory, size_t seq, int query, int head) {
    const Sequence s = batch.sequences[seq];
    const int position = s.context - s.queries + query, kv_head = head / batch.group;
    const int low = batch.window ? std::max(0, position - batch.window + 1) : 0;
    const int64_t row = int64_t{memory.start(seq) + query} * batch.heads() + head;
    std::vector<double> q, weights;
    for (int d = 0; d < batch.key_dim; ++d)
        q.push_back(load(memory.query.data(), row * batch.key_dim + d, batch.storage));
    if (batch.code.key == kCodeInt4) rotate(q, false);
    double top = -INFINITY, sum = 0;
    for (int token = low; token <= position; ++token) {
        const std::vector<double> key = memory.keys.decode(memory.block(seq, token), kv_head, token % batch.block_size);
        double score = 0;
        for (size_t d = 0; d < q.size(); ++d) score += q[d] * key[d];
        score /= std::sqrt(static_cast<double>(batch.key_dim));
        if (batch.softcap > 0) score = batch.softcap * std::tanh(score / batch.softcap);
        weights.push_back(score);
        top = std::max(top, score);
    }
    for (double& weight : weights) sum += weight = std::exp(weight - top);
    std::vector<double> expected(static_cast<size_t>(batch.value_dim)), sizes(expected.size(), 1e-9);
    for (int token = low; token <= position; ++token) {
        const std::vector<double> value =
            memory.values.decode(memory.block(seq, token), kv_head, token % batch.block_size);
        for (size_t d = 0; d < value.size(); ++d) {
            expected[d] += weights[static_cast<size_t>(token - low)] / sum * value[d];
            sizes[d] += weights[static_cast<size_t>(token - low)] / sum * std::abs(value[d]);
        }
    }
    double size = 0;  // a rotation spreads what one dimension is rounded by over all
    for (const double of : sizes) size = std::max(size, of);
    if (batch.code.value == kCodeInt4) rotate(expected, true);
    for (int d = 0; d < batch.value_dim; ++d)
        CHECK_NEAR(load(memory.out.data(), row * batch.value_dim + d, batch.storage), expected[static_cast<size_t>(d)],
                   size * (batch.storage == kBf16 ? 0x1p-6 : 0x1p-11) +
                       std::abs(expected[static_cast<size_t>(d)]) * rounding(batch.storage),
                   "dimension " + std::to_string(d) + " of head " + std::to_string(head) + " of query " +
                       std::to_string(query) + " of sequence " + std::to_string(seq));
}

TEST(attention_over_codes_agrees_with_float64) {
    for (int i = cases(40); i > 0; --i) {
        set_num_threads(random_int(1, 6));
        const Batch batch;
        const Memory memory(batch);
        AttentionCall call = memory.call();
        call.exact = i % 2 == 0;
        describe_case(batch.describe());
        attend(call);
        for (size_t seq = 0; seq < batch.sequences.size(); ++seq)
            for (int query = 0; query < batch.sequences[seq].queries; ++query)
                for (int head = 0; head < batch.heads(); ++head)
                    if (random_int(0, query + 1 == batch.sequences[seq].queries ? 3 : 30) == 0)
                        check_row(batch, memory, seq, query, head);
    }
}

TEST(attention_over_codes_has_the_same_bits_in_any_parts_and_on_any_number_of_threads) {
    for (int i = cases(20); i > 0; --i) {
        Batch batch;
        const int context = random_int(0, 3) ? random_int(2, 200) : random_int(1025, 1500);
        batch.sequences = {{context, std::min(context, random_int(2, 60))}};
        Memory memory(batch);
        set_num_threads(1);
        attend(memory.call());
        const std::vector<char> expected = memory.output();
        std::memset(memory.out.data(), 0xff, static_cast<size_t>(memory.out.size()));
        set_num_threads(random_int(1, 7));
        describe_case(batch.describe());
        for (int first = 0; first < batch.sequences[0].queries;) {
            const int count = random_int(1, std::min(batch.sequences[0].queries - first, random_bool() ? 1 : 40));
            attend(memory.part(first, count));
            first += count;
        }
        CHECK(memory.output() == expected);
    }
}

// A scale that is no number, of a token that later queries see and earlier ones do not.
TEST(a_scale_that_a_query_does_not_see_leaves_its_bits) {
    for (int i = cases(20); i > 0; --i) {
        Batch batch;
        do batch.code = random_of(kCodes);
        while (is_float8(batch.code.key) || (batch.code.value == kCodeInt4 && batch.value_dim % 32));
        const int context = random_int(2, 200);
        batch.sequences = {{context, random_int(2, std::min(context, 60))}};
        set_num_threads(random_int(1, 3));
        Memory memory(batch);
        attend(memory.call());
        const std::vector<char> sound = memory.output();
        const int queries = batch.sequences[0].queries, token = random_int(context - queries, context - 1);
        describe_case(batch.describe() + ", token " + std::to_string(token));
        for (int head = 0; head < batch.kv_heads; ++head)
            for (Side* side : {&memory.keys, &memory.values})
                side->set_scale(memory.block(0, token), head, token % batch.block_size, random_bool() ? NAN : INFINITY);
        attend(memory.call());
        const int64_t row_bytes = int64_t{batch.heads()} * batch.value_dim * element_bytes(batch.storage);
        for (int query = 0; query < queries; ++query) {
            const int position = context - queries + query;
            if (token <= position && (!batch.window || token > position - batch.window)) continue;
            CHECK(std::memcmp(memory.out.data() + query * row_bytes, &sound[static_cast<size_t>(query * row_bytes)],
                              static_cast<size_t>(row_bytes)) == 0);
        }
    }
}

TEST(what_is_written_in_codes_is_within_half_a_step) {
    for (int i = cases(30); i > 0; --i) {
        Batch batch;
        const int tokens = random_int(1, 40), block_size = batch.block_size, heads = random_int(1, 3);
        const int64_t blocks = tokens / block_size + 2;
        set_num_threads(random_int(1, 4));
        describe_case(batch.describe() + ", " + std::to_string(tokens) + " tokens");
        const Side keys(batch.code.key, true, blocks, batch.kv_heads, batch.key_dim, block_size),
            values(batch.code.value, false, blocks, batch.kv_heads, batch.value_dim, block_size);
        const int width = (heads + batch.kv_heads) * batch.key_dim + batch.kv_heads * batch.value_dim;
        const Buffer qkv(int64_t{tokens} * width * element_bytes(batch.storage));
        fill_normal(qkv, batch.storage);
        LayerKV kv{};
        kv.key = keys.codes.data();
        kv.value = values.codes.data();
        kv.key_head_stride = keys.head_stride();
        kv.key_block_stride = batch.kv_heads * kv.key_head_stride;
        kv.value_head_stride = values.head_stride();
        kv.value_block_stride = batch.kv_heads * kv.value_head_stride;
        kv.num_blocks = blocks;
        kv.kv_heads = batch.kv_heads;
        kv.key_units = batch.key_dim;
        kv.value_dim = batch.value_dim;
        kv.block_size = block_size;
        kv.storage = batch.storage;
        kv.key_side = keys.side();
        kv.value_side = values.side();
        std::vector<int64_t> slots, positions(static_cast<size_t>(tokens), 0);
        for (int64_t slot = 0; slot < blocks * block_size; ++slot) slots.push_back(slot);
        std::shuffle(slots.begin(), slots.end(), random_engine());
        RopeTask task{};
        task.qkv = qkv.data();
        task.qkv_stride = int64_t{width} * element_bytes(batch.storage);
        task.kv = &kv;
        task.positions = positions.data();
        task.slots = slots.data();
        task.num_heads = heads;
        task.key_dim = batch.key_dim;
        rope_write(batch.storage, task, tokens);
        const auto check = [&](const Side& side, Code code, int token, int head, int first, int dim) {
            const int64_t slot = slots[static_cast<size_t>(token)], block = slot / block_size;
            const int offset = static_cast<int>(slot % block_size);
            const std::vector<double> found = side.decode(block, head, offset);
            std::vector<double> expected;
            for (int d = 0; d < dim; ++d)
                expected.push_back(load(qkv.data(), int64_t{token} * width + first + head * dim + d, batch.storage));
            if (code == kCodeInt4) rotate(expected, false);
            for (size_t d = 0; d < expected.size(); ++d) {
                // A zero point is rounded too, so that an end of int4's range may be cut by as much again.
                const double step = side.half_step(block, head, offset, std::abs(expected[d]));
                CHECK_NEAR(found[d], expected[d], step * (code == kCodeInt4 ? 2.01 : 1.001), "a decoded dimension");
            }
        };
        for (int token = 0; token < tokens; ++token)
            for (int head = 0; head < batch.kv_heads; ++head) {
                check(keys, batch.code.key, token, head, heads * batch.key_dim, batch.key_dim);
                check(values, batch.code.value, token, head, (heads + batch.kv_heads) * batch.key_dim, batch.value_dim);
            }
    }
}

}  // namespace
}  // namespace octavo::test
