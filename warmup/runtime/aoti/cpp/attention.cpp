// Computes softmax(q K^T * scale + mask) V: torch's operator _scaled_dot_product_flash_attention_for_cpu.
//
// Head by head and some queries at a time, whose scores stay in the cache. Sequences of a picture's patches are short
// enough that a softmax over whole rows takes less than one that is carried on from block to block.

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "matrix.h"
#include "team.h"
#include "tensor.h"
#include "vector.h"

using namespace snapcap;

namespace {

constexpr int64_t kScoresAtOnce = 64 * 1024;  // 256 KiB
constexpr int64_t kFewestQueries = 48;        // that keys and values are worth packing for

struct Weights {
  float largest;  // score
  float total;    // of the weights
};

// Scores in place become e^(score - the largest), whose sum is not 1 yet. `mask`: what is added to the scores before,
// `mask_step` apart, or none. Between `count` and `width`, which are whole vectors, they become 0.
Weights exponentials(float* scores, int64_t count, int64_t width, const float* mask, int64_t mask_step) {
  const float lowest = -std::numeric_limits<float>::infinity();
  if (mask != nullptr)
    for (int64_t i = 0; i < count; ++i) scores[i] += mask[i * mask_step];
  std::fill(scores + count, scores + width, lowest);
  Vector most = all_of(lowest);
  for (int64_t i = 0; i < width; i += kWidth) {
    const Vector score = load(scores + i);
    most = score > most ? score : most;
  }
  const float largest = largest_of(most);
  if (largest == lowest) {  // nothing may be seen: torch's result is 0
    std::fill(scores, scores + width, 0.0f);
    return {lowest, 0};
  }
  Vector sums = all_of(0);
  for (int64_t i = 0; i < width; i += kWidth) {
    const Vector weight = snapcap::exp(load(scores + i) - largest);
    store(scores + i, weight);
    sums += weight;
  }
  return {largest, sum_of(sums)};
}

struct Attention {
  const Tensor &query, &key, &value;  // [B, H, T, d], [B, H, S, d], [B, H, S, d]
  const Tensor* mask;                 // broadcast to [B, H, T, S], or none
  bool causal;
  float scale;
  const Tensor &out, &logsumexp;  // [B, H, T, d], [B, H, T]

  void run(int64_t batch, int64_t head) const {
    const int64_t queries = query.sizes[2], width = query.sizes[3], keys = key.sizes[2];
    const int64_t step = (keys + kWidth - 1) / kWidth * kWidth;
    const int64_t each = std::clamp(kScoresAtOnce / step, kFewestQueries, std::max(queries, kFewestQueries));
    const float* q = query.data<float>() + batch * query.strides[0] + head * query.strides[1];
    const float* k = key.data<float>() + batch * key.strides[0] + head * key.strides[1];
    const float* v = value.data<float>() + batch * value.strides[0] + head * value.strides[1];
    float* to = out.data<float>() + batch * out.strides[0] + head * out.strides[1];
    float* sums = logsumexp.data<float>() + batch * logsumexp.strides[0] + head * logsumexp.strides[1];
    for (int64_t begin = 0; begin < queries; begin += each) {
      const int64_t rows = std::min(each, queries - begin);
      float* scores = scratch(kScores, each * step + each);
      float* totals = scores + each * step;
      Product product{rows, keys, width, {q + begin * query.strides[2], query.strides[2], query.strides[3]},
                      {k, key.strides[3], key.strides[2]}, scores, step};
      product.scale = scale;
      multiply(product, 1);
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t seen = causal ? std::min(keys, begin + row + 1) : keys;
        const int64_t padded = (seen + kWidth - 1) / kWidth * kWidth;
        float* of = scores + row * step;
        const float* added = mask == nullptr ? nullptr : mask_row(batch, head, begin + row);
        const int64_t mask_step = mask == nullptr || mask->sizes[mask->dims - 1] == 1 ? 0 : mask->strides[mask->dims - 1];
        const Weights weights = exponentials(of, seen, padded, added, mask_step);
        std::fill(of + padded, of + step, 0.0f);
        totals[row] = weights.total;
        sums[(begin + row) * logsumexp.strides[2]] = weights.total == 0 ? weights.largest : weights.largest + std::log(weights.total);
      }
      multiply({rows, width, keys, {scores, step, 1}, {v, value.strides[2], value.strides[3]},
                to + begin * out.strides[2], out.strides[2]},
               1);
      for (int64_t row = 0; row < rows; ++row) {
        const float each_of = totals[row] == 0 ? 0 : 1 / totals[row];
        float* of = to + (begin + row) * out.strides[2];
        for (int64_t i = 0; i < width; ++i) of[i] *= each_of;
      }
    }
  }

  const float* mask_row(int64_t batch, int64_t head, int64_t row) const {
    const float* at = mask->data<float>();
    const int64_t index[] = {batch, head, row};
    for (int64_t dim = 0; dim + 1 < mask->dims; ++dim) {
      const int64_t of = index[3 - (mask->dims - 1) + dim];
      if (mask->sizes[dim] != 1) at += of * mask->strides[dim];
    }
    return at;
  }
};

void attend(const Attention& attention) {
  const Tensor &query = attention.query, &key = attention.key;
  const int64_t heads = query.sizes[1], jobs = query.sizes[0] * heads;
  const int64_t work = 2 * query.count() * key.sizes[2];
  share_out(jobs, helpers_for(thread_count(), work), [&](int64_t job) { attention.run(job / heads, job % heads); });
}

}  // namespace

SNAPCAP_C AOTITorchError aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, double dropout, int32_t is_causal,
    AtenTensorHandle* attn_mask, double* scale, AtenTensorHandle* out, AtenTensorHandle* logsumexp) {
  return guarded(__func__, [&] {
    const Tensor* mask = attn_mask == nullptr ? nullptr : *attn_mask;
    for (const Tensor* each : {query, key, value})
      require(each->dtype == kFloat32 && each->dims == 4, "attention is served in float32 of four dimensions");
    require(key->sizes == value->sizes && key->sizes[0] == query->sizes[0] && key->sizes[1] == query->sizes[1] &&
                key->sizes[3] == query->sizes[3],
            "the shapes of attention do not fit");
    require(key->sizes[2] > 0, "attention without keys is not served");
    require(dropout == 0, "attention with dropout is not served");
    if (mask != nullptr) {
      require(mask->dtype == kFloat32 && mask->dims >= 1 && mask->dims <= 4, "the mask of attention is not served");
      const int64_t shape[] = {query->sizes[0], query->sizes[1], query->sizes[2], key->sizes[2]};
      for (int64_t dim = 1; dim <= mask->dims; ++dim) {
        const int64_t size = mask->sizes[mask->dims - dim];
        require(size == 1 || size == shape[4 - dim], "the mask of attention does not fit");
      }
    }
    // Both as torch lays them out: token by token, and the heads of a token side by side.
    const int64_t batch = query->sizes[0], heads = query->sizes[1], length = query->sizes[2], width = query->sizes[3];
    const int64_t sizes[] = {batch, heads, length, width};
    const int64_t strides[] = {length * heads * width, width, heads * width, 1};
    const int64_t sum_strides[] = {length * heads, 1, heads};
    std::unique_ptr<Tensor> result(make_tensor(4, sizes, strides, kFloat32));
    std::unique_ptr<Tensor> sums(make_tensor(3, sizes, sum_strides, kFloat32));
    const float factor = static_cast<float>(scale == nullptr ? 1 / std::sqrt(static_cast<double>(width)) : *scale);
    attend({*query, *key, *value, mask, is_causal != 0, factor, *result, *sums});
    *out = result.release();
    *logsumexp = sums.release();
  });
}
