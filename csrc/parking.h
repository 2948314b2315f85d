// Waiting until an atomic number changes: a pause between two looks, or sleep. On Linux by a futex and nothing else:
// std::atomic::wait of libstdc++ yields before it sleeps, which gives up a time slice that is short as it is when
// other processes are busy.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

#ifdef __linux__
static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);

// Sleeps while `number` is `value`; may return earlier.
inline void park(std::atomic<uint32_t>& number, uint32_t value) {
    syscall(SYS_futex, &number, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
inline void unpark_all(std::atomic<uint32_t>& number) {
    syscall(SYS_futex, &number, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
#else
inline void park(std::atomic<uint32_t>& number, uint32_t value) { number.wait(value); }
inline void unpark_all(std::atomic<uint32_t>& number) { number.notify_all(); }
#endif

}  // namespace octavo
