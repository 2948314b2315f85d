// One leader hands rounds of tasks to threads that wait for them awake.
//
//     ticket   | round | tasks not yet taken |     one 64-bit word: who takes a task knows that the round is still on
//
// The leader takes tasks too, and waits for the tasks that others took, never for the others: a thread that the system
// has put aside holds nobody up unless it was in the middle of a task.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

namespace octavo {

class Team {
  public:
    using Task = void (*)(void* context, int index);

    // By the leader: returns when every task is done.
    void run(int num_tasks, Task task, void* context) {
        task_ = task;
        context_ = context;
        num_tasks_ = num_tasks;
        unfinished_.store(num_tasks, std::memory_order_relaxed);
        ticket_.store(++round_ << 32 | static_cast<uint32_t>(num_tasks), std::memory_order_release);
        take_tasks();
        for (Patience patience; unfinished_.load(std::memory_order_acquire) != 0;) patience.wait();
    }

    // By the leader, once: sends the others home.
    void close() { closed_.store(true, std::memory_order_release); }

    // By everyone else.
    void work() {
        Patience patience;
        while (!closed_.load(std::memory_order_acquire))
            if (take_tasks())
                patience = {};
            else
                patience.wait();
    }

  private:
    // Spins for some ten microseconds, the time between two products; then lets others have the core.
    struct Patience {
        int rounds = 0;
        void wait() {
            constexpr int kSpins = 512;
            if (++rounds > kSpins) {
                sched_yield();
                return;
            }
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            asm volatile("yield");
#endif
        }
    };

    bool take_tasks() {
        int taken = 0;
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (const auto left = static_cast<uint32_t>(ticket)) {
            if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acquire)) continue;
            // The round cannot end, nor these change, before this task is done.
            task_(context_, num_tasks_ - static_cast<int>(left));
            ++taken;
            unfinished_.fetch_sub(1, std::memory_order_release);
            ticket = ticket_.load(std::memory_order_acquire);
        }
        return taken > 0;
    }

    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int> unfinished_{0};
    alignas(64) std::atomic<bool> closed_{false};
    Task task_ = nullptr;
    void* context_ = nullptr;
    int num_tasks_ = 0;
    uint64_t round_ = 0;
};

}  // namespace octavo
