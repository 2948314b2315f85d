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
    std::atomic<int> threads;
    char reason[2048];
};

#ifdef __linux__

Ranks::Ranks(int file, const RankLayout& layout, const RankPlace& place, double timeout_seconds)
    : timeout_seconds(timeout_seconds), layout_(layout), place_(place) {
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
            const auto late = &signal - header_->met + place_.in_all() - place_.rank;
            fail("rank " + std::to_string(late) + " has not answered rank " + std::to_string(place_.in_all()) +
                 " for " + std::to_string(static_cast<int>(seconds)) + " s");
        }
        if (header_->failed.load()) break;
        sleep_while(signal.number, seen);
    }
    signal.sleepers.fetch_sub(1);
    check();
}

#else

Ranks::Ranks(int, const RankLayout& layout, const RankPlace& place, double timeout_seconds)
    : timeout_seconds(timeout_seconds), layout_(layout), place_(place) {
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
    raise(header_->met[place_.rank], ++meetings_);
    for (int other = 0; other < place_.count; ++other)
        if (other != place_.rank) wait(header_->met[other], meetings_, timeout_seconds);
}

// Uses the link; a failure of it is one of all ranks.
template <class Carry> void Ranks::carry(const Carry& carry) {
    try {
        carry();
    } catch (const std::exception& error) {
        fail(error.what());
        check();
    }
}

void Ranks::gather(const Matrix& buffer, const Columns& columns, int64_t element_bytes) {
    meet();
    if (place_.machines == 1 || buffer.rows == 0) return;
    if (place_.rank == 0) {
        const auto begin = [&](int machine) { return columns.begins[machine * place_.count] * element_bytes; };
        const auto width = [&](int machine) { return begin(machine + 1) - begin(machine); };
        int64_t widest = 0;
        for (int machine = 0; machine < place_.machines; ++machine) widest = std::max(widest, width(machine));
        const int64_t bytes = buffer.rows * widest;
        packed_.resize(bytes);
        received_.resize(place_.machines * bytes);
        for (int64_t row = 0; row < buffer.rows; ++row)
            std::memcpy(packed_.data() + row * widest, buffer.row(row) + begin(place_.machine), width(place_.machine));
        carry([&] { link_.gather(packed_.data(), received_.data(), bytes); });
        for (int machine = 0; machine < place_.machines; ++machine)
            for (int64_t row = 0; machine != place_.machine && row < buffer.rows; ++row)
                std::memcpy(buffer.row(row) + begin(machine), received_.data() + machine * bytes + row * widest,
                            width(machine));
    }
    meet();
}

void Ranks::gather_rows(const Matrix& buffer, const std::function<int(int64_t row)>& rank_of) {
    meet();
    if (place_.machines == 1) return;
    if (place_.rank == 0) {
        const int64_t bytes = buffer.rows * buffer.stride;
        received_.resize(place_.machines * bytes);
        carry([&] { link_.gather(buffer.base, received_.data(), bytes); });
        for (int64_t row = 0; row < buffer.rows; ++row)
            std::memcpy(buffer.row(row), received_.data() + rank_of(row) / place_.count * bytes + row * buffer.stride,
                        buffer.stride);
    }
    meet();
}

void Ranks::send(int64_t bytes) {
    check();
    raise(header_->sent, ++messages_);
    if (place_.machines > 1 && place_.machine == 0) {
        carry([&] {
            link_.broadcast(reinterpret_cast<char*>(&bytes), sizeof bytes);
            link_.broadcast(message_, bytes);
        });
    }
}

void Ranks::receive() {
    if (place_.machine == 0 || place_.rank > 0) return wait(header_->sent, ++messages_, 0);
    int64_t bytes = 0;
    carry([&] {
        link_.broadcast(reinterpret_cast<char*>(&bytes), sizeof bytes);
        if (bytes < 0 || bytes > layout_.message_bytes)
            throw std::invalid_argument("a message of " + std::to_string(bytes) + " bytes from another machine");
        link_.broadcast(message_, bytes);
    });
    send(bytes);
}

void Ranks::set_threads(int count) { header_->threads.store(count, std::memory_order_relaxed); }

int Ranks::threads() const { return header_->threads.load(std::memory_order_relaxed); }

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
