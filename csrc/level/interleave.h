// Rows of 32-bit units, dealt into one line: [row][unit] -> [unit][row]. Included inside a namespace.

using Quad [[gnu::vector_size(16)]] = uint32_t;

// Four units of four rows -> [unit][row], a unit `stride` after the one before.
inline void transpose_quads(const char* const* rows, int64_t unit, uint32_t* to, int64_t stride) {
    Quad row[4];
    for (int r = 0; r < 4; ++r) __builtin_memcpy(&row[r], rows[r] + unit * 4, sizeof(Quad));
    const Quad low01 = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
    const Quad high01 = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
    const Quad low23 = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
    const Quad high23 = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
    const Quad units[4] = {
        __builtin_shufflevector(low01, low23, 0, 1, 4, 5), __builtin_shufflevector(low01, low23, 2, 3, 6, 7),
        __builtin_shufflevector(high01, high23, 0, 1, 4, 5), __builtin_shufflevector(high01, high23, 2, 3, 6, 7)};
    for (int u = 0; u < 4; ++u) __builtin_memcpy(to + u * stride, &units[u], sizeof(Quad));
}

// rows of `units` units -> [unit][row]
template <int R> void interleave_rows(const char* const* rows, int64_t units, uint32_t* packed) {
    int64_t unit = 0;
    for (; unit + 4 <= units; unit += 4) {
        int r = 0;
        for (; r + 4 <= R; r += 4) transpose_quads(rows + r, unit, packed + unit * R + r, R);
        for (; r < R; ++r)
            for (int64_t u = unit; u < unit + 4; ++u) __builtin_memcpy(packed + u * R + r, rows[r] + u * 4, 4);
    }
    for (; unit < units; ++unit)
        for (int r = 0; r < R; ++r) __builtin_memcpy(packed + unit * R + r, rows[r] + unit * 4, 4);
}
inline void interleave(const char* const* rows, int64_t count, int64_t units, uint32_t* packed) {
    switch (count) {
        case 1: return interleave_rows<1>(rows, units, packed);
        case 2: return interleave_rows<2>(rows, units, packed);
        case 3: return interleave_rows<3>(rows, units, packed);
        case 4: return interleave_rows<4>(rows, units, packed);
        case 5: return interleave_rows<5>(rows, units, packed);
        case 6: return interleave_rows<6>(rows, units, packed);
        case 7: return interleave_rows<7>(rows, units, packed);
        case 8: return interleave_rows<8>(rows, units, packed);
        case 9: return interleave_rows<9>(rows, units, packed);
        case 10: return interleave_rows<10>(rows, units, packed);
        case 11: return interleave_rows<11>(rows, units, packed);
        case 12: return interleave_rows<12>(rows, units, packed);
    }
}
