// Ranks, here threads that map the same memory: what one wrote, all read after they have met; nothing hangs.
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>

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
            ranks.push_back(std::make_unique<Ranks>(file, kLayout, rank, count, timeout_seconds));
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
                values[ranks.rank()] = static_cast<int>(use) * 100 + ranks.rank();
                ranks.meet();
                // The writer of another use may already be ahead, but in the other buffer of the slot.
                for (int other = 0; other < count; ++other)
                    wrong[ranks.rank()] += values[other] != static_cast<int>(use) * 100 + other;
            }
        });
        for (const int number : wrong) CHECK(number == 0);
    }
}

TEST_ONCE(ranks_receive_every_message_once_and_in_order) {
    Group group(3);
    std::vector<int> wrong(3, 0);
    group.run([&](Ranks& ranks) {
        for (char i = 0; i < 50; ++i) {
            if (ranks.rank() == 0) {
                ranks.message()[0] = i;
                ranks.send();
            } else {
                ranks.receive();
                wrong[ranks.rank()] += ranks.message()[0] != i;
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
        reasons[ranks.rank()] = thrown<RankError>([&] {
            if (ranks.rank() == 2) {
                ranks.fail("the first");
                ranks.fail("the second");
            }
            ranks.rank() == 0 ? ranks.meet() : ranks.receive();
        });
    });
    for (const std::string& reason : reasons) CHECK(reason == "the first");
    CHECK(thrown<RankError>([&] { group.ranks[0]->send(); }) == "the first");
    Group next(1);
    next.ranks[0]->fail(std::string(5000, 'x'));  // cut, not written beyond its place
    CHECK(next.ranks[0]->failure().size() < 5000);
    next.ranks[0]->reset();
    CHECK(next.ranks[0]->failure().empty());
    next.ranks[0]->send();
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
    CHECK(!thrown<std::runtime_error>([&] { Ranks(-1, kLayout, 0, 1, 1); }).empty());
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
