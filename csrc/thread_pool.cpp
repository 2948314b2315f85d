#include "thread_pool.h"

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <exception>
#include <thread>

#include "team.h"

namespace octavo {
namespace {

std::atomic<int> g_num_threads{hardware_threads()};
thread_local Team* t_team = nullptr;  // the team that the calling thread leads

}  // namespace

int hardware_threads() {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return std::max(1, CPU_COUNT(&allowed));
    return std::max(1u, std::thread::hardware_concurrency());
}

int num_threads() { return g_num_threads.load(std::memory_order_relaxed); }

void set_num_threads(int count) { g_num_threads.store(count, std::memory_order_relaxed); }

namespace detail {

void run_tasks(int num_tasks, void (*task)(void*, int), void* context) {
    const int threads = std::min(num_threads(), num_tasks);
    if (threads <= 1) {
        for (int index = 0; index < num_tasks; ++index) task(context, index);
        return;
    }
    if (t_team) return t_team->run(num_tasks, task, context);
    std::atomic<int> next{0};
    // The whole team is asked for even when there are fewer tasks than threads: libgomp rebuilds the team whenever its
    // size changes.
#pragma omp parallel num_threads(num_threads())
    for (int index; (index = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) task(context, index);
}

void with_team(void (*body)(void*), void* context) {
    if (num_threads() == 1 || t_team) return body(context);
    Team team;
    std::exception_ptr thrown;
#pragma omp parallel num_threads(num_threads())
    if (omp_get_thread_num() != 0) {
        team.work();
    } else {
        t_team = &team;
        try {
            body(context);
        } catch (...) {  // nothing may leave a parallel region
            thrown = std::current_exception();
        }
        t_team = nullptr;
        team.close();
    }
    if (thrown) std::rethrow_exception(thrown);
}

}  // namespace detail
}  // namespace octavo
