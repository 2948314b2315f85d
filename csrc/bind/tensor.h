// Borrowed views of torch tensors, without linking against torch.
//
// torch.Tensor carries a table of C functions (DLPack's exchange API, __dlpack_c_exchange_api__) that fills in a
// DLTensor in some tens of nanoseconds: cheap enough to check every shape and dtype on every call. The view is valid
// during the call, while the caller holds the tensor.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

namespace octavo {

// As in dlpack.h, version 1.x.
struct DLTensor {
    void* data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t* shape;
    int64_t* strides;  // in elements
    uint64_t byte_offset;
};

enum class DType : uint8_t { bf16, f32, f16, f64, i32, i64, i8, u8, other };

const char* dtype_name(DType dtype);
int dtype_bytes(DType dtype);

template <class T> inline constexpr DType kDTypeOf = DType::other;
template <> inline constexpr DType kDTypeOf<float> = DType::f32;
template <> inline constexpr DType kDTypeOf<double> = DType::f64;
template <> inline constexpr DType kDTypeOf<int32_t> = DType::i32;
template <> inline constexpr DType kDTypeOf<uint32_t> = DType::i32;  // masks of bits
template <> inline constexpr DType kDTypeOf<int64_t> = DType::i64;
template <> inline constexpr DType kDTypeOf<uint8_t> = DType::u8;

// A tensor argument of one call; null if Python passed None for an optional one.
struct Tensor {
    char* base = nullptr;
    DType dtype = DType::other;
    int ndim = 0;
    int64_t shape[6] = {};
    int64_t stride[6] = {};  // in elements

    bool is_null() const { return ndim == 0; }
    template <class T> T* data() const { return reinterpret_cast<T*>(base); }
    int64_t stride_bytes(int axis) const { return stride[axis] * dtype_bytes(dtype); }
    std::string describe() const;  // "bfloat16 [4, 576]"
};

// False, with no Python error set, when `object` is not a dense CPU tensor of at most six dimensions.
bool borrow_tensor(PyObject* object, Tensor* out);

// Raise nanobind::value_error with the argument's name, what it is and what it must be.
void require(bool condition, const std::string& message);
void check_dtype(const Tensor& tensor, const char* name, DType expected);
void check_shape(const Tensor& tensor, const char* name, std::initializer_list<int64_t> expected);  // -1: any
// The last dimension must be contiguous.
void check_rows(const Tensor& tensor, const char* name, int ndim);
void check_dense(const Tensor& tensor, const char* name, DType dtype, std::initializer_list<int64_t> shape);
// The elements of a tensor that must be dense.
template <class T> T* dense(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape) {
    check_dense(tensor, name, kDTypeOf<T>, shape);
    return tensor.data<T>();
}

}  // namespace octavo

namespace nanobind::detail {
template <> struct type_caster<octavo::Tensor> {
    NB_TYPE_CASTER(octavo::Tensor, const_name("torch.Tensor"))
    bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
        if (source.is_none()) {
            value = {};
            return true;
        }
        return octavo::borrow_tensor(source.ptr(), &value);
    }
    static handle from_cpp(const octavo::Tensor&, rv_policy, cleanup_list*) noexcept { return handle(); }
};
}  // namespace nanobind::detail
