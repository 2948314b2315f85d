// Ranks, here threads that map the same memory: what one wrote, all read after they have met; nothing hangs.
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>

#include <barrier>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "harness.h"
#include "rank_steps.h"
#include "ranks.h"

namespace octavo::test {
namespace {

constexpr RankLayout kLayout{4096, 3, 8192, 16384};

struct Group {
    explicit Group(int count, double timeout_seconds = 60) : file(memfd_create("octavo-test", 0)) {
        CHECK(file >= 0 && ftruncate(file, Ranks::bytes(kLayout)) == 0);
        for (int rank = 0; rank < count; ++rank)
            ranks.push_back(std::make_unique<Ranks>(file, kLayout, RankPlace{rank, count, 0, 1}, timeout_seconds));
    }
    ~Group() { close(file); }
    template <class Body> void run(const Body& body) {
        std::vector<std::thread> threads;
        for (auto& rank : ranks) threads.emplace_back([&] { body(*rank); });
        for (std::thread& thread : threads) thread.join();
    }
    int file;
    std::vector<std::unique_ptr<Ranks>> ranks;
};

template <class Error, class Body> std::string thrown(const Body& body) {
    try {
        body();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

TEST_ONCE(ranks_read_what_each_wrote_into_its_part_of_a_buffer) {
    for (int i = cases(20); i > 0; --i) {
        Group group(random_int(1, 5));
        std::vector<int> slots(random_int(1, 60));
        for (int& slot : slots) slot = random_int(0, kLayout.num_slots - 1);
        const int count = static_cast<int>(group.ranks.size());
        std::vector<int> wrong(count, 0);
        group.run([&](Ranks& ranks) {
            for (std::size_t use = 0; use < slots.size(); ++use) {
                int* values = reinterpret_cast<int*>(ranks.next_buffer(slots[use], 4 * count));
                values[ranks.place().rank] = static_cast<int>(use) * 100 + ranks.place().rank;
                ranks.meet();
                // The writer of another use may already be ahead, but in the other buffer of the slot.
                for (int other = 0; other < count; ++other)
                    wrong[ranks.place().rank] += values[other] != static_cast<int>(use) * 100 + other;
            }
        });
        for (const int number : wrong) CHECK(number == 0);
    }
}

// Two machines of two ranks, whose link is a copy.
TEST_ONCE(machines_gather_what_each_rank_wrote_and_pass_messages_on) {
    struct Machine {
        int file = memfd_create("octavo-test", 0);
        std::vector<std::unique_ptr<Ranks>> ranks;
    } machines[2];
    std::barrier<> both(2);
    char* sent[2];
    const auto link = [&](int machine) {
        return MachineLink{[&, machine](char* own, char* all, int64_t bytes) {
                               sent[machine] = own;
                               both.arrive_and_wait();
                               for (int i = 0; i < 2; ++i) std::memcpy(all + i * bytes, sent[i], bytes);
                               both.arrive_and_wait();
                           },
                           [&, machine](char* message, int64_t bytes) {
                               sent[machine] = message;
                               both.arrive_and_wait();
                               if (machine > 0) std::memcpy(message, sent[0], bytes);
                               both.arrive_and_wait();
                           }};
    };
    for (int machine = 0; machine < 2; ++machine) {
        CHECK(ftruncate(machines[machine].file, Ranks::bytes(kLayout)) == 0);
        for (int rank = 0; rank < 2; ++rank) {
            const RankPlace place{rank, 2, machine, 2};
            machines[machine].ranks.push_back(std::make_unique<Ranks>(machines[machine].file, kLayout, place, 60));
            machines[machine].ranks[rank]->set_link(link(machine));
        }
    }
    const Columns columns{{0, 1, 3, 4, 7}};
    const int rows = 5;
    std::vector<int> wrong(4, 0);
    const auto run = [&](Ranks& ranks) {
        const int own = ranks.place().in_all();
        const auto rank_of = [](int64_t row) { return static_cast<int>(row * 3 % 4); };
        for (int use = 0; use < 6; ++use) {
            if (own == 0) {
                ranks.message()[0] = static_cast<char>(use);
                ranks.send(1);
            } else {
                ranks.receive();
                wrong[own] += ranks.message()[0] != use;
            }
            const Matrix buffer{ranks.next_buffer(0, rows * 7 * 4), rows, 7, 7 * 4};
            const auto value = [&](int64_t row, int64_t column) -> int& {
                return reinterpret_cast<int*>(buffer.row(row))[column];
            };
            for (int64_t row = 0; row < rows; ++row)
                for (int64_t column = columns.begins[own]; column < columns.begins[own + 1]; ++column)
                    value(row, column) = static_cast<int>(use * 1000 + row * 10 + column);
            ranks.gather(buffer, columns, 4);
            for (int64_t row = 0; row < rows; ++row)
                for (int64_t column = 0; column < 7; ++column)
                    wrong[own] += value(row, column) != use * 1000 + row * 10 + column;
            const Matrix other{ranks.next_buffer(1, rows * 4), rows, 1, 4};
            for (int64_t row = 0; row < rows; ++row)
                if (rank_of(row) == own) *reinterpret_cast<int*>(other.row(row)) = static_cast<int>(use + row);
            ranks.gather_rows(other, rank_of);
            for (int64_t row = 0; row < rows; ++row) wrong[own] += *reinterpret_cast<int*>(other.row(row)) != use + row;
        }
    };
    std::vector<std::thread> threads;
    for (Machine& machine : machines)
        for (auto& rank : machine.ranks) threads.emplace_back([&] { run(*rank); });
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == std::vector<int>(4, 0));
    for (Machine& machine : machines) close(machine.file);
}

TEST_ONCE(a_link_that_fails_is_a_failure_of_all_ranks) {
    const int file = memfd_create("octavo-test", 0);
    CHECK(ftruncate(file, Ranks::bytes(kLayout)) == 0);
    Ranks ranks(file, kLayout, {0, 1, 0, 2}, 60);
    ranks.set_link({[](char*, char*, int64_t) { throw std::runtime_error("machine 1 is lost"); }, {}});
    const Matrix buffer{ranks.next_buffer(0, 8), 1, 2, 8};
    CHECK(thrown<RankError>([&] { ranks.gather(buffer, {{0, 1, 2}}, 4); }) == "machine 1 is lost");
    CHECK(ranks.failure() == "machine 1 is lost");
    close(file);
}

TEST_ONCE(ranks_receive_every_message_once_and_in_order) {
    Group group(3);
    std::vector<int> wrong(3, 0);
    group.run([&](Ranks& ranks) {
        for (char i = 0; i < 50; ++i) {
            if (ranks.place().rank == 0) {
                ranks.message()[0] = i;
                ranks.send(1);
            } else {
                ranks.receive();
                wrong[ranks.place().rank] += ranks.message()[0] != i;
            }
            ranks.meet();  // the message may be overwritten
        }
    });
    CHECK(wrong[1] + wrong[2] == 0);
}

TEST_ONCE(the_first_failure_ends_the_wait_of_every_rank_until_a_reset) {
    Group group(3);
    std::vector<std::string> reasons(3);
    group.run([&](Ranks& ranks) {
        reasons[ranks.place().rank] = thrown<RankError>([&] {
            if (ranks.place().rank == 2) {
                ranks.fail("the first");
                ranks.fail("the second");
            }
            ranks.place().rank == 0 ? ranks.meet() : ranks.receive();
        });
    });
    for (const std::string& reason : reasons) CHECK(reason == "the first");
    CHECK(thrown<RankError>([&] { group.ranks[0]->send(1); }) == "the first");
    Group next(1);
    next.ranks[0]->fail(std::string(5000, 'x'));  // cut, not written beyond its place
    CHECK(next.ranks[0]->failure().size() < 5000);
    next.ranks[0]->reset();
    CHECK(next.ranks[0]->failure().empty());
    next.ranks[0]->send(1);
}

TEST_ONCE(a_rank_that_does_not_come_is_named) {
    Group group(2, 0.05);
    const std::string reason = thrown<RankError>([&] { group.ranks[0]->meet(); });
    CHECK(reason == "rank 1 has not answered rank 0 for 0 s");
    CHECK(group.ranks[1]->failure() == reason);
}

TEST_ONCE(what_does_not_fit_into_the_memory_of_ranks_is_refused) {
    Group group(1);
    Ranks& ranks = *group.ranks[0];
    CHECK(ranks.next_buffer(2, kLayout.last_bytes) != nullptr);
    CHECK(!thrown<std::invalid_argument>([&] { ranks.next_buffer(0, kLayout.slot_bytes + 1); }).empty());
    CHECK(!thrown<std::runtime_error>([&] { Ranks(-1, kLayout, {0, 1, 0, 1}, 1); }).empty());
}

TEST_ONCE(blocks_are_copied_as_if_all_were_read_first) {
    char memory[] = "aabbccdd", other[] = "------";
    const BlockMemory device{memory, 4, 2}, host{other, 3, 2};
    copy_blocks(device, device, {{0, 1}, {1, 2}, {2, 0}});
    CHECK(std::string(memory) == "ccaabbdd");
    copy_blocks(device, host, {{3, 0}, {1, 2}});
    CHECK(std::string(other) == "dd--aa");
    CHECK(!thrown<std::invalid_argument>([&] { copy_blocks(device, host, {{0, 3}}); }).empty());
    CHECK(std::string(other) == "dd--aa");
}

}  // namespace
}  // namespace octavo::test
#endif
