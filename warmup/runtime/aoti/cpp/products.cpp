// Multiplies tensors: torch's operators addmm, mm, bmm and baddbmm, under the names that packages call.

#include "matrix.h"
#include "team.h"
#include "tensor.h"

using namespace snapcap;

namespace {

// The last two dimensions of a tensor; `batch`: which of those before them.
Matrix matrix_of(const Tensor& tensor, int64_t batch = 0) {
  require(tensor.dtype == kFloat32, "products are served in float32");
  const int64_t dims = tensor.dims;
  const float* data = tensor.data<float>() + (dims == 3 ? batch * tensor.strides[0] : 0);
  return {data, tensor.strides[dims - 2], tensor.strides[dims - 1]};
}

// Of a tensor that is added to a product: shapes that are broadcast have a step of 0.
Matrix added_to(const Tensor& out, const Tensor& tensor, int64_t batch) {
  require(tensor.dtype == kFloat32 && tensor.dims <= out.dims, "what is added to a product does not fit it");
  int64_t steps[3] = {};
  for (int64_t dim = 1; dim <= tensor.dims; ++dim) {
    const int64_t size = tensor.sizes[tensor.dims - dim];
    require(size == 1 || size == out.sizes[out.dims - dim], "what is added to a product does not fit it");
    steps[3 - dim] = size == 1 ? 0 : tensor.strides[tensor.dims - dim];
  }
  return {tensor.data<float>() + batch * steps[0], steps[1], steps[2]};
}

void multiply_tensors(const Tensor& out, const Tensor& left, const Tensor& right, const Tensor* added, float scale,
                      float added_scale) {
  const int64_t dims = out.dims;
  require((dims == 2 || dims == 3) && left.dims == dims && right.dims == dims, "products have two or three dimensions");
  const int64_t rows = out.sizes[dims - 2], columns = out.sizes[dims - 1], depth = left.sizes[dims - 1];
  const int64_t batch = dims == 3 ? out.sizes[0] : 1;
  require(left.sizes[dims - 2] == rows && right.sizes[dims - 1] == columns && right.sizes[dims - 2] == depth,
          "the shapes of a product do not fit");
  require(dims == 2 || (left.sizes[0] == batch && right.sizes[0] == batch), "the shapes of a product do not fit");
  const bool turned = columns > 1 && out.strides[dims - 1] != 1;  // then the transposed product is computed
  require(!turned || out.strides[dims - 2] == 1 || rows == 1, "a result whose numbers lie apart is not served");
  const auto one = [&](int64_t index, int threads) {
    const Matrix a = matrix_of(left, index), b = matrix_of(right, index);
    const Matrix result = matrix_of(out, index);
    Matrix plus{nullptr, 0, 0};
    if (added != nullptr && added_scale != 0) plus = added_to(out, *added, index);
    Product product{rows, columns, depth, a, b, const_cast<float*>(result.data), result.row_step,
                    plus, scale,   added_scale};
    if (turned) {
      product.rows = columns;
      product.columns = rows;
      product.left = {b.data, b.column_step, b.row_step};
      product.right = {a.data, a.column_step, a.row_step};
      product.result_step = result.column_step;
      product.added = {plus.data, plus.column_step, plus.row_step};
    }
    multiply(product, threads);
  };
  const int threads = thread_count();
  if (batch < threads) {
    for (int64_t index = 0; index < batch; ++index) one(index, threads);
  } else {
    share_out(batch, helpers_for(threads, rows * columns * depth * batch), [&](int64_t index) { one(index, 1); });
  }
}

}  // namespace

SNAPCAP_C AOTITorchError aoti_torch_cpu_mm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle other) {
  return guarded(__func__, [&] { multiply_tensors(*out, *self, *other, nullptr, 1, 0); });
}

SNAPCAP_C AOTITorchError aoti_torch_cpu_bmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle other) {
  return guarded(__func__, [&] { multiply_tensors(*out, *self, *other, nullptr, 1, 0); });
}

SNAPCAP_C AOTITorchError aoti_torch_cpu_addmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle left,
                                                  AtenTensorHandle right, double beta, double alpha) {
  return guarded(__func__, [&] {
    multiply_tensors(*out, *left, *right, self, static_cast<float>(alpha), static_cast<float>(beta));
  });
}

SNAPCAP_C AOTITorchError aoti_torch_cpu_baddbmm_out(AtenTensorHandle out, AtenTensorHandle self,
                                                    AtenTensorHandle left, AtenTensorHandle right, double beta,
                                                    double alpha) {
  return aoti_torch_cpu_addmm_out(out, self, left, right, beta, alpha);
}
