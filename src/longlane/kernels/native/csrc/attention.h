// Causal attention over 64-token pages of float32 keys and values, one query at a time, page after page with a running
// maximum. Each query meets the same pages in the same order however the queries are grouped, so prefill in chunks of
// any size and decode give the same bits.
#pragma once

#include <cstdint>
#include <limits>

#include "vector.h"

namespace longlane {

constexpr int kPage = 64;
constexpr int kQueries = 16;  // queries that share a page while it is in the first-level cache

struct Pages {
  float* k;
  float* v;
};

struct Softmax {
  float maximum;
  __m256 total;
};

// One page's logits q . k, running softmax: probs[64] relative to the new maximum; returns the factor for older sums.
inline float page_probabilities(const float* q, const float* keys, int dim, int valid, Softmax* state, float* probs) {
  const __m256 hidden = _mm256_set1_ps(-std::numeric_limits<float>::infinity());
  const __m256 lane = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
  __m256 largest = hidden;
  for (int key = 0; key < valid; key += 8) {
    __m256 acc[8];
    for (auto& a : acc) a = _mm256_setzero_ps();
    for (int d = 0; d < dim; d += 8) {
      const __m256 x = _mm256_loadu_ps(q + d);
      for (int j = 0; j < 8; ++j) acc[j] = _mm256_fmadd_ps(x, _mm256_loadu_ps(keys + (key + j) * dim + d), acc[j]);
    }
    const __m256 seen = _mm256_cmp_ps(lane, _mm256_set1_ps(static_cast<float>(valid - key)), _CMP_LT_OQ);
    const __m256 logits = _mm256_blendv_ps(hidden, sums(acc), seen);
    _mm256_storeu_ps(probs + key, logits);
    largest = _mm256_max_ps(largest, logits);
  }
  const float before = state->maximum;
  const float page = maximum(largest);
  state->maximum = page > before ? page : before;
  const __m256 shift = _mm256_set1_ps(state->maximum);
  const float factor = _mm256_cvtss_f32(exponential(_mm256_sub_ps(_mm256_set1_ps(before), shift)));
  __m256 total = _mm256_mul_ps(state->total, _mm256_set1_ps(factor));
  for (int key = 0; key < valid; key += 8) {
    const __m256 logits = _mm256_loadu_ps(probs + key);
    const __m256 seen = _mm256_cmp_ps(logits, hidden, _CMP_GT_OQ);
    const __m256 p = _mm256_and_ps(exponential(_mm256_sub_ps(logits, shift)), seen);
    _mm256_storeu_ps(probs + key, p);
    total = _mm256_add_ps(total, p);
  }
  state->total = total;
  return factor;
}

// out = out * factor + probs . values
inline void add_values(const float* probs, const float* values, int dim, int valid, float factor, float* out) {
  for (int base = 0; base < dim; base += 64) {
    __m256 acc[8];
    for (int i = 0; i < 8; ++i) acc[i] = _mm256_mul_ps(_mm256_loadu_ps(out + base + 8 * i), _mm256_set1_ps(factor));
    for (int key = 0; key < valid; ++key) {
      const __m256 p = _mm256_set1_ps(probs[key]);
      for (int i = 0; i < 8; ++i)
        acc[i] = _mm256_fmadd_ps(p, _mm256_loadu_ps(values + key * dim + base + 8 * i), acc[i]);
    }
    for (int i = 0; i < 8; ++i) _mm256_storeu_ps(out + base + 8 * i, acc[i]);
  }
}

// `count` neighbouring queries of one head, at slots first, first + 1, ...; q and out advance by `stride` a query.
// dim is a multiple of 64. `out` holds sums and is divided by their weights at the end.
inline void attend(const float* q, int stride, int count, int first, const Pages& pages, const int32_t* table,
                   int kv_heads, int kv_head, int dim, float* out, int out_stride) {
  Softmax state[kQueries];
  float probs[kQueries][kPage], factors[kQueries];
  for (int i = 0; i < count; ++i) {
    state[i] = {-std::numeric_limits<float>::infinity(), _mm256_setzero_ps()};
    for (int d = 0; d < dim; ++d) out[i * out_stride + d] = 0.0f;
  }
  for (int page = 0; page * kPage < first + count; ++page) {
    const size_t offset = (static_cast<size_t>(table[page]) * kv_heads + kv_head) * kPage * dim;
    const auto valid = [&](int i) {
      const int left = first + i + 1 - page * kPage;
      return left < kPage ? left : kPage;
    };
    for (int i = 0; i < count; ++i)
      if (valid(i) > 0)
        factors[i] = page_probabilities(q + i * stride, pages.k + offset, dim, valid(i), &state[i], probs[i]);
    for (int i = 0; i < count; ++i)
      if (valid(i) > 0) add_values(probs[i], pages.v + offset, dim, valid(i), factors[i], out + i * out_stride);
  }
  for (int i = 0; i < count; ++i) {
    const __m256 weight = _mm256_set1_ps(1.0f / sum(state[i].total));
    for (int d = 0; d < dim; d += 8)
      _mm256_storeu_ps(out + i * out_stride + d, _mm256_mul_ps(_mm256_loadu_ps(out + i * out_stride + d), weight));
  }
}

}  // namespace longlane
