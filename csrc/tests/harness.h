// A small test harness that uses no library, so that `make sanitize` needs only a compiler and CMake.
//
// A test is a function registered by TEST(name). It runs once for each instruction-set level that the machine has, or
// only once if registered by TEST_ONCE. Random numbers are seeded with the test's name, the level and --seed, so that
// failures can be repeated.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "kernels.h"

namespace octavo::test {

enum Runs { kEachLevel, kOnce };

struct Test {
    const char* name;
    Runs runs;
    void (*body)();
    Test* next;
};
struct Registration {
    Registration(const char* name, Runs runs, void (*body)());
};

// Prints the claim that failed with what the test says about the case, and ends the process.
[[noreturn]] void fail(const char* file, int line, const std::string& what);
// Describes the running case; shown if it fails.
void describe_case(std::string text);
// How many random cases a test draws: `usual` times --scale, at least one. They are counted.
int cases(int usual);
std::mt19937_64& random_engine();

inline int random_int(int low, int high) {
    return low + static_cast<int>(random_engine()() % static_cast<uint64_t>(high - low + 1));
}
inline bool random_bool() { return random_int(0, 1) != 0; }
inline float random_normal() { return std::normal_distribution<float>()(random_engine()); }
template <class T, std::size_t N> T random_of(const T (&choices)[N]) {
    return choices[random_int(0, static_cast<int>(N) - 1)];
}

// Exactly `bytes` bytes of heap memory, `offset` bytes after the beginning of the allocation: AddressSanitizer sees an
// access to the first byte beyond. It holds NaN until it is written.
class Buffer {
  public:
    explicit Buffer(int64_t bytes, int offset = 0)
        : size_(bytes), base_(static_cast<char*>(std::malloc(bytes + offset))), begin_(base_ + offset) {
        std::memset(begin_, 0xff, bytes);
    }
    ~Buffer() { std::free(base_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    char* data() const { return begin_; }
    template <class T> T* as() const { return reinterpret_cast<T*>(begin_); }
    int64_t size() const { return size_; }

  private:
    int64_t size_;
    char *base_, *begin_;
};

inline float bf16_to_float(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline uint16_t float_to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline int element_bytes(Storage storage) { return storage == kBf16 ? 2 : 4; }
inline float load(const char* from, int64_t index, Storage storage) {
    if (storage == kBf16) {
        uint16_t half;
        std::memcpy(&half, from + index * 2, 2);
        return bf16_to_float(half);
    }
    float value;
    std::memcpy(&value, from + index * 4, 4);
    return value;
}
inline void store(float value, char* to, int64_t index, Storage storage) {
    const uint16_t half = float_to_bf16(value);
    if (storage == kBf16)
        std::memcpy(to + index * 2, &half, 2);
    else
        std::memcpy(to + index * 4, &value, 4);
}
inline void fill_normal(const Buffer& buffer, Storage storage, float scale = 1.0f) {
    for (int64_t i = 0; i < buffer.size() / element_bytes(storage); ++i)
        store(random_normal() * scale, buffer.data(), i, storage);
}
// Plain keys and values in dense memory.
inline LayerKV plain_layer(const char* key, const char* value, int64_t blocks, int kv_heads, int key_dim, int value_dim,
                           int block_size, Storage storage) {
    const int64_t token_bytes = block_size * element_bytes(storage), key_head = key_dim * token_bytes,
                  value_head = value_dim * token_bytes;
    const int key_units = storage == kBf16 ? key_dim / 2 : key_dim;
    return {key, value, kv_heads * key_head, key_head, kv_heads * value_head, value_head, blocks,
            kv_heads, key_units, value_dim, block_size, storage, false};
}
// Relative bound of the error of rounding a result to its storage type.
inline double rounding(Storage storage) { return storage == kBf16 ? 0x1p-8 : 0x1p-23; }

// The textbook's activation.
inline double activated(Activation activation, double x, const float* parameters = nullptr) {
    switch (activation) {
        case kXielu:
            return (x > 0 ? parameters[0] * x * x : parameters[1] * (std::expm1(x) - x)) + parameters[2] * x;
        case kSilu: return x < -700 ? 0 : x / (1 + std::exp(-x));
        case kGeluTanh: return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
        case kGelu: return 0.5 * x * std::erfc(-x * 0.7071067811865476);
        case kRelu2: return x > 0 ? x * x : 0;
        default: return std::max(x, 0.0);
    }
}

void check_near(double actual, double expected, double tolerance, const char* file, int line, const std::string& what);

}  // namespace octavo::test

#define OCTAVO_TEST(name, runs)                                                             \
    static void name();                                                                     \
    static const ::octavo::test::Registration registration_of_##name{#name, runs, &(name)}; \
    static void name()
#define TEST(name) OCTAVO_TEST(name, ::octavo::test::kEachLevel)
#define TEST_ONCE(name) OCTAVO_TEST(name, ::octavo::test::kOnce)

#define CHECK(claim)                                                    \
    do {                                                                \
        if (!(claim)) ::octavo::test::fail(__FILE__, __LINE__, #claim); \
    } while (false)
#define CHECK_NEAR(actual, expected, tolerance, what) \
    ::octavo::test::check_near(actual, expected, tolerance, __FILE__, __LINE__, what)
