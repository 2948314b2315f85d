// On which cores threads run. When other processes are busy, Linux leaves two of our threads on one core for seconds,
// and a preempted thread waiting for its core for milliseconds while another core is idle: it does not know which
// thread waits for which. On other systems these functions do nothing.
#pragma once

#include <chrono>
#include <mutex>
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

// Allows a thread, while this object lives, only those of its cores for which `wanted(core)`, so that it goes there at
// once. Then it may use all of them again, and stays until the system finds it a better one. A mask set by others
// meanwhile (`taskset`, a cpuset, planner/machine.py) is left alone, and one thread is moved at a time: a second
// would take the first one's mask for all cores. Linux cannot exchange masks atomically: one that is set between two
// system calls in turn, which read and write the mask, is still lost.
class NarrowedMask {
  public:
    template <class Wanted> NarrowedMask(pthread_t thread, const Wanted& wanted) : thread_(thread) {
        CPU_ZERO(&chosen_);
        if (!moving_.owns_lock() || !read(all_)) return;
        for (int core = 0; core < CPU_SETSIZE; ++core)
            if (CPU_ISSET(core, &all_) && wanted(core)) CPU_SET(core, &chosen_);
        if (!CPU_COUNT(&chosen_) || CPU_EQUAL(&chosen_, &all_) || !write(chosen_)) CPU_ZERO(&chosen_);
    }
    ~NarrowedMask() {
        cpu_set_t now;
        if (CPU_COUNT(&chosen_) && read(now) && CPU_EQUAL(&now, &chosen_)) write(all_);
    }
    NarrowedMask(const NarrowedMask&) = delete;
    NarrowedMask& operator=(const NarrowedMask&) = delete;

  private:
    bool read(cpu_set_t& cores) const { return pthread_getaffinity_np(thread_, sizeof cores, &cores) == 0; }
    bool write(const cpu_set_t& cores) const { return pthread_setaffinity_np(thread_, sizeof cores, &cores) == 0; }

    static inline std::mutex moves_;
    std::unique_lock<std::mutex> moving_{moves_, std::try_to_lock};
    pthread_t thread_;
    cpu_set_t all_, chosen_;
};

inline void move_to_core(std::thread& thread, int core) {
    const NarrowedMask moved(thread.native_handle(), [=](int other) { return other == core; });
}

// Moves the calling thread to any other core.
inline void leave_core(int core) {
    const NarrowedMask moved(pthread_self(), [=](int other) { return other != core; });
}

#else

inline int current_core() { return -1; }
inline std::chrono::nanoseconds run_time(std::thread&) { return {}; }
inline void move_to_core(std::thread&, int) {}
inline void leave_core(int) {}

#endif

}  // namespace octavo
