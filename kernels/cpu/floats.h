// Products of a few rows with weights that are numbers: float32, bfloat16 or float16, each read once. Inputs and sums are
// float32.
#pragma once
#include "chunks.h"

#include <algorithm>

namespace {

enum Type { FLOAT32, BFLOAT16, FLOAT16 };

constexpr int64_t BYTES_OF_TYPE[] = {4, 2, 2};

template <Type TYPE>
inline Floats wide(const char* from) {
  if constexpr (TYPE == FLOAT32) return load<Floats>(from);
#if defined(__AVX2__) && defined(__F16C__)
  const __m128i some = _mm_loadu_si128((const __m128i*)from);
  if constexpr (TYPE == FLOAT16) return (Floats)_mm256_cvtph_ps(some);
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(some), 16);
#else
  Floats numbers;
  for (int i = 0; i < LANES; i++) {
    const uint16_t bits = load<uint16_t>(from + 2 * i);
    const uint32_t upper = uint32_t(bits) << 16;
    numbers[i] = TYPE == FLOAT16 ? half(bits) : load<float>(&upper);
  }
  return numbers;
#endif
}

template <Type TYPE>
inline float number(const char* from) {
  if constexpr (TYPE == FLOAT32) return load<float>(from);
  const uint16_t bits = load<uint16_t>(from);
  if constexpr (TYPE == FLOAT16) return half(bits);
  const uint32_t upper = uint32_t(bits) << 16;
  return load<float>(&upper);
}

// To the nearest, ties to even, as torch rounds.
template <Type TYPE>
inline void put(float number, char* to) {
  if constexpr (TYPE == FLOAT32) {
    std::memcpy(to, &number, sizeof number);
    return;
  }
  uint32_t bits = load<uint32_t>(&number);
  uint16_t rounded;
  if constexpr (TYPE == BFLOAT16) {
    rounded = std::isnan(number) ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  } else {
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) {
      rounded = sign | 0x7e00;
    } else if (size >= 0x477ff000) {  // 65,520 and more
      rounded = sign | 0x7c00;
    } else if (size < 0x38800000) {  // below 2^-14: a multiple of 2^-24
      rounded = sign | uint16_t(std::nearbyint(std::fabs(number) * 0x1p24f));
    } else {
      rounded = sign | uint16_t((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
    }
  }
  std::memcpy(to, &rounded, sizeof rounded);
}

// R rows of x, `stride` apart, times O rows of the weight -> y [R, O]
template <Type TYPE, int R, int O>
inline void float_product(const char* const* w, const float* x, int64_t stride, int64_t in, float (*y)[O]) {
  constexpr int64_t SIZE = BYTES_OF_TYPE[TYPE];
  const int64_t ahead = std::max<int64_t>(8192, 4 * in * SIZE);  // bytes: in the next four rows, or further
  constexpr int TWICE = R * O <= 4 ? 2 : 1;  // sums that are independent hide how long an addition takes
  Floats sums[TWICE][R][O] = {};
  int64_t i = 0;
  for (; i + TWICE * LANES <= in; i += TWICE * LANES)
    for (int part = 0; part < TWICE; part++) {
      const int64_t at = i + part * LANES;
      for (int o = 0; o < O; o++) {
        if (part == 0) __builtin_prefetch(w[o] + at * SIZE + ahead, 0, 2);
        const Floats weight = wide<TYPE>(w[o] + at * SIZE);
        for (int r = 0; r < R; r++) sums[part][r][o] += weight * load<Floats>(x + r * stride + at);
      }
    }
  for (int r = 0; r < R; r++)
    for (int o = 0; o < O; o++) {
      if (TWICE == 2) sums[0][r][o] += sums[1][r][o];
      float total = sum(sums[0][r][o]);
      for (int64_t rest = i; rest < in; rest++) total += number<TYPE>(w[o] + rest * SIZE) * x[r * stride + rest];
      y[r][o] = total;
    }
}

// R rows times the outputs of a tile, O at a time.
template <Type TYPE, int R, int O>
void few_float_rows(const char* const* w, const float* x, int64_t stride, int64_t in, int64_t outputs, float* y,
                    int64_t y_stride) {
  for (int64_t o = 0; o < outputs; o += O) {
    float part[R][O];
    float_product<TYPE, R, O>(w + o, x, stride, in, part);
    for (int r = 0; r < R; r++)
      for (int64_t i = 0; i < std::min<int64_t>(O, outputs - o); i++) y[r * y_stride + o + i] = part[r][i];
  }
}

// Outputs `first` to first + 3 of some rows of x, `together` of them -> y [together, 4], its rows `y_stride` apart.
template <Type TYPE>
void float_tile(const char* weight, int64_t out, int64_t in, const float* x, int64_t together, int64_t stride,
                int64_t first, float* y, int64_t y_stride) {
  const char* w[4];
  const int64_t outputs = std::min<int64_t>(4, out - first);
  for (int o = 0; o < 4; o++)  // outputs that are missing are the last one again
    w[o] = weight + (first + std::min<int64_t>(o, outputs - 1)) * in * BYTES_OF_TYPE[TYPE];
  switch (together) {
    case 1: return few_float_rows<TYPE, 1, 4>(w, x, stride, in, outputs, y, y_stride);
    case 2: return few_float_rows<TYPE, 2, 2>(w, x, stride, in, outputs, y, y_stride);
    case 3: return few_float_rows<TYPE, 3, 2>(w, x, stride, in, outputs, y, y_stride);
    case 4: return few_float_rows<TYPE, 4, 2>(w, x, stride, in, outputs, y, y_stride);
    case 5: return few_float_rows<TYPE, 5, 2>(w, x, stride, in, outputs, y, y_stride);
    default: return few_float_rows<TYPE, 6, 2>(w, x, stride, in, outputs, y, y_stride);
  }
}

}  // namespace
