// Sixteen lanes in the vector extensions of GCC and Clang, which compile for any machine. As loops over arrays they
// took three times as long to compile.
#pragma once

#include "level/simd/common.h"

namespace octavo::OCTAVO_LEVEL {

typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef int8_t SignedBytes __attribute__((vector_size(16)));

// Memory may have been declared as another type, and need not be aligned.
template <class V> inline V load_lanes(const void* p) {
    V out;
    __builtin_memcpy(&out, p, sizeof out);
    return out;
}
template <class To, class V> inline To convert(V v) { return __builtin_convertvector(v, To); }

struct U16 {
    Words v;
    static U16 load(const void* p) { return {load_lanes<Words>(p)}; }
    static U16 set1(uint32_t x) { return {x - Words{}}; }
    static U16 zero() { return {Words{}}; }
};
inline U16 operator&(U16 a, U16 b) { return {a.v & b.v}; }
inline U16 operator|(U16 a, U16 b) { return {a.v | b.v}; }
inline U16 operator^(U16 a, U16 b) { return {a.v ^ b.v}; }
inline U16 operator+(U16 a, U16 b) { return {a.v + b.v}; }
inline U16 max(U16 a, U16 b) { return {(Ints)a.v > (Ints)b.v ? a.v : b.v}; }  // of signed integers
inline int32_t reduce_max(U16 a) {
    int32_t lanes[16];
    __builtin_memcpy(lanes, &a.v, 64);
    int32_t largest = lanes[0];
    for (const int32_t lane : lanes) largest = max(largest, lane);
    return largest;
}
// table[code] of each byte, which is less than 16.
[[gnu::noinline]] inline U16 look_up(const uint8_t* table, const U16& codes) {
    uint8_t bytes[64];
    __builtin_memcpy(bytes, &codes.v, 64);
    for (uint8_t& byte : bytes) byte = table[byte & 15];
    return U16::load(bytes);
}
template <int N> inline U16 shift_left(U16 a) { return {a.v << N}; }
template <int N> inline U16 shift_right(U16 a) { return {a.v >> N}; }

[[gnu::noinline]] inline Floats half_to_float(const Words& x) {  // as common.h's
    const Words sign = (x & 0x8000) << 16, magnitude = x & 0x7fff;
    const Floats finite = (Floats)sign + ((sign != 0) ? -1.0f + Floats{} : 1.0f + Floats{}) *
                                             ((Floats)(magnitude << 13) * 0x1p112f);
    return (magnitude >= 0x7c00) ? (Floats)(sign | 0x7f800000 | (magnitude & 0x3ff) << 13) : finite;
}

struct F16 {
    Floats v;
    static F16 load(const float* p) { return {load_lanes<Floats>(p)}; }
    static F16 load(const bf16* p) { return {(Floats)(convert<Words>(load_lanes<Halves>(p)) << 16)}; }
    static F16 load_half(const uint16_t* p) { return {half_to_float(convert<Words>(load_lanes<Halves>(p)))}; }
    static F16 set1(float x) { return {x - Floats{}}; }
    static F16 zero() { return {Floats{}}; }
    static F16 from_int(U16 x) { return {convert<Floats>((Ints)x.v)}; }
    void store(float* p) const { __builtin_memcpy(p, &v, 64); }
    void store(bf16* p) const {  // float_to_bf16 of each lane
        const Words bits = (Words)v, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        const Halves halves = convert<Halves>((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
        __builtin_memcpy(p, &halves, 32);
    }
};
template <class T> inline void store_both(F16 a, F16 b, T* p) {
    a.store(p);
    b.store(p + 16);
}
inline F16 as_float(U16 a) { return {(Floats)a.v}; }
inline U16 as_bits(F16 a) { return {(Words)a.v}; }
inline F16 operator+(F16 a, F16 b) { return {a.v + b.v}; }
inline F16 operator-(F16 a, F16 b) { return {a.v - b.v}; }
inline F16 operator*(F16 a, F16 b) { return {a.v * b.v}; }
inline F16 operator/(F16 a, F16 b) { return {a.v / b.v}; }
#ifdef OCTAVO_TILES  // emulates a level that rounds once; by way of double, GCC 12 gives other bits when it vectorises
[[gnu::noinline]] inline F16 fma(const F16& a, const F16& b, const F16& c) {
    F16 out;
    for (int i = 0; i < 16; ++i) out.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
    return out;
}
#else
inline F16 fma(F16 a, F16 b, F16 c) { return {c.v + a.v * b.v}; }
#endif
inline F16 max(F16 a, F16 b) { return {a.v > b.v ? a.v : b.v}; }
inline F16 min(F16 a, F16 b) { return {a.v < b.v ? a.v : b.v}; }
inline float reduce_add(F16 a) {
    float lanes[16];
    a.store(lanes);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
    return lanes[0];
}
inline float reduce_max(F16 a) {
    float lanes[16];
    a.store(lanes);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; ++i) lanes[i] = lanes[i] > lanes[i + step] ? lanes[i] : lanes[i + step];
    return lanes[0];
}
inline bool any_lane(const Ints& mask) {
    int32_t lanes[16], any = 0;
    __builtin_memcpy(lanes, &mask, 64);
    for (const int32_t lane : lanes) any |= lane;
    return any != 0;
}
inline bool any_greater(F16 a, F16 b) { return any_lane(a.v > b.v); }
inline bool all_at_most(F16 a, F16 b) { return !any_lane(~(a.v <= b.v)); }  // no NaN
inline F16 keep_lanes(F16 a, int low, int high, F16 other) {
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return {((low <= lane) & (lane < high)) ? a.v : other.v};
}

#ifdef OCTAVO_TILES  // emulates AVX-512, bit for bit
template <int N> [[gnu::noinline]] F16 exp2_by(const float (&poly)[N], const F16& x) {
    F16 n = x;
    for (int i = 0; i < 16; ++i) n.v[i] = __builtin_rintf(x.v[i]);
    const F16 f = x - n;
    F16 p = F16::set1(poly[N - 1]);
    for (int i = N - 2; i >= 0; --i) p = fma(p, f, F16::set1(poly[i]));
    for (int i = 0; i < 16; ++i) {
        const float exponent = n.v[i] < -300.0f ? -300.0f : n.v[i] > 300.0f ? 300.0f : n.v[i];
        if (__builtin_isinf(static_cast<float>(n.v[i])))  // f is NaN
            p.v[i] = n.v[i] > 0.0f ? n.v[i] : 0.0f;
        else
            p.v[i] = exponent == exponent ? __builtin_ldexpf(p.v[i], static_cast<int>(exponent)) : exponent;
    }
    return p;
}
inline F16 exp2_bounded(F16 x) { return exp2_by(kExp2Poly, x); }
inline F16 exp2_coarse(F16 x) { return exp2_by(kExp2CoarsePoly, x); }
inline F16 exp2(F16 x) { return exp2_bounded(max(F16::set1(-200.0f), min(F16::set1(200.0f), x))); }
#else
[[gnu::noinline]] inline F16 exp2(const F16& x) {
    const Floats low = -126.0f + Floats{}, high = 127.0f + Floats{};
    const Floats clamped = x.v < low ? low : x.v > high ? high : x.v;
    const Floats n = (clamped + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23 rounds to an integer
    const Floats f = clamped - n;
    Floats p = kExp2Poly[5] + Floats{};
    for (int j = 4; j >= 0; --j) p = p * f + kExp2Poly[j];
    const Ints exponent = convert<Ints>(n == n ? n : Floats{});
    const Floats result = p * (Floats)((Words)(exponent + 127) << 23);
    return {x.v < low ? Floats{} : result};  // below, the result is flushed to zero
}

inline F16 exp2_bounded(F16 x) { return exp2(x); }
inline F16 exp2_coarse(F16 x) { return exp2(x); }
#endif

inline F16 mac_bf16(F16 acc, U16 a, U16 b) {
    const Floats low = acc.v + (Floats)(a.v << 16) * (Floats)(b.v << 16);
    return {low + (Floats)(a.v & 0xffff0000u) * (Floats)(b.v & 0xffff0000u)};
}
inline F16 mac_f32(F16 acc, U16 a, U16 b) { return {acc.v + (Floats)a.v * (Floats)b.v}; }

[[gnu::noinline]] inline U16 dot_bytes(const U16& acc, const U16& a, const U16& b) {
    Words sum = acc.v;
    for (int byte = 0; byte < 32; byte += 8)
        sum += (a.v >> byte & 0xff) * (Words)((Ints)(b.v << (24 - byte)) >> 24);
    return {sum};
}
inline U16 dot_small(const U16& acc, const U16& a, const U16& b) { return dot_bytes(acc, a, b); }

// Rounds to the nearest integers, which are in [-128, 127]; NaN becomes zero.
inline void round_to_int8(F16 x, int8_t* p) {
    const Floats whole = (x.v + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23 rounds to an integer
    const SignedBytes bytes = convert<SignedBytes>(convert<Ints>(whole == whole ? whole : Floats{}));
    __builtin_memcpy(p, &bytes, 16);
}

// Sixteen bytes to 32-bit integers, and back.
inline U16 widen(const uint8_t* p) { return {convert<Words>(load_lanes<Bytes>(p))}; }
inline U16 widen_signed(const uint8_t* p) { return {(Words)convert<Ints>(load_lanes<SignedBytes>(p))}; }
inline void narrow(U16 x, uint8_t* p) {
    const Bytes bytes = convert<Bytes>(x.v);
    __builtin_memcpy(p, &bytes, 16);
}

// Converts fp8 by way of binary16: e5m2 is the upper byte of a half, and the exponent of e4m3 comes out 8 less.
inline F16 load_e5m2(const uint8_t* p) { return {half_to_float(widen(p).v << 8)}; }
inline F16 load_e4m3(const uint8_t* p) {
    const Words code = widen(p).v;
    return {half_to_float((code & 0x80) << 8 | (code & 0x7f) << 7)};
}

inline void store(U16 x, void* p) { __builtin_memcpy(p, &x.v, 64); }

constexpr int kVectorsPerPass = 1;
constexpr int kMostRows = 2;  // more would take longer to compile than this level's few users and tests would gain
constexpr int kMaxRows = kMostRows;
constexpr int kGemmRows = kMostRows, kGemmRowsOfBothHalves = kMostRows;  // times two vectors of outputs
constexpr int kQuantRows = kMostRows, kQuantRowsOfBothHalves = 1;
constexpr DecodedFormats kDecodedFormats = DecodedFormats::none;

}  // namespace octavo::OCTAVO_LEVEL
