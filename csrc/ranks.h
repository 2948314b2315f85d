// The ranks of one model: processes that each compute some outputs of every matrix, and exchange them through shared
// memory. No sum is split, so a row's bits do not depend on the number of ranks.
//
//     memory   | header: signals, failure | message | slots: a matrix of activations each, twice |
//
//     rank 0   send    > compute own columns of a slot > meet > read all columns > ... > meet > send
//     others   receive > compute own columns of it     > meet > read all columns > ... > meet > receive
//
// Each slot has two buffers, which its writers use in turn. A writer may overwrite what was written two uses ago: it
// has met all ranks since, and they met it after their last read.
//
// The memory has no name, so it is freed with its last process, however that ends.
//
// Several machines have the same number of ranks each. The first rank of each carries what its machine has computed:
//
//     gather  > meet > the first rank packs its machine's columns, sends them, unpacks the others' > meet
//     send    > the message goes to the first rank of each machine, which sends it on
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops.h"

namespace octavo {

constexpr int kMostRanks = 64;

// Another rank has failed, has died, or does not answer. No step can be computed until the group has been restarted.
struct RankError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct RankLayout {
    int64_t message_bytes;
    int num_slots;
    int64_t slot_bytes;   // of one buffer, of every slot but the last
    int64_t last_bytes;   // of one buffer of the last slot
};

// The columns of a matrix that each rank of all machines computes: rank i those from begins[i] to begins[i + 1].
struct Columns {
    std::vector<int64_t> begins;
    int64_t all() const { return begins.back(); }
};

// Which rank a process is of `count` of its machine, which is one of `machines` with as many each.
struct RankPlace {
    int rank, count, machine, machines;
    int in_all() const { return machine * count + rank; }
};

// What carries bytes between machines. Both functions may throw std::exception.
struct MachineLink {
    std::function<void(char* own, char* all, int64_t bytes)> gather;  // of each machine; `all` has room for all of them
    std::function<void(char* message, int64_t bytes)> broadcast;     // the first machine's
};

class Ranks {
  public:
    static int64_t bytes(const RankLayout& layout);
    double timeout_seconds;  // how long `meet` waits for another rank

    // Maps a file of that many bytes, zeros at first.
    Ranks(int file, const RankLayout& layout, const RankPlace& place, double timeout_seconds);
    ~Ranks();
    Ranks(const Ranks&) = delete;
    Ranks& operator=(const Ranks&) = delete;

    const RankPlace& place() const { return place_; }
    // The first rank of each of several machines needs it before a step.
    void set_link(MachineLink link) { link_ = std::move(link); }

    // The buffer of a slot that this use writes; every rank calls it in the same order. Throws std::invalid_argument
    // if it has not that many bytes.
    char* next_buffer(int slot, int64_t bytes);
    // Returns when all ranks of this machine have called it: what each wrote before, all may read. Throws RankError.
    void meet();
    // The same for all machines: gathers a buffer of which each rank wrote its columns, elements of so many bytes, or
    // its rows. `rank_of` returns which rank of all wrote a row.
    void gather(const Matrix& buffer, const Columns& columns, int64_t element_bytes);
    void gather_rows(const Matrix& buffer, const std::function<int(int64_t row)>& rank_of);

    // Rank 0 writes a message of at most message_bytes, then sends so many bytes. The others must have met since the
    // last one.
    char* message() const { return message_; }
    int64_t message_bytes() const { return layout_.message_bytes; }
    void send(int64_t bytes);
    void receive();  // waits as long as it takes; throws RankError

    // The threads that each rank of this machine is to compute with; 0: as many as it has. The others take them up
    // with the next message.
    void set_threads(int count);
    int threads() const;

    // Makes every rank throw RankError where it waits. The first reason is kept.
    void fail(const std::string& reason);
    std::string failure() const;  // empty if there is none
    void reset();                 // rank 0, while no other rank runs

  private:
    struct Header;
    struct Signal;
    RankLayout layout_;
    RankPlace place_;
    MachineLink link_;
    std::vector<char> packed_, received_;
    Header* header_;
    char *message_, *slots_;
    uint32_t meetings_ = 0, messages_ = 0;
    uint64_t second_buffer_ = 0;  // a bit for each slot

    void raise(Signal& signal, uint32_t number);
    void wait(Signal& signal, uint32_t number, double seconds);
    void check() const;
    template <class Carry> void carry(const Carry& carry);
};

}  // namespace octavo
