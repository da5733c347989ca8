// Products of a few rows with weights in 8 or 4 bits whose inputs are rounded to 8 bits, a scale a block: products of
// whole numbers (the way of llama.cpp's q8_0 and q4_0, its weights rearranged as there); for codes.cpp and step.cpp.
//
// Eight outputs lie side by side. A vector of 32 bytes has four inputs of each, so that each of its 8 sums belongs to one
// output, and nothing is added up among lanes:
//
//   bytes    vector v of a chunk of 32 inputs: inputs 4v … 4v + 3 of outputs 0 … 7; eight vectors
//   nibbles  vector v: inputs 4v … 4v + 3 in the lower halves, 16 + 4v … 16 + 4v + 3 in the upper; four vectors
//
// Scales and zeros lie alike, [out/8, groups, 8]. Outputs beyond the last, and inputs behind a row, are 0.
#pragma once
#include "products.h"

namespace {

constexpr float HIGHEST = 127;  // of an input's code

// Rows of inputs in 8 bits, padded to whole chunks.
struct CodedRows {
  int64_t width, blocks;       // codes and blocks of a row
  std::vector<float> numbers;  // of one row
  std::vector<int8_t> codes;   // [rows, width]
  std::vector<float> scales;   // [rows, blocks]
  std::vector<int32_t> sums;   // of a block's codes [rows, blocks]
  std::vector<float> totals;   // Σx of each group [rows, groups], where the weight has zeros
};

// Of each of 32 numbers the lowest byte, in their order.
inline void lowest_bytes(const Sums (&whole)[PARTS], int8_t* to) {
#ifdef __AVX2__
  const __m256i byte = _mm256_set1_epi32(255);
  const auto low = [&](int k) { return _mm256_and_si256((__m256i)whole[k], byte); };
  const __m256i pairs[] = {_mm256_packus_epi32(low(0), low(1)), _mm256_packus_epi32(low(2), low(3))};
  const __m256i packed = _mm256_packus_epi16(pairs[0], pairs[1]);  // four bytes of each, by halves of a vector
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(packed, order));
#else
  for (int i = 0; i < CHUNK; i++) to[i] = int8_t(whole[i / LANES][i % LANES]);
#endif
}

// 8 numbers at a time, the block is whole chunks: codes = x / scale to the nearest, scale = max|x| / 127. A block with
// NaN or an infinity has a scale of NaN.
float rounded(const float* x, int64_t n, int8_t* codes) {
  Floats largest{}, nothing{};
  for (int64_t i = 0; i < n; i += LANES) {
    const Floats some = load<Floats>(x + i), size = some < 0 ? -some : some;
    largest = size > largest ? size : largest;
    nothing += some * 0;
  }
  float top = 0;
  for (int lane = 0; lane < LANES; lane++) top = std::max(top, largest[lane]);
  const float scale = top / HIGHEST + sum(nothing), divisor = scale > 0 ? scale : 1;
  if (std::isnan(scale)) {
    std::fill(codes, codes + n, int8_t(0));
    return scale;
  }
  for (int64_t i = 0; i < n; i += CHUNK) {
    Sums whole[PARTS];
    for (int k = 0; k < PARTS; k++) {
      Floats scaled = load<Floats>(x + i + k * LANES) / divisor;
      scaled = scaled > HIGHEST ? Floats{} + HIGHEST : scaled < -HIGHEST ? Floats{} - HIGHEST : scaled;
      const Floats moved = scaled + 12582912.f;  // 1.5 · 2²³: adding it leaves a whole number in the last bits
      whole[k] = load<Sums>(&moved);
    }
    lowest_bytes(whole, codes + i);
  }
  return scale;
}

void arrange_q8(const Weight& w, const float* x, int64_t rows, int64_t stride, CodedRows& to) {
  const bool sums_needed = w.zero || w.shift != 0;
  const int64_t groups = w.in / w.group, within = up(w.group, w.block), padded = up(w.group, CHUNK) * CHUNK;
  to.blocks = groups * within;
  to.width = groups * padded;
  to.numbers.assign(padded, 0.f);
  to.codes.resize(rows * to.width);
  to.scales.resize(rows * to.blocks);
  to.sums.resize(rows * to.blocks);
  to.totals.assign(sums_needed ? rows * groups : 0, 0.f);
  int64_t block = 0;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t group = 0; group < groups; group++) {
      std::memcpy(to.numbers.data(), x + row * stride + group * w.group, w.group * sizeof(float));
      for (int64_t begin = 0; begin < w.group; begin += w.block, block++) {
        const int64_t wide = up(std::min(w.block, w.group - begin), CHUNK) * CHUNK;
        int8_t* codes = to.codes.data() + row * to.width + group * padded + begin;
        to.scales[block] = rounded(to.numbers.data() + begin, wide, codes);
        int32_t all = 0;
        for (int64_t i = 0; i < wide; i++) all += codes[i];
        to.sums[block] = all;
        if (sums_needed) to.totals[row * groups + group] += float(all) * to.scales[block];
      }
    }
}

// -- what the processor has ------------------------------------------------------------------------------------------

typedef int16_t Halves __attribute__((vector_size(32)));

inline Codes four(const int8_t* q) {  // four inputs, for each output
  int32_t bits;
  std::memcpy(&bits, q, sizeof bits);
  return (Codes)(Sums{} + bits);
}

// What bytes are multiplied less: VNNI takes them unsigned, the others nibbles as they lie.
template <Kind KIND>
constexpr int lies_above(int centre) {
#ifdef WITHOUT_VNNI
  return KIND == NIBBLES ? centre : 0;
#else
  return KIND == NIBBLES ? centre : 128;
#endif
}

// whole[r] += a chunk of 8 outputs times that of row r, rows `width` apart
template <Kind KIND, int R>
inline void dot_abreast(const uint8_t* w, const int8_t* q, int64_t width, Sums (&whole)[R]) {
  constexpr int VECTORS = KIND == NIBBLES ? 4 : 8;
#if defined(WITHOUT_VNNI) && defined(__AVX2__)
  const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
  __m256i pairs[R];  // of nibbles: sums of 16 products of at most 15 · 127 each fit into 16 bits
  for (int r = 0; KIND == NIBBLES && r < R; r++) pairs[r] = _mm256_setzero_si256();
  for (int v = 0; v < VECTORS; v++) {
    const __m256i some = _mm256_loadu_si256((const __m256i*)(w + CHUNK * v));
    if (KIND == NIBBLES) {
      const __m256i lower = _mm256_and_si256(some, low), upper = _mm256_and_si256(_mm256_srli_epi16(some, 4), low);
      for (int r = 0; r < R; r++) {
        const __m256i a = _mm256_maddubs_epi16(lower, (__m256i)four(q + r * width + 4 * v));
        const __m256i b = _mm256_maddubs_epi16(upper, (__m256i)four(q + r * width + 16 + 4 * v));
        pairs[r] = _mm256_add_epi16(pairs[r], _mm256_add_epi16(a, b));
      }
    } else {
      const __m256i size = _mm256_abs_epi8(some);  // |w| · (q with the sign of w)
      for (int r = 0; r < R; r++) {
        const __m256i signs = _mm256_sign_epi8((__m256i)four(q + r * width + 4 * v), some);
        whole[r] += (Sums)_mm256_madd_epi16(_mm256_maddubs_epi16(size, signs), ones);
      }
    }
  }
  for (int r = 0; KIND == NIBBLES && r < R; r++) whole[r] += (Sums)_mm256_madd_epi16(pairs[r], ones);
#else
  for (int v = 0; v < VECTORS; v++) {
    const Codes some = load<Codes>(w + CHUNK * v);
    if (KIND == NIBBLES) {
      const Codes lower = some & 15, upper = (Codes)((Halves)some >> 4) & 15;
      for (int r = 0; r < R; r++) {
        whole[r] = dot_unsigned(whole[r], lower, four(q + r * width + 4 * v));
        whole[r] = dot_unsigned(whole[r], upper, four(q + r * width + 16 + 4 * v));
      }
    } else {
      for (int r = 0; r < R; r++) {
        const Codes row = four(q + r * width + 4 * v);
#ifdef WITHOUT_VNNI
        whole[r] = dot_signed(whole[r], some, row);
#else
        whole[r] = dot_unsigned(whole[r], some ^ int8_t(-128), row);
#endif
      }
    }
  }
#endif
}

inline Floats eight(const void* from, bool halves, int64_t start) {
  if (!halves) return load<Floats>((const float*)from + start);
#ifdef __F16C__
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)((const uint16_t*)from + start)));
#else
  Floats numbers;
  for (int i = 0; i < LANES; i++) numbers[i] = half(((const uint16_t*)from)[start + i]);
  return numbers;
#endif
}

// R rows times outputs `first` to first + 7 -> y [R, 8], its rows `stride` apart; those beyond the last are left out.
template <Kind KIND, int R>
void product_abreast(const Weight& w, const CodedRows& x, int64_t row, int64_t first, Ahead& ahead, float* y,
                     int64_t stride) {
  constexpr int BYTES = ABREAST * BYTES_OF_CHUNK<KIND>;
  const int64_t groups = w.in / w.group, blocks = x.blocks, width = x.width;
  const int64_t start = first * groups;  // of its scales
  const uint8_t* codes = w.codes + first / ABREAST * (width / CHUNK) * BYTES;
  const int8_t* q = x.codes.data() + row * width;
  const float* of_block = x.scales.data() + row * blocks;
  const int32_t* sums = x.sums.data() + row * blocks;
  const int above = lies_above<KIND>(int(w.centre));
  const int64_t step = BYTES / ahead.passes;
  const char* next = ahead.next;
  Floats totals[R] = {};
  for (int64_t group = 0; group < groups; group++) {
    const Floats scale = eight(w.scale, w.halves, start + group * ABREAST);
    for (int64_t begin = 0; begin < w.group; begin += w.block, of_block++, sums++) {
      Sums whole[R];
      for (int r = 0; r < R; r++) whole[r] = above ? Sums{} - above * sums[r * blocks] : Sums{};
      const int64_t end = std::min(w.block, w.group - begin);
      for (int64_t i = 0; i < end; i += CHUNK, codes += BYTES, q += CHUNK) {
        fetch<BYTES>(next, step);
        dot_abreast<KIND, R>(codes, q, width, whole);
      }
      for (int r = 0; r < R; r++)
        totals[r] += __builtin_convertvector(whole[r], Floats) * of_block[r * blocks] * scale;
    }
    if (!w.zero && w.shift == 0) continue;
    const Floats zero = (w.zero ? eight(w.zero, w.halves, start + group * ABREAST) : Floats{}) + scale * w.shift;
    for (int r = 0; r < R; r++) totals[r] += zero * x.totals[(row + r) * groups + group];
  }
  ahead.next = next;
  const int64_t outputs = std::min(ABREAST, w.out - first);
  for (int r = 0; r < R; r++) std::memcpy(y + r * stride, &totals[r], outputs * sizeof(float));
}

template <Kind KIND>
void tile_q8(const Weight& w, const CodedRows& x, int64_t row, int64_t together, int64_t first, Ahead& ahead, float* y,
             int64_t stride) {
  switch (together) {
    case 1: return product_abreast<KIND, 1>(w, x, row, first, ahead, y, stride);
    case 2: return product_abreast<KIND, 2>(w, x, row, first, ahead, y, stride);
    case 3: return product_abreast<KIND, 3>(w, x, row, first, ahead, y, stride);
    case 4: return product_abreast<KIND, 4>(w, x, row, first, ahead, y, stride);
    case 5: return product_abreast<KIND, 5>(w, x, row, first, ahead, y, stride);
    default: return product_abreast<KIND, 6>(w, x, row, first, ahead, y, stride);
  }
}

}  // namespace
