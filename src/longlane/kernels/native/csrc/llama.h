// The layers of a llama-family model on packed rows of tokens: prefill, decode and verify are the same code.
//
// Every thread runs `forward`; the work between two barriers is split by token, by panel of output rows or by
// attention tile. No sum crosses threads, so the thread count does not change a bit either.
#pragma once

#include <atomic>
#include <vector>

#include "attention.h"
#include "matmul.h"
#include "threads.h"

namespace longlane {

struct Layer {
  const float* input_norm;
  const float* post_norm;
  Matrix qkv, output, gate_up, down;
};

struct Geometry {
  int32_t layers, hidden, heads, kv_heads, head_dim, inner;
  float epsilon;
};

// tokens packed to N; row r owns query_start[r] .. query_start[r + 1] - 1 on top of context[r] cached tokens.
struct Step {
  int32_t tokens, rows, table_stride;
  const int32_t* query_start;  // [rows + 1]
  const int32_t* context;      // [rows]
  const int32_t* block_table;  // [rows, table_stride]
  const float* cosine;         // [N, head_dim / 2]
  const float* sine;
  const float* final_norm;
  float* x;       // [N, hidden], embeddings in, residual stream after
  float* hidden;  // [N, hidden] out, after the final norm
};

class Llama {
 public:
  Llama(const Geometry& geometry, const Layer* layers, const Pages* pages, const Step& step)
      : g_(geometry), layers_(layers), pages_(pages), step_(step), width_((g_.heads + 2 * g_.kv_heads) * g_.head_dim) {
    const size_t n = step.tokens;
    row_.resize(n);
    qkv_.resize(n * width_);
    attended_.resize(n * g_.heads * g_.head_dim);
    normed_.resize(n * (g_.hidden / kGroup));
    heads_.resize(n * (g_.heads * g_.head_dim / kGroup));
    inner_.resize(n * (g_.inner / kGroup));
    next_ = std::vector<std::atomic<int>>(g_.layers);
    for (int r = 0; r < step.rows; ++r) {
      for (int t = step.query_start[r]; t < step.query_start[r + 1]; ++t) row_[t] = r;
      for (int t = step.query_start[r]; t < step.query_start[r + 1]; t += kQueries)
        tiles_.push_back({r, t, std::min(kQueries, step.query_start[r + 1] - t)});
    }
  }

  void forward(Pool& pool, int id) {
    const int size = pool.size();
    const Range tokens = share(step_.tokens, id, size);
    for (int l = 0; l < g_.layers; ++l) {
      const Layer& layer = layers_[l];
      for (int t = tokens.begin; t < tokens.end; ++t) norm(t, layer.input_norm);
      pool.barrier();
      const Range qkv = share(layer.qkv.panels(), id, size);
      multiply(layer.qkv, normed_.data(), step_.tokens, qkv.begin, qkv.end, store_to(qkv_.data(), layer.qkv));
      pool.barrier();
      for (int t = tokens.begin; t < tokens.end; ++t) rotate_and_append(t, pages_[l]);
      pool.barrier();
      const int items = static_cast<int>(tiles_.size()) * g_.heads;
      for (int item; (item = next_[l].fetch_add(1, std::memory_order_relaxed)) < items;) attend_tile(item, pages_[l]);
      pool.barrier();
      add_product(layer.output, heads_.data(), share(layer.output.panels(), id, size));
      pool.barrier();
      for (int t = tokens.begin; t < tokens.end; ++t) norm(t, layer.post_norm);
      pool.barrier();
      gated(layer.gate_up, share(g_.inner / kGroup, id, size));
      pool.barrier();
      add_product(layer.down, inner_.data(), share(layer.down.panels(), id, size));
      pool.barrier();
    }
    for (int t = tokens.begin; t < tokens.end; ++t)
      rms_norm(residual(t), step_.final_norm, g_.epsilon, g_.hidden, step_.hidden + static_cast<size_t>(t) * g_.hidden);
  }

 private:
  struct Tile {
    int row, token, count;
  };

  float* residual(int t) { return step_.x + static_cast<size_t>(t) * g_.hidden; }
  int slot(int t) const { return step_.context[row_[t]] + t - step_.query_start[row_[t]]; }
  const int32_t* table(int row) const { return step_.block_table + static_cast<size_t>(row) * step_.table_stride; }

  void norm(int t, const float* weight) {
    // `hidden` is free until the end of the step.
    float* scratch = step_.hidden + static_cast<size_t>(t) * g_.hidden;
    rms_norm(residual(t), weight, g_.epsilon, g_.hidden, scratch);
    quantize(scratch, g_.hidden, normed_.data() + static_cast<size_t>(t) * (g_.hidden / kGroup));
  }

  // Rotates the halves of one head against each other, as rotate_half does in transformers.
  void rotate(int t, const float* head, float scale, float* out) const {
    const int half = g_.head_dim / 2;
    const float* cosine = step_.cosine + static_cast<size_t>(t) * half;
    const float* sine = step_.sine + static_cast<size_t>(t) * half;
    const __m256 factor = _mm256_set1_ps(scale);
    for (int i = 0; i < half; i += 8) {
      const __m256 a = _mm256_loadu_ps(head + i), b = _mm256_loadu_ps(head + half + i);
      const __m256 c = _mm256_loadu_ps(cosine + i), s = _mm256_loadu_ps(sine + i);
      const __m256 first = _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s));
      const __m256 second = _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s));
      _mm256_storeu_ps(out + i, _mm256_mul_ps(first, factor));
      _mm256_storeu_ps(out + half + i, _mm256_mul_ps(second, factor));
    }
  }

  void rotate_and_append(int t, const Pages& pages) {
    float* head = qkv_.data() + static_cast<size_t>(t) * width_;
    const float scale = 1.0f / std::sqrt(static_cast<float>(g_.head_dim));
    for (int h = 0; h < g_.heads; ++h, head += g_.head_dim) rotate(t, head, scale, head);
    const int page = table(row_[t])[slot(t) / kPage];
    for (int h = 0; h < g_.kv_heads; ++h, head += g_.head_dim) {
      const size_t offset = ((static_cast<size_t>(page) * g_.kv_heads + h) * kPage + slot(t) % kPage) * g_.head_dim;
      rotate(t, head, 1.0f, pages.k + offset);
      std::memcpy(pages.v + offset, head + g_.kv_heads * g_.head_dim, sizeof(float) * g_.head_dim);
    }
  }

  void attend_tile(int item, const Pages& pages) {
    const Tile& tile = tiles_[item / g_.heads];
    const int h = item % g_.heads, dim = g_.head_dim, wide = g_.heads * dim;
    const float* q = qkv_.data() + static_cast<size_t>(tile.token) * width_ + h * dim;
    float* out = attended_.data() + static_cast<size_t>(tile.token) * wide + h * dim;
    attend(q, width_, tile.count, slot(tile.token), pages, table(tile.row), g_.kv_heads, h / (g_.heads / g_.kv_heads),
           dim, out, wide);
    for (int i = 0; i < tile.count; ++i)
      quantize(out + static_cast<size_t>(i) * wide, dim,
               heads_.data() + (static_cast<size_t>(tile.token + i) * wide + h * dim) / kGroup);
  }

  void add_product(const Matrix& w, const Activation* x, Range panels) {
    multiply(w, x, step_.tokens, panels.begin, panels.end,
             [&](int token, int tokens, int panel, int count, const __m256* sums) {
               for (int p = panel; p < panel + count; ++p)
                 for (int t = token; t < token + tokens; ++t, ++sums) {
                   float* sum = residual(t) + kPanel * p;
                   _mm256_storeu_ps(sum, _mm256_add_ps(_mm256_loadu_ps(sum), *sums));
                 }
             });
  }

  // inner = silu(gate) * up, quantised group by group where it is made: the panels of `w` alternate between the four of
  // a gate group and the four of its up group.
  void gated(const Matrix& w, Range groups) {
    constexpr int kPanels = kGroup / kPanel;
    static_assert(kChunk % (2 * kPanels) == 0);
    multiply(w, normed_.data(), step_.tokens, groups.begin * 2 * kPanels, groups.end * 2 * kPanels,
             [&](int token, int tokens, int panel, int count, const __m256* sums) {
               for (int p = panel; p < panel + count; p += 2 * kPanels, sums += 2 * kPanels * tokens)
                 for (int t = 0; t < tokens; ++t) {
                   alignas(32) float values[kGroup];
                   for (int i = 0; i < kPanels; ++i) {
                     const __m256 up = sums[(kPanels + i) * tokens + t];
                     _mm256_store_ps(values + kPanel * i, _mm256_mul_ps(silu(sums[i * tokens + t]), up));
                   }
                   const size_t group = static_cast<size_t>(token + t) * (g_.inner / kGroup) + p / (2 * kPanels);
                   quantize_group(values, inner_.data() + group);
                 }
             });
  }

  const Geometry g_;
  const Layer* layers_;
  const Pages* pages_;
  const Step step_;
  const int width_;
  std::vector<Tile> tiles_;
  std::vector<int> row_;
  std::vector<std::atomic<int>> next_;
  std::vector<float> qkv_, attended_;
  std::vector<Activation> normed_, heads_, inner_;
};

}  // namespace longlane
