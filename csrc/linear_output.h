// What becomes of a product's sums: bias, gate, rounding. Included inside an instruction set's namespace.

template <class T> inline void store_sixteen(const LinearOutput& out, int64_t row, int64_t column, F16 sum) {
    const int64_t count = out.width - column;
    if (count <= 0) return;
    if (out.bias) sum = sum + load_some(reinterpret_cast<const T*>(out.bias) + column, count);
    store_some(sum, reinterpret_cast<T*>(out.base + row * out.stride) + column, count);
}
inline void store_sixteen(const LinearOutput& out, int64_t row, int64_t column, F16 sum) {
    if (out.storage == kBf16) store_sixteen<bf16>(out, row, column, sum);
    else store_sixteen<float>(out, row, column, sum);
}

// activation(gate) * up, rounded where a product followed by `gated` rounds.
template <class T, Activation A>
inline void store_gated(const LinearOutput& out, int64_t row, int64_t pair, F16 gate, F16 up) {
    if (out.bias) {
        const T* bias = reinterpret_cast<const T*>(out.bias) + pair * 32;
        gate = gate + F16::load(bias);
        up = up + F16::load(bias + 16);
    }
    gate = round_through<T>(gate);
    up = round_through<T>(up);
    (round_through<T>(activate<A>(gate)) * up).store(reinterpret_cast<T*>(out.base + row * out.stride) + pair * 16);
}
template <class T> inline void store_gated(const LinearOutput& out, int64_t row, int64_t pair, F16 gate, F16 up) {
    if (out.epilogue == kSiluGate) store_gated<T, kSilu>(out, row, pair, gate, up);
    else store_gated<T, kGeluTanh>(out, row, pair, gate, up);
}

// 32 outputs of one row. With a gate the first 16 are gates and the others what they open.
inline void store_pair(const LinearOutput& out, int64_t row, int64_t pair, F16 low, F16 high) {
    if (out.epilogue == kPlain) {
        store_sixteen(out, row, pair * 32, low);
        store_sixteen(out, row, pair * 32 + 16, high);
    } else if (out.storage == kBf16) {
        store_gated<bf16>(out, row, pair, low, high);
    } else {
        store_gated<float>(out, row, pair, low, high);
    }
}
