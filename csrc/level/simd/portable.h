// Sixteen lanes in plain C++, which any compiler can vectorise for any machine.
#pragma once

#include "level/simd/common.h"

namespace octavo::OCTAVO_LEVEL {

#define OCTAVO_LANES for (int i = 0; i < 16; ++i)

// Halves lie in memory that was declared as units of 32 bits, so they are copied, not accessed as what they are not.
inline uint16_t load_16_bits(const uint16_t* p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, 2);
    return bits;
}

struct U16 {
    uint32_t v[16];
    static U16 load(const void* p) {
        U16 out;
        __builtin_memcpy(out.v, p, 64);
        return out;
    }
    static U16 set1(uint32_t x) {
        U16 out;
        OCTAVO_LANES out.v[i] = x;
        return out;
    }
    static U16 zero() { return set1(0); }
};
inline U16 operator&(U16 a, U16 b) {
    OCTAVO_LANES a.v[i] &= b.v[i];
    return a;
}
inline U16 operator|(U16 a, U16 b) {
    OCTAVO_LANES a.v[i] |= b.v[i];
    return a;
}
inline U16 operator^(U16 a, U16 b) {
    OCTAVO_LANES a.v[i] ^= b.v[i];
    return a;
}
inline U16 operator+(U16 a, U16 b) {
    OCTAVO_LANES a.v[i] += b.v[i];
    return a;
}
inline U16 max(U16 a, U16 b) {  // of signed integers
    OCTAVO_LANES a.v[i] = static_cast<int32_t>(a.v[i]) > static_cast<int32_t>(b.v[i]) ? a.v[i] : b.v[i];
    return a;
}
inline int32_t reduce_max(U16 a) {
    int32_t largest = static_cast<int32_t>(a.v[0]);
    OCTAVO_LANES if (static_cast<int32_t>(a.v[i]) > largest) largest = static_cast<int32_t>(a.v[i]);
    return largest;
}
// table[code] of each byte, which is less than 16.
inline U16 look_up(const uint8_t* table, U16 codes) {
    U16 out = U16::zero();
    OCTAVO_LANES for (int byte = 0; byte < 32; byte += 8) {
        out.v[i] |= static_cast<uint32_t>(table[codes.v[i] >> byte & 15]) << byte;
    }
    return out;
}
template <int N> inline U16 shift_left(U16 a) {
    OCTAVO_LANES a.v[i] <<= N;
    return a;
}
template <int N> inline U16 shift_right(U16 a) {
    OCTAVO_LANES a.v[i] >>= N;
    return a;
}

struct F16 {
    float v[16];
    static F16 load(const float* p) {
        F16 out;
        __builtin_memcpy(out.v, p, 64);
        return out;
    }
    static F16 load(const bf16* p) {
        F16 out;
        OCTAVO_LANES out.v[i] = bf16_to_float(load_16_bits(p + i));
        return out;
    }
    static F16 load_half(const uint16_t* p) {
        F16 out;
        OCTAVO_LANES out.v[i] = half_to_float(load_16_bits(p + i));
        return out;
    }
    static F16 set1(float x) {
        F16 out;
        OCTAVO_LANES out.v[i] = x;
        return out;
    }
    static F16 zero() { return set1(0.0f); }
    static F16 from_int(U16 x) {
        F16 out;
        OCTAVO_LANES out.v[i] = static_cast<float>(static_cast<int32_t>(x.v[i]));
        return out;
    }
    void store(float* p) const { __builtin_memcpy(p, v, 64); }
    void store(bf16* p) const {
        OCTAVO_LANES {
            const bf16 half = float_to_bf16(v[i]);
            __builtin_memcpy(p + i, &half, 2);
        }
    }
};
template <class T> inline void store_both(F16 a, F16 b, T* p) {
    a.store(p);
    b.store(p + 16);
}
inline F16 as_float(U16 a) { return F16::load(reinterpret_cast<const float*>(a.v)); }
inline U16 as_bits(F16 a) { return U16::load(a.v); }
inline F16 operator+(F16 a, F16 b) {
    OCTAVO_LANES a.v[i] += b.v[i];
    return a;
}
inline F16 operator-(F16 a, F16 b) {
    OCTAVO_LANES a.v[i] -= b.v[i];
    return a;
}
inline F16 operator*(F16 a, F16 b) {
    OCTAVO_LANES a.v[i] *= b.v[i];
    return a;
}
inline F16 operator/(F16 a, F16 b) {
    OCTAVO_LANES a.v[i] /= b.v[i];
    return a;
}
inline F16 fma(F16 a, F16 b, F16 c) {
#ifdef OCTAVO_TILES  // emulates a level that rounds once; by way of double, GCC 12 gives other bits when it
                     // vectorises
    OCTAVO_LANES c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
#else
    OCTAVO_LANES c.v[i] += a.v[i] * b.v[i];
#endif
    return c;
}
inline F16 max(F16 a, F16 b) {
    OCTAVO_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return a;
}
inline F16 min(F16 a, F16 b) {
    OCTAVO_LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
    return a;
}
inline float reduce_add(F16 a) {
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; ++i) a.v[i] += a.v[i + step];
    return a.v[0];
}
inline float reduce_max(F16 a) {
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; ++i) a.v[i] = a.v[i] > a.v[i + step] ? a.v[i] : a.v[i + step];
    return a.v[0];
}
inline bool any_greater(F16 a, F16 b) {
    bool any = false;
    OCTAVO_LANES any |= a.v[i] > b.v[i];
    return any;
}
inline bool all_at_most(F16 a, F16 b) {  // no NaN
    bool all = true;
    OCTAVO_LANES all &= a.v[i] <= b.v[i];
    return all;
}
inline F16 keep_lanes(F16 a, int low, int high, F16 other) {
    OCTAVO_LANES a.v[i] = low <= i && i < high ? a.v[i] : other.v[i];
    return a;
}

#ifdef OCTAVO_TILES  // emulates AVX-512, bit for bit
template <int N> inline F16 exp2_by(const float (&poly)[N], F16 x) {
    F16 n = x;
    OCTAVO_LANES n.v[i] = __builtin_rintf(x.v[i]);
    const F16 f = x - n;
    F16 p = F16::set1(poly[N - 1]);
    for (int i = N - 2; i >= 0; --i) p = fma(p, f, F16::set1(poly[i]));
    OCTAVO_LANES {
        const float exponent = n.v[i] < -300.0f ? -300.0f : n.v[i] > 300.0f ? 300.0f : n.v[i];
        if (__builtin_isinf(n.v[i]))  // f is NaN
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
inline F16 exp2(F16 x) {
    OCTAVO_LANES {
        const bool normal = !(x.v[i] < -126.0f);  // below, the result is flushed to zero
        const float clamped = x.v[i] < -126.0f ? -126.0f : x.v[i] > 127.0f ? 127.0f : x.v[i];
        const float n = (clamped + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23 rounds to an integer
        const float f = clamped - n;
        float p = kExp2Poly[5];
        for (int j = 4; j >= 0; --j) p = p * f + kExp2Poly[j];
        const int32_t exponent = n == n ? static_cast<int32_t>(n) : 0;
        x.v[i] = normal ? p * bits_to_float(static_cast<uint32_t>(exponent + 127) << 23) : 0.0f;
    }
    return x;
}

inline F16 exp2_bounded(F16 x) { return exp2(x); }
inline F16 exp2_coarse(F16 x) { return exp2(x); }
#endif

inline F16 mac_bf16(F16 acc, U16 a, U16 b) {
    OCTAVO_LANES acc.v[i] += bits_to_float(a.v[i] << 16) * bits_to_float(b.v[i] << 16);
    OCTAVO_LANES acc.v[i] += bits_to_float(a.v[i] & 0xffff0000u) * bits_to_float(b.v[i] & 0xffff0000u);
    return acc;
}
inline F16 mac_f32(F16 acc, U16 a, U16 b) {
    OCTAVO_LANES acc.v[i] += bits_to_float(a.v[i]) * bits_to_float(b.v[i]);
    return acc;
}

inline U16 dot_bytes(U16 acc, U16 a, U16 b) {
    OCTAVO_LANES {
        int32_t sum = 0;
        for (int byte = 0; byte < 32; byte += 8)
            sum += static_cast<int32_t>(a.v[i] >> byte & 0xff) * static_cast<int8_t>(b.v[i] >> byte & 0xff);
        acc.v[i] += static_cast<uint32_t>(sum);
    }
    return acc;
}
inline U16 dot_small(U16 acc, U16 a, U16 b) { return dot_bytes(acc, a, b); }

// Rounds to the nearest integers, which are in [-128, 127]; NaN becomes zero.
inline void round_to_int8(F16 x, int8_t* p) {
    OCTAVO_LANES {
        const float whole = (x.v[i] + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23 rounds to an integer
        p[i] = whole == whole ? static_cast<int8_t>(whole) : int8_t{0};
    }
}

// Sixteen bytes to 32-bit integers, and back.
inline U16 widen(const uint8_t* p) {
    U16 out;
    OCTAVO_LANES out.v[i] = p[i];
    return out;
}
inline U16 widen_signed(const uint8_t* p) {
    U16 out;
    OCTAVO_LANES out.v[i] = static_cast<uint32_t>(static_cast<int32_t>(static_cast<int8_t>(p[i])));
    return out;
}
inline void narrow(U16 x, uint8_t* p) { OCTAVO_LANES p[i] = static_cast<uint8_t>(x.v[i]); }

// Converts fp8 by way of binary16: e5m2 is the upper byte of a half, and the exponent of e4m3 comes out 8 less.
inline F16 load_e5m2(const uint8_t* p) {
    F16 out;
    OCTAVO_LANES out.v[i] = half_to_float(static_cast<uint16_t>(p[i] << 8));
    return out;
}
inline F16 load_e4m3(const uint8_t* p) {
    F16 out;
    OCTAVO_LANES out.v[i] = half_to_float(static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7));
    return out;
}

#undef OCTAVO_LANES

inline void store(U16 x, void* p) { __builtin_memcpy(p, x.v, 64); }

constexpr int kVectorsPerPass = 1;
constexpr int kMostRows = 2;  // more would take longer to compile than this level's few users and tests would gain
constexpr int kMaxRows = kMostRows;
constexpr int kGemmRows = kMostRows;  // times two vectors of outputs
constexpr int kQuantRows = kMostRows, kQuantHalves = 1;

}  // namespace octavo::OCTAVO_LEVEL
