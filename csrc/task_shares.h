// How the tasks of a round are shared out among threads, without the threads themselves (thread_pool.cpp).
//
//     tasks       0 1 2 3 4 5 6 7 8 9        thread t of T: tasks t, t + T, t + 2 T, ..
//     thread 0    x     x     x     x
//     its lines   | round, tasks of its share that are left |   | round, tasks it has done |
//
// A thread takes tasks of its own share, from a line that no other thread writes meanwhile, then what others have left:
// a worker looks at one share for each bit of its number, the leader at all, so that every share has several helpers
// and none waits for a thread that the system has preempted or not yet woken. A word that names an earlier round stands
// for a whole share: to begin a round, the leader writes no line but that of its terms. Having taken a task proves that
// the round is still on.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace octavo {

using TaskFunction = void (*)(void* context, int index);

class TaskShares {
  public:
    static constexpr int kMostThreads = 1024;
    static constexpr int64_t kMostTasks = int64_t{1} << 28;  // exclusive

    struct Terms {
        TaskFunction task;
        void* context;
        int num_tasks, threads;  // no more threads than tasks
        uint64_t round;
    };
    // Tasks first, first + threads, ..; none if count is 0.
    struct Taken {
        int first, count;
    };
    // Where a thread is in a round.
    struct Visit {
        int self, step = 0;
        uint64_t taken = 0, reported = 0;
    };

    // Called by the leader, while no round is on.
    void open(TaskFunction task, void* context, int num_tasks, int threads) {
        ++round_;
        Place& place = places_[round_ % 2];
        place.task.store(task, std::memory_order_release);
        place.context.store(context, std::memory_order_release);
        place.num_tasks.store(num_tasks, std::memory_order_release);
        place.threads.store(std::min(threads, num_tasks), std::memory_order_release);
        place.round.store(round_, std::memory_order_release);
        opened.store(static_cast<uint32_t>(round_));
    }

    // The terms of the last round that was opened, of one with no tasks before the first.
    Terms terms() const {
        for (;;) {
            // A place is written again only after another round has been opened.
            const uint32_t before = opened.load(std::memory_order_acquire);
            const Place& place = places_[before % 2];
            const Terms terms{place.task.load(std::memory_order_acquire), place.context.load(std::memory_order_acquire),
                              place.num_tasks.load(std::memory_order_acquire),
                              place.threads.load(std::memory_order_acquire),
                              place.round.load(std::memory_order_acquire)};
            if (opened.load(std::memory_order_relaxed) == before) return terms;
        }
    }

    // What a thread is to do next in a round; what it took before has been done. It calls this until nothing is left.
    Taken next(const Terms& terms, Visit& visit) {
        if (visit.self >= terms.threads) return {};
        for (int of; (of = share_at(terms, visit)) >= 0; ++visit.step) {
            if (of >= terms.threads) continue;
            const Taken taken = take(terms, of);
            visit.taken += static_cast<uint64_t>(taken.count);
            if (taken.count) return taken;
            report(terms, visit);
        }
        return {};
    }

    bool all_done(const Terms& terms) const {
        uint64_t done = 0;
        for (int i = 0; i < terms.threads; ++i) {
            const uint64_t word = lines_[i].done.load();
            if (word / kMostTasks == terms.round % kRounds) done += word % kMostTasks;
        }
        return done == static_cast<uint64_t>(terms.num_tasks);
    }

    // Whether any tasks of a share have not been taken yet.
    bool has_tasks(const Terms& terms, int share) const {
        return share < terms.threads && left_in(terms, share, lines_[share].left.load(std::memory_order_relaxed)) > 0;
    }
    std::atomic<bool>& in_task(int thread) { return lines_[thread].in_task; }

    // The number of rounds, modulo 2^32: threads without work watch it.
    alignas(64) std::atomic<uint32_t> opened{0};

  private:
    static constexpr uint64_t kRounds = uint64_t{1} << 36;  // before their numbers come again
    // A thread takes so large a part of what is left of a share at a time, or one task: few operations for many tasks,
    // and little that no other can take over from a thread that is preempted.
    static constexpr uint64_t kPart = 8;

    // Of a thread. The leader, which watches what is done, does not disturb the threads that take tasks.
    struct Line {
        alignas(64) std::atomic<uint64_t> left{0};  // the round, and a number of tasks
        std::atomic<bool> in_task{false};
        alignas(64) std::atomic<uint64_t> done{0};  // the same
    };
    struct alignas(64) Place {
        std::atomic<TaskFunction> task{nullptr};
        std::atomic<void*> context{nullptr};
        std::atomic<int> num_tasks{0}, threads{0};
        std::atomic<uint64_t> round{0};
    };

    // The share that a thread turns to in a step, which may be no thread's; -1: it has seen all that it is to see.
    static int share_at(const Terms& terms, const Visit& visit) {
        if (visit.step == 0) return visit.self;
        if (visit.self == 0) return visit.step < terms.threads ? visit.step : -1;
        const int bit = 1 << (visit.step - 1);
        return bit < terms.threads ? visit.self ^ bit : -1;
    }

    static uint64_t word_of(const Terms& terms, uint64_t count) { return terms.round % kRounds * kMostTasks + count; }
    static int size_of(const Terms& terms, int share) {
        return (terms.num_tasks - share + terms.threads - 1) / terms.threads;
    }
    static uint64_t left_in(const Terms& terms, int share, uint64_t word) {
        const bool begun = word / kMostTasks == terms.round % kRounds;
        return begun ? word % kMostTasks : static_cast<uint64_t>(size_of(terms, share));
    }

    Taken take(const Terms& terms, int of) {
        uint64_t word = lines_[of].left.load(std::memory_order_acquire);
        for (;;) {
            const uint64_t left = left_in(terms, of, word);
            // A word of another round is of an earlier one as long as this round is the last: then the exchange fails
            // if anybody has taken tasks since, and succeeds only while the round is on.
            if (left == 0 || opened.load(std::memory_order_acquire) != static_cast<uint32_t>(terms.round)) return {};
            const uint64_t count = std::max<uint64_t>(1, left / kPart);
            if (lines_[of].left.compare_exchange_weak(word, word_of(terms, left - count), std::memory_order_acq_rel,
                                                      std::memory_order_acquire)) {
                const int before = size_of(terms, of) - static_cast<int>(left);
                return {of + before * terms.threads, static_cast<int>(count)};
            }
        }
    }

    void report(const Terms& terms, Visit& visit) {
        if (visit.taken == visit.reported) return;
        visit.reported = visit.taken;
        lines_[visit.self].done.store(word_of(terms, visit.taken));
    }

    Place places_[2];
    uint64_t round_ = 0;  // the leader's
    Line lines_[kMostThreads];
};

}  // namespace octavo
