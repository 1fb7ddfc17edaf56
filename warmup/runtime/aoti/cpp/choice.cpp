// Orders and sums numbers, as the choice of tokens does: torch's operators sort, topk, cumsum and scatter_reduce.
//
// As in torch, NaN counts as the largest number. Of equal numbers the first comes first.

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "tensor.h"

using namespace snapcap;

namespace {

int64_t dimension(const Tensor& tensor, int64_t dim) {
  const int64_t wrapped = dim < 0 ? dim + tensor.dims : dim;
  require(wrapped >= 0 && wrapped < tensor.dims, "there is no such dimension");
  return wrapped;
}

// The same numbers, row by row. Results lie so, as torch's do of numbers that lie apart, but not of those that lie
// closely in another order.
std::unique_ptr<Tensor> row_by_row(const Tensor& tensor) {
  if (tensor.row_major()) return std::make_unique<Tensor>(tensor);
  const int64_t bytes = extent_bytes(tensor.dims, tensor.sizes.data(), tensor.strides.data(), tensor.dtype);
  require(bytes != tensor.count() * item_bytes(tensor.dtype), "numbers in another order than row by row are not served");
  std::unique_ptr<Tensor> made(make_tensor(tensor.dims, tensor.sizes.data(), tensor.dtype));
  copy(*made, tensor);
  return made;
}

// Whether no dimension lies inside a later one in memory. torch gives the sorted numbers of any tensor the order that
// its dimensions have.
bool row_order(const Tensor& tensor) {
  int64_t outer = std::numeric_limits<int64_t>::max();
  for (int64_t dim = 0; dim < tensor.dims; ++dim) {
    if (tensor.sizes[dim] == 1 || tensor.strides[dim] == 0) continue;
    if (tensor.strides[dim] > outer) return false;
    outer = tensor.strides[dim];
  }
  return true;
}

// Rows of numbers along the last dimension of a tensor that lies row by row.
struct Rows {
  int64_t count, length;

  Rows(const Tensor& tensor, int64_t dim) : length(tensor.dims == 0 ? 1 : tensor.sizes[tensor.dims - 1]) {
    require(dimension(tensor, dim) == tensor.dims - 1, "the order of numbers is served along the last dimension");
    count = length == 0 ? 0 : tensor.count() / length;
  }
};

template <class T>
bool is_nan(T value) {
  return value != value;
}

// The places of the `most` largest (or smallest) of a row, in their order.
template <class T>
std::vector<int64_t> ordered(const T* row, int64_t length, int64_t most, bool descending) {
  std::vector<int64_t> places(length);
  std::iota(places.begin(), places.end(), 0);
  const auto before = [&](int64_t a, int64_t b) {
    const T x = row[a], y = row[b];
    if (is_nan(x) || is_nan(y)) {
      if (is_nan(x) != is_nan(y)) return is_nan(x) == descending;
    } else if (x != y) {
      return descending ? x > y : x < y;
    }
    return a < b;
  };
  if (most < length) {
    std::partial_sort(places.begin(), places.begin() + most, places.end(), before);
  } else {
    std::sort(places.begin(), places.end(), before);
  }
  places.resize(most);
  return places;
}

template <class T>
void order(const Tensor& self, const Rows& rows, int64_t most, bool descending, const Tensor& values,
           const Tensor& indices) {
  for (int64_t row = 0; row < rows.count; ++row) {
    const T* from = self.data<T>() + row * rows.length;
    const std::vector<int64_t> places = ordered(from, rows.length, most, descending);
    for (int64_t i = 0; i < most; ++i) {
      values.data<T>()[row * most + i] = from[places[i]];
      indices.data<int64_t>()[row * most + i] = places[i];
    }
  }
}

AOTITorchError order_rows(const char* name, const Tensor& given, int64_t dim, int64_t most, bool descending,
                          AtenTensorHandle* values, AtenTensorHandle* indices) {
  return guarded(name, [&] {
    const std::unique_ptr<Tensor> contiguous = row_by_row(given);
    const Tensor& self = *contiguous;
    const Rows rows(self, dim);
    if (most < 0) most = rows.length;
    require(most <= rows.length, "more numbers are asked for than there are");
    auto sizes = self.sizes;
    sizes[self.dims - 1] = most;
    std::unique_ptr<Tensor> ordered_values(make_tensor(self.dims, sizes.data(), self.dtype));
    std::unique_ptr<Tensor> places(make_tensor(self.dims, sizes.data(), kInt64));
    require(self.dtype == kFloat32 || self.dtype == kInt64, "the order of numbers is served of float32 and int64");
    if (self.dtype == kFloat32) {
      order<float>(self, rows, most, descending, *ordered_values, *places);
    } else {
      order<int64_t>(self, rows, most, descending, *ordered_values, *places);
    }
    *values = ordered_values.release();
    *indices = places.release();
  });
}

template <class From, class To, class Sum>
void sum_up(const Tensor& self, const Tensor& result, int64_t dim) {
  int64_t inner = 1, outer = 1;
  for (int64_t each = 0; each < self.dims; ++each) (each < dim ? outer : inner) *= each == dim ? 1 : self.sizes[each];
  const int64_t length = self.sizes[dim];
  for (int64_t i = 0; i < outer; ++i) {
    for (int64_t j = 0; j < inner; ++j) {
      Sum sum = 0;
      for (int64_t at = (i * length) * inner + j, end = at + length * inner; at < end; at += inner) {
        sum += self.data<From>()[at];
        result.data<To>()[at] = static_cast<To>(sum);
      }
    }
  }
}

}  // namespace

SNAPCAP_C AOTITorchError aoti_torch_cpu_sort_stable(AtenTensorHandle self, int32_t*, int64_t dim, int32_t descending,
                                                    AtenTensorHandle* values, AtenTensorHandle* indices) {
  const auto check = [&] { require(row_order(*self), "numbers in another order than row by row are not served"); };
  if (const AOTITorchError refused = guarded(__func__, check)) return refused;
  return order_rows(__func__, *self, dim, -1, descending != 0, values, indices);
}

SNAPCAP_C AOTITorchError aoti_torch_cpu_topk(AtenTensorHandle self, int64_t k, int64_t dim, int32_t largest, int32_t,
                                             AtenTensorHandle* values, AtenTensorHandle* indices) {
  return order_rows(__func__, *self, dim, std::max<int64_t>(k, 0), largest != 0, values, indices);
}

SNAPCAP_C AOTITorchError aoti_torch_cpu_cumsum(AtenTensorHandle self, int64_t dim, int32_t* dtype,
                                               AtenTensorHandle* result) {
  return guarded(__func__, [&] {
    const bool real = self->dtype == kFloat32;
    const int32_t to = real ? kFloat32 : kInt64;
    require(real || self->dtype == kInt64 || self->dtype == kBool, "cumsum is served of float32, int64 and bool");
    require(dtype == nullptr || *dtype == to, "cumsum is served to float32 of float32, and to int64 of others");
    const int64_t along = dimension(*self, dim);
    const std::unique_ptr<Tensor> from = row_by_row(*self);
    std::unique_ptr<Tensor> made(make_tensor(self->dims, self->sizes.data(), to));
    if (real) {
      sum_up<float, float, double>(*from, *made, along);  // in double precision, as torch does
    } else if (self->dtype == kInt64) {
      sum_up<int64_t, int64_t, int64_t>(*from, *made, along);
    } else {
      sum_up<uint8_t, int64_t, int64_t>(*from, *made, along);
    }
    *result = made.release();
  });
}

SNAPCAP_C AOTITorchError aoti_torch_cpu_scatter_reduce_two_out(AtenTensorHandle out, AtenTensorHandle self, int64_t dim,
                                                               AtenTensorHandle index, AtenTensorHandle source,
                                                               const char* reduce, int32_t include_self) {
  return guarded(__func__, [&] {
    require(std::string(reduce) == "amin" && include_self != 0 && self->dims == 2 && dimension(*self, dim) == 1 &&
                self->dtype == kFloat32 && source->dtype == kFloat32 && index->dtype == kInt64,
            "scatter_reduce is served as the minimum, in rows of float32");
    for (const Tensor* each : {out, index, source}) require(each->dims == 2, "scatter_reduce is served of two dimensions");
    require(out->sizes[0] == self->sizes[0] && out->sizes[1] == self->sizes[1] && index->sizes[0] <= self->sizes[0] &&
                index->sizes[0] <= source->sizes[0] && index->sizes[1] <= source->sizes[1],
            "the shapes of scatter_reduce do not fit");
    const auto at = [](const Tensor& tensor, int64_t row, int64_t column) {
      return row * tensor.strides[0] + column * tensor.strides[1];
    };
    if (out->data<float>() != self->data<float>())
      for (int64_t row = 0; row < self->sizes[0]; ++row)
        for (int64_t column = 0; column < self->sizes[1]; ++column)
          out->data<float>()[at(*out, row, column)] = self->data<float>()[at(*self, row, column)];
    for (int64_t row = 0; row < index->sizes[0]; ++row) {
      for (int64_t column = 0; column < index->sizes[1]; ++column) {
        const int64_t place = index->data<int64_t>()[at(*index, row, column)];
        require(place >= 0 && place < out->sizes[1], "an index is out of bounds");
        float& held = out->data<float>()[at(*out, row, place)];
        const float given = source->data<float>()[at(*source, row, column)];
        if (given < held || is_nan(given)) held = given;  // NaN stays, as in torch
      }
    }
  });
}
