#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <span>
#include <system_error>
#include <thread>
#include <utility>

#ifdef __linux__
#include <sched.h>
#endif
#ifndef _WIN32
#include <pthread.h>
#endif

#include "cores.h"
#include "parking.h"
#include "task_shares.h"

namespace octavo {
namespace {

// Sets rounding and subnormals to C++'s defaults for its lifetime: torch.set_flush_denormal changes those of the
// calling thread, which would then compute other bits than the workers.
class DefaultRounding {
  public:
#if defined(__x86_64__)
    DefaultRounding() : before_(__builtin_ia32_stmxcsr()) {
        if ((before_ & ~kFlags) != kDefault) __builtin_ia32_ldmxcsr(kDefault);
    }
    ~DefaultRounding() {
        if ((before_ & ~kFlags) != kDefault) __builtin_ia32_ldmxcsr(before_);
    }

  private:
    static constexpr unsigned kDefault = 0x1f80, kFlags = 0x3f;
    unsigned before_;
#elif defined(__aarch64__)
    DefaultRounding() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        if (before_) asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
    }
    ~DefaultRounding() {
        if (before_) asm volatile("msr fpcr, %0" ::"r"(before_));
    }

  private:
    uint64_t before_;
#else
    DefaultRounding() {}
#endif
};

using Clock = std::chrono::steady_clock;

// How long a thread spins before it sleeps, and how long the leader then watches whether others run.
constexpr auto kSpin = std::chrono::microseconds(50), kWatch = std::chrono::microseconds(10);
constexpr int kMostWatched = 8;  // workers: to read the clock of one is a system call

// Spins until `done()`, for at most `time`; returns whether it is done.
template <class Done> bool spin_until(const Done& done, Clock::duration time) {
    constexpr int kPausesBetweenLooksAtTheClock = 16;
    for (const auto begin = Clock::now();;) {
        for (int i = 0; i < kPausesBetweenLooksAtTheClock; ++i) {
            if (done()) return true;
            pause();
        }
        if (Clock::now() - begin > time) return false;
    }
}

thread_local bool t_in_task = false;

struct Worker {
    std::thread thread;
    std::chrono::nanoseconds ran{};  // when the leader began to watch
};

class Pool {
  public:
    // Returns false, having done nothing, if another thread leads.
    bool try_run(int num_tasks, TaskFunction task, void* context, int threads) {
        if (num_tasks >= TaskShares::kMostTasks) return false;
        std::unique_lock leader(leader_, std::try_to_lock);
        if (!leader.owns_lock()) return false;
        grow(std::min(threads, TaskShares::kMostThreads) - 1);
        if (const int core = current_core(); core != leader_core_.load(std::memory_order_relaxed))
            leader_core_.store(core, std::memory_order_relaxed);
        shares_.open(task, context, num_tasks, std::min(threads, static_cast<int>(workers_.size()) + 1));
        wake();
        const TaskShares::Terms terms = shares_.terms();
        take_tasks(terms, 0);
        wait_for_workers(terms);
        if (failed_.load(std::memory_order_relaxed)) {
            failed_.store(false, std::memory_order_relaxed);
            std::rethrow_exception(std::exchange(thrown_, nullptr));
        }
        return true;
    }

    void wake() {
        if (sleepers_.load() > 0) unpark_all(shares_.opened);
    }

  private:
    // Called by the leader. If the system refuses more threads, the existing ones do the work.
    void grow(int count) {
        const int before = active_.load(std::memory_order_relaxed);
        if (count != before) active_.store(count, std::memory_order_relaxed);
        if (count > before) {
            grown_.fetch_add(1);
            unpark_all(grown_);
        }
        while (static_cast<int>(workers_.size()) < count) {
            const int self = static_cast<int>(workers_.size()) + 1;
            try {
                workers_.push_back({std::thread([this, self] { work(self); })});
            } catch (const std::system_error&) {
                return;
            }
        }
    }

    void wait_for_workers(const TaskShares::Terms& terms) {
        const auto finished = [&] { return shares_.all_done(terms); };
        if (spin_until(finished, kSpin) || bring_preempted_here(finished)) return;
        // Whoever does the last task reports it first and then looks for the leader; the leader does it the other way
        // round, so that no wake-up is lost.
        leader_parks_.store(true);
        for (;;) {
            const uint32_t rung = bell_.load();
            if (finished()) break;
            park(bell_, rung);
        }
        leader_parks_.store(false, std::memory_order_relaxed);
    }

    // Workers that the system has preempted in the middle of a task continue on this core, which the leader is about
    // to leave. Returns whether all has been finished meanwhile.
    template <class Finished> bool bring_preempted_here(const Finished& finished) {
        const auto begin = Clock::now();
        int watched[kMostWatched], count = 0;
        for (int i = 0; i < static_cast<int>(workers_.size()) && count < kMostWatched; ++i)
            if (shares_.in_task(i + 1).load(std::memory_order_relaxed)) {
                workers_[i].ran = run_time(workers_[i].thread);
                watched[count++] = i;
            }
        if (spin_until(finished, kWatch)) return true;
        const auto half = (Clock::now() - begin) / 2;
        for (const int i : std::span(watched, count)) {
            Worker& worker = workers_[i];
            if (shares_.in_task(i + 1).load(std::memory_order_relaxed) && run_time(worker.thread) - worker.ran < half)
                move_to_core(worker.thread, current_core());
        }
        return finished();
    }

    void work(int self) {
        const DefaultRounding rounding;
        for (;;) {
            // Read before `active_`: an unwanted worker does not fall asleep if that changes meanwhile.
            const uint32_t grown = grown_.load();
            if (self > active_.load(std::memory_order_relaxed)) {
                park(grown_, grown);  // not among the sleepers: those are woken in every round
                continue;
            }
            const TaskShares::Terms terms = shares_.terms();
            const auto round = static_cast<uint32_t>(terms.round);
            if (shares_.has_tasks(terms, self)) leave_the_leader_alone();
            take_tasks(terms, self);
            const auto opened = [&] { return shares_.opened.load(std::memory_order_relaxed) != round; };
            if (spin_until(opened, kSpin)) continue;
            // The leader opens a round first and then looks for sleepers; a sleeper does it the other way round, so
            // that no wake-up is lost.
            sleepers_.fetch_add(1);
            park(shares_.opened, round);
            sleepers_.fetch_sub(1);
        }
    }

    // Two of our threads on one core are as slow as one, while another process has a core for itself.
    void leave_the_leader_alone() {
        const int core = current_core();
        if (core >= 0 && core == leader_core_.load(std::memory_order_relaxed)) leave_core(core);
    }

    void take_tasks(const TaskShares::Terms& terms, int self) {
        TaskShares::Visit visit{self};
        std::atomic<bool>& in_task = shares_.in_task(self);
        for (TaskShares::Taken taken; (taken = shares_.next(terms, visit)).count > 0;) {
            t_in_task = true;
            in_task.store(true, std::memory_order_relaxed);
            for (int i = 0; i < taken.count; ++i) {
                try {
                    terms.task(terms.context, taken.first + i * terms.threads);
                } catch (...) {
                    if (!failed_.exchange(true)) thrown_ = std::current_exception();
                }
            }
            t_in_task = false;
            in_task.store(false, std::memory_order_relaxed);
        }
        if (visit.taken && self && leader_parks_.load() && shares_.all_done(terms)) {
            bell_.fetch_add(1);
            unpark_all(bell_);
        }
    }

    TaskShares shares_;
    alignas(64) std::atomic<int> sleepers_{0};  // workers that sleep until the next round
    // What workers read, and what is written rarely.
    alignas(64) std::atomic<uint32_t> grown_{0};  // advances when `active_` grows
    std::atomic<int> active_{0};                  // workers that are wanted
    std::atomic<int> leader_core_{-1};
    std::atomic<bool> leader_parks_{false};
    std::atomic<uint32_t> bell_{0};  // rung for a leader that has parked
    std::atomic<bool> failed_{false};
    alignas(64) std::exception_ptr thrown_;
    std::mutex leader_;
    std::deque<Worker> workers_;  // the leader's
};

std::atomic<int> g_num_threads{hardware_threads()};
std::atomic<Pool*> g_pool{nullptr};

// Never destroyed: when a process ends, its threads end with it.
Pool& pool() {
    if (Pool* known = g_pool.load(std::memory_order_acquire)) return *known;
    static std::mutex making;
    const std::lock_guard lock(making);
    if (!g_pool.load(std::memory_order_acquire)) {
        g_pool.store(new Pool, std::memory_order_release);
#ifndef _WIN32
        static const int registered = pthread_atfork(nullptr, nullptr, [] {
            // A child has none of its parent's threads: it starts a new pool, and leaves the parent's alone.
            g_pool.store(new Pool, std::memory_order_release);
            t_in_task = false;
        });
        (void)registered;
#endif
    }
    return *g_pool.load(std::memory_order_acquire);
}

}  // namespace

int hardware_threads() {
#ifdef __linux__
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return std::max(1, CPU_COUNT(&allowed));
#endif
    return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

int num_threads() { return g_num_threads.load(std::memory_order_relaxed); }

void set_num_threads(int count) { g_num_threads.store(count, std::memory_order_relaxed); }

void wake_threads() {
    if (num_threads() > 1 && !t_in_task) pool().wake();
}

namespace detail {

void run_tasks(int num_tasks, TaskFunction task, void* context) {
    const DefaultRounding rounding;
    const int threads = num_threads();
    if (num_tasks > 1 && threads > 1 && !t_in_task && pool().try_run(num_tasks, task, context, threads)) return;
    const bool within_a_task = std::exchange(t_in_task, true);
    std::exception_ptr thrown;
    for (int index = 0; index < num_tasks; ++index) {
        try {
            task(context, index);
        } catch (...) {
            if (!thrown) thrown = std::current_exception();
        }
    }
    t_in_task = within_a_task;
    if (thrown) std::rethrow_exception(thrown);
}

}  // namespace detail
}  // namespace octavo
