#include "thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace octavo {
namespace {

std::atomic<int> g_num_threads{hardware_threads()};

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
    std::atomic<int> next{0};
    // The whole team is asked for even when there are fewer tasks than threads: libgomp rebuilds the team whenever its
    // size changes.
#pragma omp parallel num_threads(num_threads())
    for (int index; (index = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) task(context, index);
}

}  // namespace detail
}  // namespace octavo
