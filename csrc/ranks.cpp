#include "ranks.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#endif

#include "parking.h"

namespace octavo {
namespace {

constexpr int64_t kPage = 4096;
// Pauses before a rank sleeps, some hundred microseconds: waking it would take tens of them.
constexpr int kSpins = 4000;
// How often a rank that sleeps looks whether another has failed.
constexpr long kLookNanoseconds = 250'000'000;

int64_t pages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

#ifdef __linux__
// As in parking.h, but between processes, and at most for a while.
void sleep_while(std::atomic<uint32_t>& number, uint32_t value) {
    const timespec most{0, kLookNanoseconds};
    syscall(SYS_futex, &number, FUTEX_WAIT, value, &most, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& number) { syscall(SYS_futex, &number, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
#endif

}  // namespace

struct alignas(64) Ranks::Signal {
    std::atomic<uint32_t> number, sleepers;
};

struct Ranks::Header {
    Signal sent, met[kMostRanks];
    alignas(64) std::atomic<uint32_t> failing, failed;
    char reason[2048];
};

#ifdef __linux__

Ranks::Ranks(int file, const RankLayout& layout, int rank, int count, double timeout_seconds)
    : timeout_seconds(timeout_seconds), layout_(layout), rank_(rank), count_(count) {
    void* memory = mmap(nullptr, bytes(layout), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (memory == MAP_FAILED)
        throw std::runtime_error("cannot map " + std::to_string(bytes(layout)) +
                                 " bytes for ranks to share: " + std::strerror(errno));
    header_ = static_cast<Header*>(memory);
    message_ = static_cast<char*>(memory) + pages(sizeof(Header));
    slots_ = message_ + pages(layout.message_bytes);
}

Ranks::~Ranks() { munmap(header_, bytes(layout_)); }

void Ranks::raise(Signal& signal, uint32_t number) {
    signal.number.store(number);
    if (signal.sleepers.load()) wake_all(signal.number);
}

void Ranks::wait(Signal& signal, uint32_t number, double seconds) {
    const auto reached = [&] {
        return static_cast<int32_t>(signal.number.load(std::memory_order_acquire) - number) >= 0;
    };
    for (int i = 0; i < kSpins; ++i) {
        if (reached()) return;
        pause();
    }
    const auto began = std::chrono::steady_clock::now();
    signal.sleepers.fetch_add(1);
    for (uint32_t seen; static_cast<int32_t>((seen = signal.number.load()) - number) < 0;) {
        const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
        if (seconds > 0 && waited > seconds) {
            const auto late = &signal - header_->met;
            fail("rank " + std::to_string(late) + " has not answered rank " + std::to_string(rank_) + " for " +
                 std::to_string(static_cast<int>(seconds)) + " s");
        }
        if (header_->failed.load()) break;
        sleep_while(signal.number, seen);
    }
    signal.sleepers.fetch_sub(1);
    check();
}

#else

Ranks::Ranks(int, const RankLayout& layout, int rank, int count, double timeout_seconds)
    : timeout_seconds(timeout_seconds), layout_(layout), rank_(rank), count_(count) {
    throw std::runtime_error("several ranks need memory without a name that processes share, which Linux has");
}
Ranks::~Ranks() = default;
void Ranks::raise(Signal&, uint32_t) {}
void Ranks::wait(Signal&, uint32_t, double) {}
void wake_all(std::atomic<uint32_t>&) {}

#endif

int64_t Ranks::bytes(const RankLayout& layout) {
    return pages(sizeof(Header)) + pages(layout.message_bytes) +
           2 * ((layout.num_slots - 1) * pages(layout.slot_bytes) + pages(layout.last_bytes));
}

char* Ranks::next_buffer(int slot, int64_t bytes) {
    const bool is_last = slot == layout_.num_slots - 1;
    const int64_t size = is_last ? layout_.last_bytes : layout_.slot_bytes;
    if (bytes > size)
        throw std::invalid_argument("ranks cannot exchange " + std::to_string(bytes) + " bytes: the memory that they " +
                                    "share was made for " + std::to_string(size) +
                                    ", the most tokens that a step was to have");
    second_buffer_ ^= uint64_t{1} << slot;
    const int64_t second = second_buffer_ >> slot & 1;
    return slots_ + 2 * slot * pages(layout_.slot_bytes) + second * pages(size);
}

void Ranks::meet() {
    raise(header_->met[rank_], ++meetings_);
    for (int other = 0; other < count_; ++other)
        if (other != rank_) wait(header_->met[other], meetings_, timeout_seconds);
}

void Ranks::send() {
    check();
    raise(header_->sent, ++messages_);
}

void Ranks::receive() { wait(header_->sent, ++messages_, 0); }

void Ranks::fail(const std::string& reason) {
    if (header_->failing.exchange(1) == 0) {
        const std::size_t length = std::min(reason.size(), sizeof header_->reason - 1);
        std::memcpy(header_->reason, reason.data(), length);
        header_->reason[length] = 0;
        header_->failed.store(1);
        wake_all(header_->sent.number);
        for (Signal& signal : header_->met) wake_all(signal.number);
    }
}

std::string Ranks::failure() const { return header_->failed.load() ? header_->reason : ""; }

void Ranks::check() const {
    if (header_->failed.load()) throw RankError(header_->reason);
}

void Ranks::reset() {
    std::memset(static_cast<void*>(header_), 0, sizeof(Header));
    meetings_ = messages_ = 0;
    second_buffer_ = 0;
}

}  // namespace octavo
