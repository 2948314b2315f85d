#include "rank_steps.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

#include "thread_pool.h"

namespace octavo {
namespace {

enum Kind : int64_t { kStep, kLogits, kCopies };

// A message is numbers and arrays, each at a multiple of 8 bytes.
class Writer {
  public:
    explicit Writer(Ranks& ranks) : ranks_(ranks), end_(ranks.message()) {}
    void number(int64_t value) { array(&value, 1); }
    template <class T> void array(const T* values, int64_t count) {
        std::memcpy(room(count * sizeof(T)), values, count * sizeof(T));
    }
    char* room(int64_t bytes) {
        char* place = end_;
        end_ += (bytes + 7) / 8 * 8;
        if (end_ - ranks_.message() > ranks_.message_bytes())
            throw std::invalid_argument("a message to ranks of " + std::to_string(end_ - ranks_.message()) +
                                        " bytes is longer than " + std::to_string(ranks_.message_bytes()) +
                                        ", the most tokens and sequences that a step was to have");
        return place;
    }
    void send() { ranks_.send(end_ - ranks_.message()); }

  private:
    Ranks& ranks_;
    char* end_;
};

class Reader {
  public:
    explicit Reader(const Ranks& ranks) : next_(ranks.message()) {}
    int64_t number() { return *array<int64_t>(1); }
    template <class T> const T* array(int64_t count) {
        const T* values = reinterpret_cast<const T*>(next_);
        next_ += (count * static_cast<int64_t>(sizeof(T)) + 7) / 8 * 8;
        return values;
    }

  private:
    const char* next_;
};

// The columns of block tables that a step may read.
int64_t used_blocks(const Decoder& decoder, const DecoderStep& step, const GroupTables& tables) {
    const int64_t block_size = decoder.caches[0].kv.block_size;
    const int32_t longest = *std::max_element(step.context_lens, step.context_lens + step.num_seqs);
    return std::min(tables.max_blocks, (longest + block_size - 1) / block_size);
}

void follow_step(Decoder& decoder, Reader message) {
    DecoderStep step{};
    step.num_tokens = message.number();
    step.num_seqs = message.number();
    step.num_logits = message.number();
    step.num_now = message.number();
    std::vector<GroupTables> groups(message.number());
    std::vector<Rotation> rotations(message.number());
    step.sink_tokens = static_cast<int>(message.number());
    step.token_ids = message.array<int64_t>(step.num_tokens);
    step.positions = message.array<int64_t>(step.num_tokens);
    if (step.sink_tokens) {
        step.sink_positions = message.array<int64_t>(step.num_tokens);
        step.budgets = message.array<int32_t>(step.num_seqs);
    }
    const int64_t num_angles = step.num_tokens * (step.sink_tokens ? 2 : 1);
    for (Rotation& rotation : rotations) {
        rotation.dim = static_cast<int>(message.number());
        rotation.cos = message.array<float>(num_angles * rotation.dim / 2);
        rotation.sin = message.array<float>(num_angles * rotation.dim / 2);
    }
    step.logits_indices = message.array<int64_t>(step.num_logits);
    step.query_start = message.array<int32_t>(step.num_seqs + 1);
    step.context_lens = message.array<int32_t>(step.num_seqs);
    for (GroupTables& group : groups) {
        group.stride = group.max_blocks = message.number();
        group.slots = message.array<int64_t>(step.num_tokens);
        group.block_tables = message.array<int32_t>(step.num_seqs * group.max_blocks);
    }
    std::vector<int64_t> rows(step.num_seqs);
    for (int64_t i = 0; i < step.num_seqs; ++i) rows[i] = i;
    step.table_rows = rows.data();
    step.groups = groups.data();
    step.rotations = rotations.data();
    decoder.forward(step);
}

// The angles of the step's tokens, in place of whole tables: first those of their own positions, then, if some see
// sinks apart, those for these.
void send_angles(Writer& message, const DecoderStep& step) {
    const int64_t tokens = step.num_tokens;
    std::vector<int64_t> rows(step.positions, step.positions + tokens), places(2 * tokens);
    for (int64_t i = 0; i < 2 * tokens; ++i) places[i] = i;
    message.array(places.data(), tokens);
    if (step.budgets) {
        rows.insert(rows.end(), step.sink_positions, step.sink_positions + tokens);
        for (int64_t i = 0; i < tokens; ++i)
            if (rows[i] == rows[tokens + i]) places[tokens + i] = i;
        message.array(places.data() + tokens, tokens);
        message.array(step.budgets, step.num_seqs);
    }
    for (const Rotation* rotation = step.rotations; rotation < step.rotations + step.num_rotations; ++rotation) {
        const int64_t width = rotation->dim / 2;
        message.number(rotation->dim);
        for (const float* table : {rotation->cos, rotation->sin}) {
            float* angles = reinterpret_cast<float*>(message.room(rows.size() * width * 4));
            for (const int64_t row : rows) angles = std::copy_n(table + row * width, width, angles);
        }
    }
}

void follow_copies(Ranks& ranks, const BlockMemory (&places)[2], Reader message) {
    const int64_t from = message.number(), to = message.number(), count = message.number();
    const int64_t* ids = message.array<int64_t>(2 * count);
    std::vector<std::pair<int64_t, int64_t>> pairs(count);
    for (int64_t i = 0; i < count; ++i) pairs[i] = {ids[2 * i], ids[2 * i + 1]};
    copy_blocks(places[from], places[to], pairs);
    ranks.meet();
}

}  // namespace

void copy_blocks(const BlockMemory& from, const BlockMemory& to, const std::vector<std::pair<int64_t, int64_t>>& ids) {
    for (const auto& [source, target] : ids)
        if (source < 0 || source >= from.num_blocks || target < 0 || target >= to.num_blocks)
            throw std::invalid_argument("block " + std::to_string(source) + " of " + std::to_string(from.num_blocks) +
                                        " cannot be copied to block " + std::to_string(target) + " of " +
                                        std::to_string(to.num_blocks));
    const int64_t bytes = from.block_bytes;
    if (from.base != to.base) {
        for (const auto& [source, target] : ids)
            std::memcpy(to.base + target * bytes, from.base + source * bytes, bytes);
        return;
    }
    std::vector<char> read(ids.size() * bytes);
    for (std::size_t i = 0; i < ids.size(); ++i)
        std::memcpy(read.data() + i * bytes, from.base + ids[i].first * bytes, bytes);
    for (std::size_t i = 0; i < ids.size(); ++i)
        std::memcpy(to.base + ids[i].second * bytes, read.data() + i * bytes, bytes);
}

int64_t step_message_bytes(int64_t num_tokens, int64_t num_seqs, int64_t num_groups, int64_t max_blocks,
                           int64_t rotation_bytes) {
    const int64_t groups = num_groups * (num_tokens * 8 + num_seqs * max_blocks * 4 + 16);
    return 1024 + num_tokens * (5 * 8 + 2 * rotation_bytes) + num_seqs * 12 + groups;
}

void send_step(Ranks& ranks, const Decoder& decoder, const DecoderStep& step) {
    int num_groups = 0;
    for (const LayerCache& cache : decoder.caches)
        num_groups = std::max({num_groups, cache.group + 1, cache.recent_blocks ? cache.copies_group + 1 : 0});
    Writer message(ranks);
    message.number(kStep);
    for (int64_t number : {step.num_tokens, step.num_seqs, step.num_logits, step.num_now}) message.number(number);
    message.number(num_groups);
    message.number(step.num_rotations);
    message.number(step.budgets ? step.sink_tokens : 0);
    message.array(step.token_ids, step.num_tokens);
    send_angles(message, step);
    message.array(step.logits_indices, step.num_logits);
    message.array(step.query_start, step.num_seqs + 1);
    message.array(step.context_lens, step.num_seqs);
    for (const GroupTables* group = step.groups; group < step.groups + num_groups; ++group) {
        const int64_t width = used_blocks(decoder, step, *group);
        message.number(width);
        message.array(group->slots, step.num_tokens);
        char* rows = message.room(step.num_seqs * width * 4);
        for (int64_t i = 0; i < step.num_seqs; ++i)
            std::memcpy(rows + i * width * 4, group->block_tables + step.table_rows[i] * group->stride, width * 4);
    }
    message.send();
}

void send_logits(Ranks& ranks, int64_t first, int64_t count) {
    Writer message(ranks);
    for (int64_t number : {int64_t{kLogits}, first, count}) message.number(number);
    message.send();
}

void send_copies(Ranks& ranks, BlockPlace from, BlockPlace to, const std::vector<std::pair<int64_t, int64_t>>& ids) {
    const int64_t most = (ranks.message_bytes() - 64) / 16, total = static_cast<int64_t>(ids.size());
    for (int64_t first = 0; first < total; first += most) {
        const int64_t count = std::min(most, total - first);
        Writer message(ranks);
        for (int64_t number : {int64_t{kCopies}, int64_t{from}, int64_t{to}, count}) message.number(number);
        for (int64_t i = first; i < first + count; ++i) {
            message.number(ids[i].first);
            message.number(ids[i].second);
        }
        message.send();
        ranks.meet();
    }
}

void follow(Decoder& decoder, const BlockMemory (&places)[2]) {
    Ranks& ranks = *decoder.ranks;
    try {
        while (true) {
            ranks.receive();
            if (const int threads = ranks.threads(); threads && threads != num_threads()) set_num_threads(threads);
            Reader message(ranks);
            switch (message.number()) {
            case kStep:
                follow_step(decoder, message);
                break;
            case kLogits: {
                const int64_t first = message.number(), count = message.number();
                decoder.logits(first, count, nullptr);
                break;
            }
            case kCopies:
                follow_copies(ranks, places, message);
                break;
            default:
                throw std::invalid_argument("a message of an unknown kind");
            }
        }
    } catch (const std::exception& error) {
        ranks.fail("rank " + std::to_string(ranks.place().in_all()) + ": " + error.what());
        throw;
    }
}

}  // namespace octavo
