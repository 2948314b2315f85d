#include "bind/arguments.h"

#include <limits>

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

int check_rotation(const Tensor& cos, const Tensor& sin, int key_dim) {
    check_shape(cos, "cos", {-1, -1});
    check_dense(cos, "cos", DType::f32, {cos.shape[0], cos.shape[1]});
    check_dense(sin, "sin", DType::f32, {cos.shape[0], cos.shape[1]});
    require(cos.shape[1] <= key_dim / 2, "cos has " + std::to_string(cos.shape[1]) + " frequencies, a head of " +
                                             std::to_string(key_dim) + " dimensions rotates at most half as many");
    return static_cast<int>(cos.shape[1]) * 2;
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
            "value_dim must be a multiple of 16 and at most " + std::to_string(kMaxHeadDim) + ", got " +
                std::to_string(value_dim));
    require(key.shape[2] > 0 && key.shape[2] * pair <= kMaxHeadDim,
            "key_dim must be at most " + std::to_string(kMaxHeadDim) + ", got " + std::to_string(key.shape[2] * pair));
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

namespace {

Code code_of(const std::string& name) {
    const char* names[kNumCodes] = {"", "fp8_e4m3", "fp8_e5m2", "int8", "int4"};
    for (int code = kCodePlain + 1; code < kNumCodes; ++code)
        if (name == names[code]) return static_cast<Code>(code);
    require(false, "codec '" + name + "' is not one of fp8_e4m3, fp8_e5m2, int8, int4");
    return kCodePlain;
}

// Whether an axis has this stride; that of an axis of one element does not matter.
bool strided(const Tensor& tensor, int axis, int64_t stride) {
    return tensor.shape[axis] <= 1 || tensor.stride[axis] == stride;
}

// The fields beside the codes of [blocks, heads, block_size] vectors.
CodedSide coded_side(Code code, const CodedArguments& arguments, const char* name, int64_t blocks, int64_t heads,
                     int64_t block_size, int64_t code_bytes) {
    const auto& [_, codes, scale, zero, head_scales] = arguments;
    CodedSide side{};
    side.code = code;
    side.code_bytes = code_bytes;
    const auto add = [&](int index, const Tensor& field, int64_t bytes) {
        check_dtype(field, name, DType::u8);
        check_shape(field, name, {blocks, heads, block_size, bytes});
        require(strided(field, 3, 1) && strided(field, 2, bytes),
                std::string(name) + " must have fields that are dense within a head of a block");
        side.field[index] = field.base;
        side.field_block_stride[index] = field.stride[0];
        side.field_head_stride[index] = field.stride[1];
    };
    const bool calibrated = code == kCodeE4m3 || code == kCodeE5m2;
    const bool fits = scale.is_null() == calibrated && zero.is_null() == (code != kCodeInt4);
    require(fits && head_scales.is_null() != calibrated, std::string(name) + " must have the fields of their codec");
    if (!scale.is_null()) add(0, scale, 2);
    if (!zero.is_null()) add(1, zero, 1);
    if (calibrated) {
        check_dense(head_scales, name, DType::f32, {heads});
        side.head_scales = head_scales.data<float>();
    }
    return side;
}

}  // namespace

LayerKV coded_layer_kv(const CodedArguments& keys, const CodedArguments& values, DType dtype) {
    const Code key_code = code_of(std::get<0>(keys)), value_code = code_of(std::get<0>(values));
    require(key_code == value_code || (key_code == kCodeInt8 && value_code == kCodeInt4),
            "keys in '" + std::get<0>(keys) + "' do not go with values in '" + std::get<0>(values) + "'");
    const Tensor &key = std::get<1>(keys), &value = std::get<1>(values);
    const bool fp8 = key_code == kCodeE4m3 || key_code == kCodeE5m2;
    check_dtype(key, "key codes", DType::u8);
    check_dtype(value, "value codes", DType::u8);
    check_shape(key, "key codes", {-1, -1, -1, -1, 16, fp8 ? 1 : 4});
    const int64_t blocks = key.shape[0], heads = key.shape[1], block_size = key.shape[2] * 16;
    const int64_t together = fp8 ? 1 : 4;
    check_shape(value, "value codes", {blocks, heads, block_size / together, -1, together});
    const int64_t key_bytes = key.shape[3] * key.shape[5], value_bytes = value.shape[3];
    require(strided(key, 5, 1) && strided(key, 4, key.shape[5]) && strided(key, 3, 16 * key.shape[5]) &&
                strided(key, 2, 16 * key_bytes) && strided(value, 4, 1) && strided(value, 3, together) &&
                strided(value, 2, together * value_bytes),
            "key and value codes must be dense within a head of a block");
    LayerKV kv{};
    kv.key = key.base;
    kv.value = value.base;
    kv.key_block_stride = key.stride[0];
    kv.key_head_stride = key.stride[1];
    kv.value_block_stride = value.stride[0];
    kv.value_head_stride = value.stride[1];
    kv.num_blocks = blocks;
    kv.kv_heads = static_cast<int>(heads);
    kv.key_units = static_cast<int>(key_bytes * (key_code == kCodeInt4 ? 2 : 1));
    kv.value_dim = static_cast<int>(value_bytes * (value_code == kCodeInt4 ? 2 : 1));
    kv.block_size = static_cast<int>(block_size);
    kv.storage = dtype == DType::bf16 ? kBf16 : kF32;
    require(heads > 0 && block_size > 0, "a coded layer needs heads and tokens");
    for (const int dim : {kv.key_units, kv.value_dim})
        require(dim > 0 && dim % 16 == 0 && dim <= kMaxHeadDim,
                "heads of coded layers must have a multiple of 16 and at most " + std::to_string(kMaxHeadDim) +
                    " dimensions, got " +
                    std::to_string(dim));
    require(value_code != kCodeInt4 || kv.value_dim % 32 == 0,
            "value_dim of int4 must be a multiple of 32, got " + std::to_string(kv.value_dim));
    kv.key_side = coded_side(key_code, keys, "keys", blocks, heads, block_size, key_bytes);
    kv.value_side = coded_side(value_code, values, "values", blocks, heads, block_size, value_bytes);
    return kv;
}

void check_copies(const LayerKV& kv, const LayerKV& copies, int first_blocks, int recent_blocks) {
    require(kv.coded() && copies.kv_heads == kv.kv_heads && copies.key_units == kv.key_units &&
                copies.value_dim == kv.value_dim && copies.block_size == kv.block_size,
            "copies must have the heads and the block size of their layer, which must be coded");
    constexpr int kMost = 1 << 20;
    require(int64_t{first_blocks} * kv.block_size <= std::numeric_limits<int>::max(),
            std::to_string(first_blocks) + " first blocks of " + std::to_string(kv.block_size) +
                " tokens are too many");
    require(first_blocks >= 0 && first_blocks <= kMost && recent_blocks > 0 && recent_blocks <= kMost,
            "copies are of 0 to " + std::to_string(kMost) + " first blocks and 1 to " + std::to_string(kMost) +
                " recent ones, got " + std::to_string(first_blocks) + " and " + std::to_string(recent_blocks));
}

void check_budgets(const Tensor& budgets, int64_t num_seqs, int sink_tokens) {
    check_dense(budgets, "budgets", DType::i32, {num_seqs});
    require(sink_tokens > 0, "sink_tokens must be positive, got " + std::to_string(sink_tokens));
    for (int64_t i = 0; i < num_seqs; ++i) {
        const int budget = budgets.data<const int32_t>()[i];
        require(budget == 0 || budget > sink_tokens, "a budget must be 0 for none, or more than the " +
                                                         std::to_string(sink_tokens) + " sinks, got " +
                                                         std::to_string(budget));
    }
}

SparseReads bounds_of(const LayerKV& kv, const Tensor& bounds) {
    const int64_t key_dim = int64_t{kv.key_units} * (kv.storage == kBf16 ? 2 : 1);
    check_dtype(bounds, "bounds", kv.storage == kBf16 ? DType::bf16 : DType::f32);
    check_shape(bounds, "bounds", {kv.num_blocks, kv.kv_heads, 2, key_dim});
    require(!kv.coded() && key_dim % 16 == 0 && strided(bounds, 3, 1) && strided(bounds, 2, key_dim),
            "bounds must be of plain keys with a multiple of 16 dimensions, and dense within a head");
    SparseReads sparse{};
    sparse.bounds = bounds.base;
    sparse.block_stride = bounds.stride_bytes(0);
    sparse.head_stride = bounds.stride_bytes(1);
    return sparse;
}

void check_sparse(const Tensor& num_read, const Tensor& num_recent, int64_t num_seqs) {
    check_dense(num_read, "num_read", DType::i32, {num_seqs});
    check_dense(num_recent, "num_recent", DType::i32, {num_seqs});
    for (int64_t i = 0; i < num_seqs; ++i) {
        const int read = num_read.data<const int32_t>()[i], recent = num_recent.data<const int32_t>()[i];
        require(read == 0 || (recent > 0 && read > recent),
                "a sequence reads all blocks (0), or more than its most recent ones, got " + std::to_string(read) +
                    " and " + std::to_string(recent));
    }
}

void check_completed(const Tensor& completed, int64_t num_blocks) {
    check_dense(completed, "completed", DType::i32, {completed.shape[0]});
    for (int64_t i = 0; i < completed.shape[0]; ++i) {
        const int32_t block = completed.data<const int32_t>()[i];
        require(block >= 0 && block < num_blocks,
                "completed names block " + std::to_string(block) + " of " + std::to_string(num_blocks));
    }
}

NormWeights norm_weights(const Tensor& weight, const Tensor& bias, float eps, bool centred, const char* name,
                         DType dtype, int64_t width) {
    NormWeights norm{};
    if (weight.is_null()) return norm;
    const bool wide = centred || (weight.dtype == DType::f32 && dtype != DType::f32);
    check_dense(weight, name, wide ? DType::f32 : dtype, {width});
    norm.kind = centred ? kLayerNorm : wide ? kRmsNormRoundedOnce : kRmsNorm;
    norm.weight = weight.base;
    norm.eps = eps;
    if (!bias.is_null()) {
        require(centred, std::string(name) + " may have a bias only if it is centred");
        check_dense(bias, name, DType::f32, {width});
        norm.bias = bias.data<float>();
    }
    return norm;
}

Activation activation_of(const std::string& name) {
    const char* names[kNumActivations] = {"silu", "gelu_pytorch_tanh", "gelu", "relu"};
    for (int activation = 0; activation < kNumActivations; ++activation)
        if (name == names[activation]) return static_cast<Activation>(activation);
    require(false, "activation '" + name + "' is not one of silu, gelu_pytorch_tanh, gelu, relu");
    return kSilu;
}

Epilogue epilogue_of(const std::string& activation) {
    if (activation == "clamped_swiglu") return kClampedSwiGlu;
    return activation.empty() ? kPlain : static_cast<Epilogue>(kSiluGate + static_cast<int>(activation_of(activation)));
}

void check_range(const int64_t* x, int64_t count, int64_t end, const char* name, int64_t begin) {
    for (int64_t i = 0; i < count; ++i)
        if (x[i] < begin || x[i] >= end)
            require(false, std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(x[i]) +
                               ", must be in [" + std::to_string(begin) + ", " + std::to_string(end) + ")");
}

}  // namespace octavo
