#include "touch_ahead.h"

#ifdef __linux__
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace octavo {
namespace {

struct Pages {
    uintptr_t begin, end;
};

class Toucher {
  public:
    const pid_t process = getpid();

    void ask(Pages pages) {
        const std::lock_guard lock(mutex_);
        if (!std::exchange(started_, true)) {
            try {
                std::thread([this] { work(); }).detach();
            } catch (const std::system_error&) {
                return;  // the system refuses a thread: steps take their pages themselves
            }
        }
        asked_.push_back(pages);
        any_.notify_one();
    }

  private:
    // Memory that has been freed since is no error: the system says so, or takes pages of what is mapped there now.
    void work() {
        pthread_setname_np(pthread_self(), "octavo-touch");
        for (std::unique_lock lock(mutex_);;) {
            any_.wait(lock, [&] { return !asked_.empty(); });
            const std::vector<Pages> now = std::exchange(asked_, {});
            lock.unlock();
            for (const Pages& pages : now)
                madvise(reinterpret_cast<void*>(pages.begin), pages.end - pages.begin, MADV_POPULATE_WRITE);
            lock.lock();
        }
    }

    std::mutex mutex_;
    std::condition_variable any_;
    std::vector<Pages> asked_;
    bool started_ = false;
};

std::atomic<Toucher*> g_toucher{nullptr};

// Never destroyed, as the pool of threads. A forked child has none of its parent's threads: it makes its own.
Toucher& toucher() {
    Toucher* known = g_toucher.load(std::memory_order_acquire);
    while (!known || known->process != getpid()) {
        Toucher* const made = new Toucher;
        if (g_toucher.compare_exchange_strong(known, made)) return *made;
        delete made;
    }
    return *known;
}

}  // namespace

void touch_ahead(const char* begin, int64_t bytes) {
    if (bytes <= 0) return;
    static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto first = reinterpret_cast<uintptr_t>(begin);
    toucher().ask({first / page * page, first + static_cast<uintptr_t>(bytes)});
}

}  // namespace octavo

#else

namespace octavo {
void touch_ahead(const char*, int64_t) {}
}  // namespace octavo

#endif
