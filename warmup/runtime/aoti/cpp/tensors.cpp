// Makes, describes and copies tensors: the functions of torch/csrc/inductor/aoti_torch/c/shim.h that packages for a
// CPU call, under their names, and ATen/Parallel.h's `at::set_num_threads`.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "matrix.h"
#include "tensor.h"

using namespace snapcap;

namespace {

std::atomic<int> threads{1};

// Keeps large blocks that were given back. The system clears the pages of new ones, which took an eighth of an encode's
// time. All blocks take at most 1.5 times the most that was ever in use, because sizes do not fit exactly.
class Kept {
 public:
  Kept() { blocks_.reserve(kMost); }

  Block take(size_t bytes) {
    const size_t size = (bytes + kAlignment) / kAlignment * kAlignment;
    if (size < kLarge) return made(size);
    const std::lock_guard<std::mutex> lock(mutex_);
    auto best = blocks_.end();
    for (auto each = blocks_.begin(); each != blocks_.end(); ++each)
      if (each->size >= size && each->size <= 2 * size && (best == blocks_.end() || each->size < best->size)) best = each;
    const bool found = best != blocks_.end();
    const Block block = found ? *best : made_large(size);
    if (found) forget(best);
    used_ += block.size;
    most_used_ = std::max(most_used_, used_);
    free_oldest();
    return block;
  }

  void give_back(Block block) {
    if (block.size < kLarge) return std::free(block.data);
    const std::lock_guard<std::mutex> lock(mutex_);
    used_ -= block.size;
    if (blocks_.size() == kMost) free_one();
    blocks_.push_back(block);
    kept_ += block.size;
    free_oldest();
  }

 private:
  static constexpr size_t kLarge = 1 << 17;  // bytes; glibc takes larger blocks from the system
  static constexpr size_t kMost = 256;

  static Block made(size_t size) {
    auto* data = static_cast<char*>(std::aligned_alloc(kAlignment, size));
    if (data == nullptr) throw std::bad_alloc();
    return {data, size};
  }

  // Blocks that are kept are freed before memory counts as lacking.
  Block made_large(size_t size) {
    for (;;) {
      try {
        return made(size);
      } catch (const std::bad_alloc&) {
        if (blocks_.empty()) throw;
        free_one();
      }
    }
  }

  void free_oldest() {
    while (used_ + kept_ > most_used_ + most_used_ / 2) free_one();
  }

  void free_one() {
    std::free(blocks_.front().data);
    forget(blocks_.begin());
  }

  void forget(std::vector<Block>::iterator block) {
    kept_ -= block->size;
    blocks_.erase(block);
  }

  std::mutex mutex_;
  std::vector<Block> blocks_;  // the oldest first
  size_t used_ = 0, most_used_ = 0, kept_ = 0;
};

// Never destroyed, as threads may run while a process exits.
Kept& kept() {
  static auto* blocks = new Kept;
  return *blocks;
}

template <class T>
void copy_elements(const Tensor& target, const Tensor& source) {
  int64_t index[kMaxDims] = {};
  T* to = target.data<T>();
  const T* from = source.data<T>();
  for (int64_t left = target.count(); left > 0; --left) {
    *to = *from;
    for (int64_t dim = target.dims - 1; dim >= 0; --dim) {
      to += target.strides[dim];
      from += source.strides[dim];
      if (++index[dim] < target.sizes[dim]) break;
      to -= target.strides[dim] * target.sizes[dim];
      from -= source.strides[dim] * source.sizes[dim];
      index[dim] = 0;
    }
  }
}

}  // namespace

void snapcap::copy(const Tensor& target, const Tensor& source) {
  require(target.dtype == source.dtype && target.dims == source.dims &&
              std::equal(target.sizes.begin(), target.sizes.begin() + target.dims, source.sizes.begin()),
          "a copy between tensors of different dtypes or shapes is not served");
  const int64_t bytes = item_bytes(target.dtype);
  if (target.row_major() && source.row_major()) {
    const int64_t size = target.count() * bytes;
    if (size > 0)
      std::memcpy(target.storage->data() + target.offset * bytes, source.storage->data() + source.offset * bytes, size);
  } else if (bytes == 1) {
    copy_elements<uint8_t>(target, source);
  } else if (bytes == 2) {
    copy_elements<uint16_t>(target, source);
  } else if (bytes == 4) {
    copy_elements<uint32_t>(target, source);
  } else {
    copy_elements<uint64_t>(target, source);
  }
}

Block snapcap::take_block(size_t bytes) { return kept().take(bytes); }

void snapcap::give_back(Block block) { kept().give_back(block); }

int snapcap::thread_count() { return threads.load(std::memory_order_relaxed); }

namespace at {
__attribute__((visibility("default"))) void set_num_threads(int count) { threads = std::max(count, 1); }
}  // namespace at

SNAPCAP_C int32_t aoti_torch_device_type_cpu() { return 0; }
SNAPCAP_C int32_t aoti_torch_device_type_cuda() { return 1; }
SNAPCAP_C int32_t aoti_torch_dtype_uint8() { return kUint8; }
SNAPCAP_C int32_t aoti_torch_dtype_int8() { return kInt8; }
SNAPCAP_C int32_t aoti_torch_dtype_int32() { return kInt32; }
SNAPCAP_C int32_t aoti_torch_dtype_int64() { return kInt64; }
SNAPCAP_C int32_t aoti_torch_dtype_float16() { return kFloat16; }
SNAPCAP_C int32_t aoti_torch_dtype_float32() { return kFloat32; }
SNAPCAP_C int32_t aoti_torch_dtype_bool() { return kBool; }
SNAPCAP_C int32_t aoti_torch_dtype_bfloat16() { return kBfloat16; }
SNAPCAP_C bool aoti_torch_grad_mode_is_enabled() { return false; }
SNAPCAP_C void aoti_torch_grad_mode_set_enabled(bool) {}

SNAPCAP_C void aoti_torch_check(bool condition, const char*, const char*, uint32_t, const char* message) {
  require(condition, message);  // an index that is out of bounds: packages turn it into a status
}

SNAPCAP_C AOTITorchError aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides,
                                                  int32_t dtype, int32_t, int32_t, AtenTensorHandle* made) {
  return guarded(__func__, [&] { *made = make_tensor(dims, sizes, strides, dtype); });
}

SNAPCAP_C AOTITorchError aoti_torch_create_tensor_from_blob(void* data, int64_t dims, const int64_t* sizes,
                                                            const int64_t* strides, int64_t offset, int32_t dtype,
                                                            int32_t, int32_t, AtenTensorHandle* made) {
  return guarded(__func__, [&] {
    const int64_t bytes = offset * item_bytes(dtype) + extent_bytes(dims, sizes, strides, dtype);
    *made = new Tensor(new Storage(data, bytes), offset, dtype, dims, sizes, strides);
  });
}

SNAPCAP_C AOTITorchError aoti_torch_create_tensor_from_blob_v2(void* data, int64_t dims, const int64_t* sizes,
                                                               const int64_t* strides, int64_t offset, int32_t dtype,
                                                               int32_t type, int32_t index, AtenTensorHandle* made,
                                                               int32_t, const uint8_t*, int64_t) {
  return aoti_torch_create_tensor_from_blob(data, dims, sizes, strides, offset, dtype, type, index, made);
}

SNAPCAP_C AOTITorchError aoti_torch__reinterpret_tensor(AtenTensorHandle self, int64_t dims, const int64_t* sizes,
                                                        const int64_t* strides, int64_t offset,
                                                        AtenTensorHandle* made) {
  return guarded(__func__, [&] {
    *made = new Tensor(self->storage->share(), self->offset + offset, self->dtype, dims, sizes, strides);
  });
}

// The same bytes as numbers of another size. Only vectors are served.
SNAPCAP_C AOTITorchError aoti_torch_cpu_view_dtype(AtenTensorHandle self, int32_t dtype, AtenTensorHandle* made) {
  return guarded(__func__, [&] {
    const int64_t before = item_bytes(self->dtype), item = item_bytes(dtype), bytes = self->count() * before;
    require(self->dims == 1 && self->row_major() && bytes % item == 0 && self->offset * before % item == 0,
            "a view of another dtype is served of whole numbers of a vector");
    const int64_t count = bytes / item, step = 1;
    *made = new Tensor(self->storage->share(), self->offset * before / item, dtype, 1, &count, &step);
  });
}

SNAPCAP_C AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle self, AtenTensorHandle* made) {
  return guarded(__func__, [&] { *made = new Tensor(*self); });
}

SNAPCAP_C AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle self) {
  delete self;
  return 0;
}

SNAPCAP_C AOTITorchError aoti_torch_clone(AtenTensorHandle self, AtenTensorHandle* made) {
  return guarded(__func__, [&] {
    *made = make_tensor(self->dims, self->sizes.data(), self->dtype);
    copy(**made, *self);
  });
}

SNAPCAP_C AOTITorchError aoti_torch_copy_(AtenTensorHandle self, AtenTensorHandle source, int32_t) {
  return guarded(__func__, [&] { copy(*self, *source); });
}

SNAPCAP_C AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle self, void** data) {
  return guarded(__func__, [&] { *data = self->storage->data() + self->offset * item_bytes(self->dtype); });
}

SNAPCAP_C AOTITorchError aoti_torch_get_storage_size(AtenTensorHandle self, int64_t* bytes) {
  *bytes = self->storage->bytes();
  return 0;
}

SNAPCAP_C AOTITorchError aoti_torch_get_storage_offset(AtenTensorHandle self, int64_t* offset) {
  *offset = self->offset;
  return 0;
}

SNAPCAP_C AOTITorchError aoti_torch_get_dim(AtenTensorHandle self, int64_t* dims) {
  *dims = self->dims;
  return 0;
}

SNAPCAP_C AOTITorchError aoti_torch_get_numel(AtenTensorHandle self, int64_t* count) {
  *count = self->count();
  return 0;
}

SNAPCAP_C AOTITorchError aoti_torch_get_sizes(AtenTensorHandle self, int64_t** sizes) {
  *sizes = self->sizes.data();
  return 0;
}

SNAPCAP_C AOTITorchError aoti_torch_get_strides(AtenTensorHandle self, int64_t** strides) {
  *strides = self->strides.data();
  return 0;
}

SNAPCAP_C AOTITorchError aoti_torch_get_dtype(AtenTensorHandle self, int32_t* dtype) {
  *dtype = self->dtype;
  return 0;
}

SNAPCAP_C AOTITorchError aoti_torch_get_device_type(AtenTensorHandle, int32_t* type) {
  *type = 0;
  return 0;
}

SNAPCAP_C AOTITorchError aoti_torch_get_device_index(AtenTensorHandle, int32_t* index) {
  *index = -1;
  return 0;
}
