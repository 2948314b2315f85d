// On which cores threads run. Beside other busy processes, Linux leaves two threads of ours on one core for seconds,
// and a preempted thread waiting for its core for milliseconds while another core is idle: it does not know which
// thread waits for which. On other systems these functions do nothing.
#pragma once

#include <chrono>
#include <thread>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#include <time.h>
#endif

namespace octavo {

#ifdef __linux__

// The core that the calling thread runs on.
inline int current_core() { return sched_getcpu(); }

// How long a thread has run in all. It stands still while the thread is preempted or sleeps.
inline std::chrono::nanoseconds run_time(std::thread& thread) {
    clockid_t clock;
    timespec time{};
    if (pthread_getcpuclockid(thread.native_handle(), &clock) == 0) clock_gettime(clock, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

namespace detail {
// Allows a thread only those of its cores for which `wanted(core)`, so that it goes there at once, then all of them
// again: it stays until the system finds it a better one.
template <class Wanted> void move_thread(pthread_t thread, const Wanted& wanted) {
    cpu_set_t allowed, chosen;
    CPU_ZERO(&chosen);
    if (pthread_getaffinity_np(thread, sizeof allowed, &allowed) != 0) return;
    for (int core = 0; core < CPU_SETSIZE; ++core)
        if (CPU_ISSET(core, &allowed) && wanted(core)) CPU_SET(core, &chosen);
    if (CPU_COUNT(&chosen) > 0 && pthread_setaffinity_np(thread, sizeof chosen, &chosen) == 0)
        pthread_setaffinity_np(thread, sizeof allowed, &allowed);
}
}  // namespace detail

inline void move_to_core(std::thread& thread, int core) {
    detail::move_thread(thread.native_handle(), [=](int other) { return other == core; });
}

// Moves the calling thread to any other core.
inline void leave_core(int core) {
    detail::move_thread(pthread_self(), [=](int other) { return other != core; });
}

#else

inline int current_core() { return -1; }
inline std::chrono::nanoseconds run_time(std::thread&) { return {}; }
inline void move_to_core(std::thread&, int) {}
inline void leave_core(int) {}

#endif

}  // namespace octavo
