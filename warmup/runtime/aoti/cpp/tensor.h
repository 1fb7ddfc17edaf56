// Defines the tensors that packages are given and make: memory with a dtype, a shape and strides.
//
// A handle (AtenTensorHandle of torch/csrc/inductor/aoti_torch/c/shim.h) is a pointer to a Tensor, and belongs to
// whoever has it. Several tensors may share a Storage.

#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace snapcap {

constexpr int64_t kMaxDims = 8;
constexpr size_t kAlignment = 64;  // bytes, a cache line and the widest vector

// The numbers of c10::ScalarType, which packages are compiled with.
enum Dtype : int32_t { kUint8 = 0, kInt8 = 1, kInt32 = 3, kInt64 = 4, kFloat16 = 5, kFloat32 = 6, kBool = 11, kBfloat16 = 15 };

inline int64_t item_bytes(int32_t dtype) {
  switch (dtype) {
    case kUint8:
    case kInt8:
    case kBool:
      return 1;
    case kFloat16:
    case kBfloat16:
      return 2;
    case kInt32:
    case kFloat32:
      return 4;
    case kInt64:
      return 8;
    default:
      throw std::runtime_error("dtype " + std::to_string(dtype) + " is not served");
  }
}

// A block of memory, aligned to `kAlignment`.
struct Block {
  char* data;
  size_t size;
};

// Returns a block of at least `bytes`, new or given back before. Throws std::bad_alloc.
Block take_block(size_t bytes);
void give_back(Block block);

// Memory under one or more tensors. The last of them gives it back if the Storage owns it.
class Storage {
 public:
  explicit Storage(int64_t bytes) : block_(take_block(static_cast<size_t>(bytes))), bytes_(bytes) {}
  Storage(void* data, int64_t bytes) : block_{static_cast<char*>(data), 0}, bytes_(bytes) {}
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  char* data() const { return block_.data; }
  int64_t bytes() const { return bytes_; }
  Storage* share() {
    count_.fetch_add(1, std::memory_order_relaxed);
    return this;
  }
  void release() {
    if (count_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

 private:
  ~Storage() {
    if (block_.size > 0) give_back(block_);
  }

  Block block_;  // without a size if it is somebody else's
  int64_t bytes_;
  std::atomic<int64_t> count_{1};
};

struct Tensor {
  Storage* storage;
  int64_t offset;  // of the first element, in elements
  int32_t dtype;
  int64_t dims;
  std::array<int64_t, kMaxDims> sizes{};
  std::array<int64_t, kMaxDims> strides{};  // in elements

  // Takes the storage over, also where it throws.
  Tensor(Storage* memory, int64_t first, int32_t type, int64_t count, const int64_t* shape, const int64_t* steps)
      : storage(memory), offset(first), dtype(type), dims(count) {
    if (count < 0 || count > kMaxDims) {
      storage->release();
      throw std::runtime_error("a tensor of " + std::to_string(count) + " dimensions is not served");
    }
    for (int64_t dim = 0; dim < count; ++dim) {
      sizes[dim] = shape[dim];
      strides[dim] = steps[dim];
    }
  }
  Tensor(const Tensor& other)
      : storage(other.storage->share()),
        offset(other.offset),
        dtype(other.dtype),
        dims(other.dims),
        sizes(other.sizes),
        strides(other.strides) {}
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() { storage->release(); }

  template <class T>
  T* data() const {
    return reinterpret_cast<T*>(storage->data()) + offset;
  }
  int64_t count() const {
    int64_t product = 1;
    for (int64_t dim = 0; dim < dims; ++dim) product *= sizes[dim];
    return product;
  }
  bool row_major() const {
    int64_t step = 1;
    for (int64_t dim = dims - 1; dim >= 0; --dim) {
      if (sizes[dim] != 1 && strides[dim] != step) return false;
      step *= sizes[dim];
    }
    return true;
  }
};

// Bytes from the first element to behind the last.
inline int64_t extent_bytes(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < dims; ++dim) {
    if (sizes[dim] == 0) return 0;
    last += (sizes[dim] - 1) * strides[dim];
  }
  return (last + 1) * item_bytes(dtype);
}

inline Tensor* make_tensor(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
  return new Tensor(new Storage(extent_bytes(dims, sizes, strides, dtype)), 0, dtype, dims, sizes, strides);
}

// Row by row.
inline Tensor* make_tensor(int64_t dims, const int64_t* sizes, int32_t dtype) {
  if (dims > kMaxDims) throw std::runtime_error("too many dimensions");
  std::array<int64_t, kMaxDims> strides{};
  int64_t step = 1;
  for (int64_t dim = dims - 1; dim >= 0; --dim) {
    strides[dim] = step;
    step *= sizes[dim];
  }
  return make_tensor(dims, sizes, strides.data(), dtype);
}

// What one tensor holds into another of its dtype and shape.
void copy(const Tensor& target, const Tensor& source);

inline void require(bool condition, const char* message) {
  if (!condition) throw std::runtime_error(message);
}

// Runs the body of a C function; its errors become a status and a line on the standard error, as of libtorch's.
template <class Body>
int32_t guarded(const char* name, Body&& body) noexcept {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "snapcap: %s: %s\n", name, error.what());
  } catch (...) {
    std::fprintf(stderr, "snapcap: %s failed\n", name);
  }
  return 1;
}

}  // namespace snapcap

using AtenTensorHandle = snapcap::Tensor*;
using AOTITorchError = int32_t;

#define SNAPCAP_C extern "C" __attribute__((visibility("default")))
