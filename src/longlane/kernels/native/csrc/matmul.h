// y = W x with W packed in panels of eight rows and x quantised to int8 in groups of 32 along K.
//
// A panel holds, group after group, one block of: eight float16 scales, eight float16 minimums (kNibbleMinimum only),
// then the codes of 32 columns, four columns (a quad) of all eight rows side by side, so that one vector multiply
// serves eight rows. Nibble codes share a byte between quads 2c (low) and 2c + 1 (high). The integer sum over a group
// is exact and groups are added in order, so a token's result does not depend on which others are computed with it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vector.h"

namespace longlane {

constexpr int kGroup = 32;
constexpr int kPanel = 8;
constexpr int kTile = 6;               // tokens that share one pass over a panel: what 16 registers hold
constexpr int kChunk = 32;             // panels that pass while a block of operands is in the first-level cache
constexpr int kFirstLevel = 16 << 10;  // bytes of it that operands may take
constexpr int kSecondLevel = 128 << 10;
constexpr int kAhead = 1536;

enum Format : int32_t { kNibbleMinimum = 0, kNibble = 1, kByte = 2 };

struct Matrix {
  const uint8_t* data;
  int32_t format, rows, columns;

  int groups() const { return (columns + kGroup - 1) / kGroup; }
  int panels() const { return (rows + kPanel - 1) / kPanel; }
};

// x of one group: x = scale * q; sum = scale * (q_0 + ... + q_31), as in GGML's Q8_1 but with float32 scales.
struct Activation {
  float scale, sum;
  int8_t q[kGroup];
};

constexpr int block_bytes(int32_t format) {
  return format == kNibbleMinimum ? 32 + 128 : format == kNibble ? 16 + 128 : 16 + 256;
}

inline void quantize_group(const float* x, Activation* out) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 v[4], largest = _mm256_setzero_ps();
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_loadu_ps(x + 8 * i);
    largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, v[i]));
  }
  const float amax = maximum(largest);
  const __m256 inverse = _mm256_set1_ps(amax > 0 ? 127.0f / amax : 0.0f);
  __m256i q[4];
  for (int i = 0; i < 4; ++i) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
  const __m256i total = _mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3]));
  __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
  bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out->q), bytes);
  out->scale = amax / 127.0f;
  // At most 32 * 127, so the float sum of integers is exact.
  out->sum = out->scale * sum(_mm256_cvtepi32_ps(total));
}

inline void quantize(const float* x, int columns, Activation* out) {
  int k = 0;
  for (; k + kGroup <= columns; k += kGroup) quantize_group(x + k, out + k / kGroup);
  if (k == columns) return;
  float padded[kGroup] = {};
  std::memcpy(padded, x + k, sizeof(float) * (columns - k));
  quantize_group(padded, out + k / kGroup);
}

// An activation group as the multiply instructions read it: every quad repeated for the eight rows of a panel. Loading
// it so is one instruction less per multiply than repeating it there, and a tile is used for many panels.
struct Operand {
  __m256 scale, sum;
  __m256i quads[8];
};

inline void expand(const Activation& a, Operand* out) {
  out->scale = _mm256_set1_ps(a.scale);
  out->sum = _mm256_set1_ps(a.sum);
  for (int quad = 0; quad < 8; ++quad) {
    int32_t word;
    std::memcpy(&word, a.q + 4 * quad, 4);
    out->quads[quad] = _mm256_set1_epi32(word);
  }
}

// Adds the products of unsigned and signed bytes to an accumulator that holds eight steps of bytes up to 15, or one of
// bytes up to 128; `widen` gives its eight int32 sums of four neighbours.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
inline __m256i add_products(__m256i acc, __m256i u, __m256i s) { return _mm256_dpbusd_epi32(acc, u, s); }
inline __m256i widen(__m256i acc) { return acc; }
#elif defined(__AVXVNNI__)
inline __m256i add_products(__m256i acc, __m256i u, __m256i s) { return _mm256_dpbusd_avx_epi32(acc, u, s); }
inline __m256i widen(__m256i acc) { return acc; }
#else
// 8 steps x 2 products x 15 x 127 = 30,480 and 2 x 128 x 127 = 32,512 fit int16.
inline __m256i add_products(__m256i acc, __m256i u, __m256i s) {
  return _mm256_add_epi16(acc, _mm256_maddubs_epi16(u, s));
}
inline __m256i widen(__m256i acc) { return _mm256_madd_epi16(acc, _mm256_set1_epi16(1)); }
#endif

inline __m256i load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

inline __m256 halves(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// sums[t] += the eight rows of one panel times token t, over `groups` groups; x is [groups, T].
template <int32_t F, int T>
inline void tile(const uint8_t* block, const Operand* x, int groups, __m256* sums) {
  __m256 acc[T];
  for (int t = 0; t < T; ++t) acc[t] = sums[t];
  for (int g = 0; g < groups; ++g, block += block_bytes(F), x += T) {
    // One column waits for memory: the lines of the blocks that come kAhead bytes later are asked for now.
    if constexpr (T == 1)
      for (int line = 0; line < block_bytes(F); line += 64) _mm_prefetch(block + kAhead + line, _MM_HINT_T0);
    __m256i dot[T];
    for (int t = 0; t < T; ++t) dot[t] = _mm256_setzero_si256();
    if constexpr (F == kByte) {
      for (int quad = 0; quad < 8; ++quad) {
        const __m256i w = load(block + 16 + 32 * quad);
        const __m256i magnitude = _mm256_abs_epi8(w);
        for (int t = 0; t < T; ++t) {
          const __m256i signed_x = _mm256_sign_epi8(x[t].quads[quad], w);
          const __m256i pairs = add_products(_mm256_setzero_si256(), magnitude, signed_x);
          dot[t] = _mm256_add_epi32(dot[t], widen(pairs));
        }
      }
    } else {
      const uint8_t* codes = block + (F == kNibbleMinimum ? 32 : 16);
      const __m256i low = _mm256_set1_epi8(15);
#pragma GCC unroll 1
      for (int c = 0; c < 4; ++c) {
        const __m256i bytes = load(codes + 32 * c);
        const __m256i first = _mm256_and_si256(bytes, low);
        const __m256i second = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
        for (int t = 0; t < T; ++t) {
          dot[t] = add_products(dot[t], first, x[t].quads[2 * c]);
          dot[t] = add_products(dot[t], second, x[t].quads[2 * c + 1]);
        }
      }
      for (int t = 0; t < T; ++t) dot[t] = widen(dot[t]);
    }
    const __m256 scale = halves(block);
    // A signed nibble is stored as code + 8, which is a minimum of -8 scales.
    const __m256 minimum = F == kNibbleMinimum ? halves(block + 16) : _mm256_mul_ps(scale, _mm256_set1_ps(-8.0f));
    for (int t = 0; t < T; ++t) {
      acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[t]), _mm256_mul_ps(scale, x[t].scale), acc[t]);
      if constexpr (F != kByte) acc[t] = _mm256_fmadd_ps(minimum, x[t].sum, acc[t]);
    }
  }
  for (int t = 0; t < T; ++t) sums[t] = acc[t];
}

// Groups [first, last) of panels [begin, end); sums is [panels, T].
template <int32_t F, int T>
[[gnu::noinline]] void tiles(const Matrix& w, int begin, int end, int first, int last, const Operand* x, __m256* sums) {
  const size_t stride = static_cast<size_t>(w.groups()) * block_bytes(F);
  const uint8_t* block = w.data + begin * stride + first * static_cast<size_t>(block_bytes(F));
  for (int panel = begin; panel < end; ++panel, block += stride, sums += T) tile<F, T>(block, x, last - first, sums);
}

template <int32_t F>
inline void tiles(int count, const Matrix& w, int begin, int end, int first, int last, const Operand* x, __m256* sums) {
  switch (count) {
    case 1: return tiles<F, 1>(w, begin, end, first, last, x, sums);
    case 2: return tiles<F, 2>(w, begin, end, first, last, x, sums);
    case 3: return tiles<F, 3>(w, begin, end, first, last, x, sums);
    case 4: return tiles<F, 4>(w, begin, end, first, last, x, sums);
    case 5: return tiles<F, 5>(w, begin, end, first, last, x, sums);
    default: return tiles<F, kTile>(w, begin, end, first, last, x, sums);
  }
}

// sums [end - begin, count] of `count` tokens whose operands are x [groups, count].
inline void product(const Matrix& w, int begin, int end, const Operand* x, int count, __m256* sums) {
  const int groups = w.groups();
  const int fit = kFirstLevel / static_cast<int>(sizeof(Operand) * count);
  for (int i = 0; i < (end - begin) * count; ++i) sums[i] = _mm256_setzero_ps();
  for (int first = 0; first < groups; first += fit) {
    const int last = groups < first + fit ? groups : first + fit;
    const Operand* operand = x + static_cast<size_t>(first) * count;
    switch (w.format) {
      case kNibbleMinimum: tiles<kNibbleMinimum>(count, w, begin, end, first, last, operand, sums); break;
      case kNibble: tiles<kNibble>(count, w, begin, end, first, last, operand, sums); break;
      default: tiles<kByte>(count, w, begin, end, first, last, operand, sums);
    }
  }
}

// Calls sink(first token, tokens, first panel, panels, sums [panels, tokens]) until panels [begin, end) of all tokens of
// x [tokens, groups] have been given. Chunks start at multiples of kChunk from `begin`.
template <class Sink>
inline void multiply(const Matrix& w, const Activation* x, int tokens, int begin, int end, Sink&& sink) {
  const int groups = w.groups();
  const int tiles_held = std::max(1, kSecondLevel / static_cast<int>(sizeof(Operand) * groups * kTile));
  thread_local std::vector<Operand> operands;
  operands.resize(static_cast<size_t>(tiles_held) * groups * kTile);
  for (int start = 0; start < tokens; start += tiles_held * kTile) {
    const int stop = std::min(tokens, start + tiles_held * kTile);
    for (int t = start; t < stop; ++t) {
      const int tile_start = start + (t - start) / kTile * kTile, count = std::min(kTile, stop - tile_start);
      Operand* out = operands.data() + static_cast<size_t>(tile_start - start) * groups + t - tile_start;
      for (int g = 0; g < groups; ++g) expand(x[static_cast<size_t>(t) * groups + g], out + static_cast<size_t>(g) * count);
    }
    for (int panel = begin; panel < end; panel += kChunk) {
      const int last = std::min(end, panel + kChunk);
      for (int t = start; t < stop; t += kTile) {
        __m256 sums[kChunk * kTile];
        const int count = std::min(kTile, stop - t);
        product(w, panel, last, operands.data() + static_cast<size_t>(t - start) * groups, count, sums);
        sink(t, count, panel, last - panel, sums);
      }
    }
  }
}

// The sink that writes y [tokens, rows]; the last panel may hold fewer than eight rows.
inline auto store_to(float* y, const Matrix& w) {
  return [y, &w](int token, int tokens, int panel, int panels, const __m256* sums) {
    for (int p = panel; p < panel + panels; ++p) {
      const size_t lanes = std::min(kPanel, w.rows - kPanel * p);
      for (int t = token; t < token + tokens; ++t, ++sums)
        std::memcpy(y + static_cast<size_t>(t) * w.rows + kPanel * p, sums, sizeof(float) * lanes);
    }
  };
}

}  // namespace longlane
