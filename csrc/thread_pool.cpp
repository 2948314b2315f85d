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

namespace octavo {
namespace {

using Task = void (*)(void* context, int index);

// Sets rounding and subnormals to C++'s defaults while it lives: torch.set_flush_denormal changes those of the calling
// thread, which would then compute other bits than the workers.
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

struct alignas(64) Worker {
    std::thread thread;
    std::atomic<bool> in_task{false};
    std::chrono::nanoseconds ran{};  // when the leader began to watch
};

class Pool {
  public:
    ~Pool() {
        stop_.store(true);
        call_workers();
        call_back();
        for (Worker& worker : workers_) worker.thread.join();
    }

    // Returns false, having done nothing, if another thread leads.
    bool try_run(int num_tasks, Task task, void* context, int threads) {
        std::unique_lock leader(leader_, std::try_to_lock);
        if (!leader.owns_lock()) return false;
        grow(threads - 1);
        task_ = task;
        context_ = context;
        num_tasks_ = num_tasks;
        // Many threads take several tasks at a time, to reduce contention for the ticket.
        constexpr int kThreadsThatTakeOne = 16;
        share_ = threads <= kThreadsThatTakeOne ? num_tasks : 4 * threads;
        unfinished_.store(static_cast<uint32_t>(num_tasks), std::memory_order_relaxed);
        leader_core_.store(current_core(), std::memory_order_relaxed);
        ticket_.store(++round_ << 32 | static_cast<uint32_t>(num_tasks), std::memory_order_release);
        call_workers();
        std::atomic<bool> in_task{false};
        take_tasks(in_task);
        wait_for_workers();
        if (failed_.load(std::memory_order_relaxed)) {
            failed_.store(false, std::memory_order_relaxed);
            std::rethrow_exception(std::exchange(thrown_, nullptr));
        }
        return true;
    }

    void wake() {
        if (sleepers_.load() > 0) call_workers();
    }

  private:
    // Called by the leader. If the system refuses more threads, the existing ones do the work.
    void grow(int count) {
        const int before = active_.load(std::memory_order_relaxed);
        if (count != before) active_.store(count, std::memory_order_relaxed);
        if (count > before) call_back();
        while (static_cast<int>(workers_.size()) < count) {
            const int index = static_cast<int>(workers_.size());
            Worker& worker = workers_.emplace_back();
            try {
                worker.thread = std::thread([this, index, &worker] { work(index, worker.in_task); });
            } catch (const std::system_error&) {
                workers_.pop_back();
                return;
            }
        }
    }

    // Wakes the workers that were not wanted before.
    void call_back() {
        grown_.fetch_add(1);
        unpark_all(grown_);
    }

    void call_workers() {
        epoch_.fetch_add(1);
        if (sleepers_.load() > 0) unpark_all(epoch_);
    }

    void wait_for_workers() {
        const auto finished = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
        if (spin_until(finished, kSpin) || bring_preempted_here(finished)) return;
        // Whoever finishes the last task does so first and then looks for the leader; the leader does it the other way
        // round, so that no wake-up is lost.
        leader_parks_.store(true);
        for (uint32_t left; (left = unfinished_.load()) != 0;) park(unfinished_, left);
        leader_parks_.store(false, std::memory_order_relaxed);
    }

    // Workers that the system has preempted in the middle of a task continue on this core, which the leader is about
    // to leave. Returns whether all has been finished meanwhile.
    template <class Finished> bool bring_preempted_here(const Finished& finished) {
        const auto begin = Clock::now();
        Worker* watched[kMostWatched];
        int count = 0;
        for (Worker& worker : workers_)
            if (worker.in_task.load(std::memory_order_relaxed)) {
                worker.ran = run_time(worker.thread);
                watched[count++] = &worker;
                if (count == kMostWatched) break;
            }
        if (spin_until(finished, kWatch)) return true;
        const auto half = (Clock::now() - begin) / 2;
        for (Worker* const worker : std::span(watched, count))
            if (worker->in_task.load(std::memory_order_relaxed) && run_time(worker->thread) - worker->ran < half)
                move_to_core(worker->thread, current_core());
        return finished();
    }

    void work(int index, std::atomic<bool>& in_task) {
        const DefaultRounding rounding;
        while (!stop_.load()) {
            // Read before `active_`: an unwanted worker does not fall asleep if that changes meanwhile.
            const uint32_t epoch = epoch_.load(), grown = grown_.load();
            if (index >= active_.load(std::memory_order_relaxed)) {
                // Not among the sleepers: those are woken in every round.
                if (!stop_.load()) park(grown_, grown);
                continue;
            }
            if (has_tasks()) leave_the_leader_alone();
            if (take_tasks(in_task)) continue;
            if (spin_until([&] { return epoch_.load(std::memory_order_relaxed) != epoch; }, kSpin)) continue;
            // The caller advances the epoch first and then looks for sleepers; a sleeper does it the other way round,
            // so that no wake-up is lost.
            sleepers_.fetch_add(1);
            if (!stop_.load()) park(epoch_, epoch);
            sleepers_.fetch_sub(1);
        }
    }

    bool has_tasks() const { return static_cast<uint32_t>(ticket_.load(std::memory_order_relaxed)) != 0; }

    // Two threads of ours on one core are as slow as one, while another process has a core for itself.
    void leave_the_leader_alone() {
        const int core = current_core();
        if (core >= 0 && core == leader_core_.load(std::memory_order_relaxed)) leave_core(core);
    }

    bool take_tasks(std::atomic<bool>& in_task) {
        bool any = false;
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (const auto left = static_cast<uint32_t>(ticket)) {
            // The share was written before the ticket; if it is already that of a later round, the exchange fails.
            const uint32_t count =
                std::max<uint32_t>(1, left / static_cast<uint32_t>(share_.load(std::memory_order_relaxed)));
            if (!ticket_.compare_exchange_weak(ticket, ticket - count, std::memory_order_acquire)) continue;
            // The round cannot end, nor its members change, before these tasks are done.
            const int first = num_tasks_ - static_cast<int>(left);
            t_in_task = true;
            in_task.store(true, std::memory_order_relaxed);
            for (uint32_t i = 0; i < count; ++i) {
                try {
                    task_(context_, first + static_cast<int>(i));
                } catch (...) {
                    if (!failed_.exchange(true)) thrown_ = std::current_exception();
                }
            }
            t_in_task = false;
            in_task.store(false, std::memory_order_relaxed);
            any = true;
            if (unfinished_.fetch_sub(count) == count && leader_parks_.load()) unpark_all(unfinished_);
            ticket = ticket_.load(std::memory_order_acquire);
        }
        return any;
    }

    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint32_t> unfinished_{0};
    std::atomic<bool> leader_parks_{false};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::atomic<uint32_t> grown_{0};  // advances when `active_` grows
    std::atomic<int> active_{0};      // workers that are wanted
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<int> sleepers_{0};  // workers that sleep until the next round
    // What every worker reads at each claim is written between rounds alone.
    alignas(64) Task task_ = nullptr;
    void* context_ = nullptr;
    int num_tasks_ = 0;
    std::atomic<int> leader_core_{-1};
    std::atomic<int> share_{1};
    alignas(64) std::atomic<bool> failed_{false};
    std::exception_ptr thrown_;
    uint64_t round_ = 0;
    std::mutex leader_;
    std::deque<Worker> workers_;  // which do not move when it grows
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

void run_tasks(int num_tasks, Task task, void* context) {
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
