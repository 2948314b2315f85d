#include "bind/arguments.h"

namespace octavo {

Storage storage_of(const Tensor& tensor, const char* name) {
    if (tensor.dtype == DType::bf16) return kBf16;
    if (tensor.dtype == DType::f32) return kF32;
    require(false, std::string(name) + " must be bfloat16 or float32, got " + tensor.describe());
    return kF32;
}

Matrix matrix(const Tensor& tensor, const char* name, DType dtype) {
    check_rows(tensor, name, 2);
    check_dtype(tensor, name, dtype);
    return {tensor.base, tensor.shape[0], tensor.shape[1], tensor.stride_bytes(0)};
}

void check_dense(const Tensor& tensor, const char* name, DType dtype, std::initializer_list<int64_t> shape) {
    check_shape(tensor, name, shape);
    check_dtype(tensor, name, dtype);
    int64_t expected = 1;
    for (int axis = tensor.ndim; axis-- > 0;) {
        if (tensor.shape[axis] > 1) require(tensor.stride[axis] == expected, std::string(name) + " must be contiguous");
        expected *= tensor.shape[axis];
    }
}

LayerKV layer_kv(const Tensor& key, const Tensor& value) {
    const Storage storage = storage_of(key, "key cache");
    const int64_t pair = storage == kBf16 ? 2 : 1;
    check_shape(key, "key cache", {-1, -1, -1, -1, pair});
    const int64_t heads = key.shape[1], block_size = key.shape[3];
    check_dtype(value, "value cache", key.dtype);
    check_shape(value, "value cache", {key.shape[0], heads, block_size / pair, -1, pair});
    const int64_t value_dim = value.shape[3];
    const auto dense_block = [&](const Tensor& t) {
        return t.stride[4] == 1 && t.stride[3] == pair && t.stride[2] == t.shape[3] * pair;
    };
    require(dense_block(key) && dense_block(value), "key and value cache must be dense within a head of a block");
    require(heads > 0 && block_size % 16 == 0 && block_size > 0,
            "block_size must be a multiple of 16, got " + std::to_string(block_size));
    require(value_dim % 16 == 0 && value_dim > 0 && value_dim <= kMaxHeadDim,
            "value_dim must be a multiple of 16 and at most 256, got " + std::to_string(value_dim));
    require(key.shape[2] > 0 && key.shape[2] * pair <= kMaxHeadDim,
            "key_dim must be at most 256, got " + std::to_string(key.shape[2] * pair));
    LayerKV kv{};
    kv.key = key.base;
    kv.value = value.base;
    kv.key_block_stride = key.stride_bytes(0);
    kv.key_head_stride = key.stride_bytes(1);
    kv.value_block_stride = value.stride_bytes(0);
    kv.value_head_stride = value.stride_bytes(1);
    kv.num_blocks = key.shape[0];
    kv.kv_heads = static_cast<int>(heads);
    kv.key_units = static_cast<int>(key.shape[2]);
    kv.value_dim = static_cast<int>(value_dim);
    kv.block_size = static_cast<int>(block_size);
    kv.storage = storage;
    return kv;
}

void check_range(const int64_t* x, int64_t count, int64_t end, const char* name) {
    for (int64_t i = 0; i < count; ++i)
        if (x[i] < 0 || x[i] >= end)
            require(false, std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(x[i]) +
                               ", must be in [0, " + std::to_string(end) + ")");
}

}  // namespace octavo
