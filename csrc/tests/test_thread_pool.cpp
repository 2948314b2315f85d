// The thread pool: every task runs exactly once, whatever happens around it.
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cores.h"
#include "harness.h"
#include "task_shares.h"
#include "thread_pool.h"

namespace octavo::test {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

// Plain memory, which only the pool's own ordering protects from races.
struct Round {
    std::vector<int> counts;
    int64_t sum = 0;
    explicit Round(int tasks) : counts(tasks) {
        parallel_for(tasks, [&](int i) { ++counts[i]; });
        for (const int count : counts) sum += count;
    }
    bool each_once() const {
        for (const int count : counts)
            if (count != 1) return false;
        return true;
    }
};

TEST_ONCE(every_task_runs_once_on_any_number_of_threads) {
    for (int i = cases(400); i > 0; --i) {
        set_num_threads(random_int(1, random_int(0, 9) ? 6 : 40));  // resized between rounds
        if (random_int(0, 3) == 0) wake_threads();
        if (random_int(0, 20) == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_int(1, 300)));
        CHECK(Round(random_int(0, random_int(0, 9) ? 50 : 3000)).each_once());
    }
}

// Threads that come in any order, and of which some never come, played one after the other.
TEST_ONCE(shares_are_taken_once_whoever_comes_when) {
    const auto shares = std::make_unique<TaskShares>();
    for (int i = cases(300); i > 0; --i) {
        const int threads = random_int(1, random_bool() ? 6 : 128), tasks = random_int(1, random_bool() ? 40 : 3000);
        describe_case(std::to_string(tasks) + " tasks, " + std::to_string(threads) + " threads");
        shares->open(nullptr, nullptr, tasks, threads);
        const TaskShares::Terms terms = shares->terms();
        CHECK(terms.num_tasks == tasks && terms.threads <= threads);
        std::vector<int> counts(tasks);
        std::vector<TaskShares::Visit> coming;
        for (int thread = 0; thread < threads; ++thread)
            if (thread == 0 || random_bool()) coming.push_back({thread});
        while (!coming.empty()) {
            CHECK(!shares->all_done(terms) || std::count(counts.begin(), counts.end(), 1) == tasks);
            // The leader comes last to what no other takes.
            const size_t next = random_int(coming.size() > 1, static_cast<int>(coming.size()) - 1);
            const TaskShares::Taken taken = shares->next(terms, coming[next]);
            for (int task = 0; task < taken.count; ++task) ++counts[taken.first + task * terms.threads];
            if (taken.count == 0) coming.erase(coming.begin() + static_cast<std::ptrdiff_t>(next));
        }
        CHECK(shares->all_done(terms));
        for (const int count : counts) CHECK(count == 1);
        // Who comes too late finds nothing, in the next round too.
        TaskShares::Visit late{threads - 1};
        CHECK(shares->next(terms, late).count == 0);
        shares->open(nullptr, nullptr, tasks, threads);
        late = {threads - 1};
        CHECK(shares->next(terms, late).count == 0 && !shares->all_done(shares->terms()));
        for (TaskShares::Visit leader{0}; shares->next(shares->terms(), leader).count > 0;) {}
        CHECK(shares->all_done(shares->terms()));
    }
}

// Whether as many threads as tasks take one each: every task waits for all others.
bool everyone_comes(int threads) {
    std::atomic<int> came{0};
    parallel_for(threads, [&](int) {
        came.fetch_add(1);
        came.notify_all();
        for (int now; (now = came.load()) < threads;) came.wait(now);
    });
    return came.load() == threads;
}

TEST_ONCE(callers_at_the_same_time_do_not_meet) {
    for (int i = cases(10); i > 0; --i) {
        set_num_threads(random_int(2, 4));
        std::atomic<bool> fine{true};
        std::vector<std::thread> callers;
        for (int caller = 0; caller < 4; ++caller)
            callers.emplace_back([&fine] {
                for (int round = 0; round < 50; ++round) {
                    wake_threads();
                    if (!Round(37).each_once()) fine = false;
                }
            });
        for (int resize = 0; resize < 20; ++resize) {
            set_num_threads(1 + resize % 5);
            std::this_thread::yield();
        }
        for (std::thread& caller : callers) caller.join();
        CHECK(fine);
    }
}

TEST_ONCE(a_task_within_a_task_does_its_own_alone) {
    set_num_threads(3);
    for (int i = cases(50); i > 0; --i) {
        std::vector<int> inner(20 * 30);
        parallel_for(20, [&](int outer) { parallel_for(30, [&, outer](int index) { ++inner[outer * 30 + index]; }); });
        for (const int count : inner) CHECK(count == 1);
    }
}

// Whether the calling thread does the tasks alone, while others would have the time to take some.
bool does_its_own_alone() {
    const auto self = std::this_thread::get_id();
    std::atomic<bool> alone{true};
    parallel_for(8, [&](int) {
        for (int i = 0; i < 50'000 && alone.load(); ++i) {}
        if (std::this_thread::get_id() != self) alone = false;
    });
    return alone.load();
}

TEST_ONCE(a_task_does_its_own_alone_however_it_came_to_run) {
    for (int i = cases(10); i > 0; --i) {
        set_num_threads(4);
        bool alone = true;
        parallel_for(1, [&](int) { alone = alone && does_its_own_alone(); });
        CHECK(alone);
        // Another thread leads until this one, which therefore does its tasks itself, is in the first of them.
        std::atomic<bool> leads{false}, go{false};
        std::thread other([&] {
            parallel_for(2, [&](int) {
                leads = true;
                leads.notify_all();
                go.wait(false);
            });
        });
        leads.wait(false);
        parallel_for(2, [&](int task) {
            go = true;
            go.notify_all();
            if (task == 0) other.join();
            alone = alone && does_its_own_alone();
        });
        CHECK(alone);
        CHECK(everyone_comes(4));  // a thread that has ended its tasks shares the next ones again
    }
}

TEST_ONCE(what_a_task_throws_comes_out_when_all_have_ended) {
    for (int i = cases(200); i > 0; --i) {
        const int threads = random_int(1, 5), tasks = random_int(2, 60), culprits = random_int(1, 3);
        set_num_threads(threads);
        std::vector<int> counts(tasks);
        bool caught = false;
        try {
            parallel_for(tasks, [&](int index) {
                ++counts[index];
                if (index < culprits) throw std::runtime_error("task " + std::to_string(index));
            });
        } catch (const std::runtime_error& error) {
            caught = std::string(error.what()).starts_with("task ");
        }
        CHECK(caught);
        for (const int count : counts) CHECK(count == 1);
        CHECK(Round(tasks).each_once());
    }
}

TEST_ONCE(a_forked_child_begins_anew) {
    if (kThreadSanitizer) return;  // it does not follow the threads of a forked child
    set_num_threads(3);
    for (int i = cases(5); i > 0; --i) {
        CHECK(Round(100).each_once());
        const pid_t child = fork();
        if (child == 0) _exit(Round(100).each_once() && Round(7).each_once() ? 0 : 1);
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(status == 0);
    }
}

#ifdef __linux__
// How often each other thread of this process has gone to sleep.
std::map<std::string, int64_t> sleeps_of_other_threads() {
    const std::string self = std::to_string(syscall(SYS_gettid));
    std::map<std::string, int64_t> sleeps;
    for (const auto& folder : std::filesystem::directory_iterator("/proc/self/task")) {
        const std::string thread = folder.path().filename();
        std::ifstream status(folder.path() / "status");
        for (std::string name; thread != self && status >> name;)
            if (name == "voluntary_ctxt_switches:") status >> sleeps[thread];
    }
    return sleeps;
}

TEST_ONCE(threads_that_are_no_longer_wanted_sleep_on) {
    set_num_threads(9);
    CHECK(Round(9).each_once());
    set_num_threads(2);
    CHECK(Round(9).each_once());
    const auto before = sleeps_of_other_threads();
    constexpr int kRounds = 100;
    for (int i = 0; i < kRounds; ++i) CHECK(everyone_comes(2));
    int64_t all = 0, most = 0;
    for (const auto& [thread, count] : sleeps_of_other_threads()) {
        const int64_t sleeps = before.contains(thread) ? count - before.at(thread) : 0;
        all += sleeps;
        most = std::max(most, sleeps);
    }
    // All but the one that is wanted. When every round woke them, each slept once a round.
    describe_case(std::to_string(all - most) + " times asleep in " + std::to_string(kRounds) + " rounds");
    CHECK(all - most < kRounds);
    set_num_threads(9);  // and they come when they are wanted again
    for (int i = 0; i < 5; ++i) CHECK(everyone_comes(9));
}

TEST_ONCE(a_thread_that_is_moved_keeps_all_its_cores) {
    const auto allowed = [](pthread_t thread) {
        cpu_set_t cores;
        CHECK(pthread_getaffinity_np(thread, sizeof cores, &cores) == 0);
        std::vector<bool> out;
        for (int core = 0; core < CPU_SETSIZE; ++core) out.push_back(CPU_ISSET(core, &cores));
        return out;
    };
    const std::vector<bool> all = allowed(pthread_self());
    std::atomic<bool> stop{false};
    std::thread other([&] {
        while (!stop.load()) std::this_thread::yield();
    });
    for (int core = 0; core < 70; ++core) {  // most of which do not exist
        leave_core(core);
        move_to_core(other, core);
        CHECK(allowed(pthread_self()) == all);
        CHECK(allowed(other.native_handle()) == all);
    }
    stop.store(true);
    other.join();
}

TEST_ONCE(a_mask_set_while_a_thread_is_moved_stays) {
    cpu_set_t all, first, last;
    CHECK(pthread_getaffinity_np(pthread_self(), sizeof all, &all) == 0);
    if (CPU_COUNT(&all) < 2) return;  // nothing to choose from
    std::vector<int> cores;
    for (int core = 0; core < CPU_SETSIZE; ++core)
        if (CPU_ISSET(core, &all)) cores.push_back(core);
    CPU_ZERO(&first);
    CPU_ZERO(&last);
    CPU_SET(cores.front(), &first);
    CPU_SET(cores.back(), &last);
    cpu_set_t now;
    {
        const NarrowedMask moved(pthread_self(), [&](int core) { return core == cores.front(); });
        CHECK(pthread_getaffinity_np(pthread_self(), sizeof now, &now) == 0);
        CHECK(CPU_EQUAL(&now, &first));
        leave_core(cores.front());  // one at a time: does nothing
        CHECK(pthread_getaffinity_np(pthread_self(), sizeof now, &now) == 0);
        CHECK(CPU_EQUAL(&now, &first));
        CHECK(pthread_setaffinity_np(pthread_self(), sizeof last, &last) == 0);
    }
    CHECK(pthread_getaffinity_np(pthread_self(), sizeof now, &now) == 0);
    CHECK(pthread_setaffinity_np(pthread_self(), sizeof all, &all) == 0);
    CHECK(CPU_EQUAL(&now, &last));
}

TEST_ONCE(the_run_time_of_a_running_thread_grows) {
    std::atomic<bool> stop{false};
    std::thread thread([&] {
        while (!stop.load()) {}
    });
    const auto begin = run_time(thread);
    while (run_time(thread) <= begin) std::this_thread::yield();
    stop.store(true);
    thread.join();
}
#endif

TEST_ONCE(sleeping_threads_wake_for_work) {
    set_num_threads(4);
    for (int i = cases(20); i > 0; --i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));  // longer than they spin
        CHECK(Round(64).each_once());
    }
}

TEST_ONCE(a_caller_that_sleeps_wakes_when_the_last_task_ends) {
    set_num_threads(4);
    const std::thread::id caller = std::this_thread::get_id();
    for (int i = cases(200); i > 0; --i) {
        // About as long as the caller watches before it sleeps, so that the end often comes just before or after.
        const auto time = std::chrono::microseconds(random_int(20, 120));
        std::vector<int> counts(8);
        parallel_for(8, [&](int task) {
            if (std::this_thread::get_id() != caller) std::this_thread::sleep_for(time);
            ++counts[task];
        });
        CHECK(counts == std::vector<int>(8, 1));
    }
}

}  // namespace
}  // namespace octavo::test
