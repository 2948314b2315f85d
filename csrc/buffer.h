// Memory that kernels stream through.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace octavo {

// Allocations begin at a cache line: storing a vector of sixteen floats across two lines costs two stores. Long ones
// use huge pages: a product writes a column of every row, and the rows may each be in a small page of their own.
template <class T> struct StreamAllocator {
    using value_type = T;
    StreamAllocator() = default;
    template <class U> StreamAllocator(const StreamAllocator<U>&) {}
    T* allocate(std::size_t count) {
        const std::size_t bytes = count * sizeof(T);
        void* memory = ::operator new(bytes, alignment(bytes));
#ifdef __linux__
        if (bytes >= kHugePage) madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);  // a hint
#endif
        return static_cast<T*>(memory);
    }
    void deallocate(T* memory, std::size_t count) { ::operator delete(memory, alignment(count * sizeof(T))); }
    bool operator==(const StreamAllocator&) const { return true; }

  private:
    static constexpr std::size_t kLine = 64, kHugePage = 2 << 20;
    static std::align_val_t alignment(std::size_t bytes) {
        return std::align_val_t(bytes >= kHugePage ? kHugePage : kLine);
    }
};

template <class T> using StreamBuffer = std::vector<T, StreamAllocator<T>>;

}  // namespace octavo
