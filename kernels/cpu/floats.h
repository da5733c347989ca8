// Products of a few rows with weights that are numbers: float32, bfloat16 or float16, each read once. Inputs and sums are
// float32.
#pragma once
#include "few_rows.h"

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

// Fewer than LANES, zeros behind them.
template <Type TYPE>
inline Floats wide_part(const char* from, int64_t count) {
  char some[LANES * sizeof(float)] = {};
  std::memcpy(some, from, count * BYTES_OF_TYPE[TYPE]);
  return wide<TYPE>(some);
}

// R rows of x, `stride` apart, times O rows of the weight -> vectors whose lanes add up to y [R, O]
template <Type TYPE, int R, int O>
void float_product(const char* const* weight, const float* x, int64_t stride, int64_t in, Ahead& ahead,
                   Floats (&totals)[R][O]) {
  constexpr int64_t SIZE = BYTES_OF_TYPE[TYPE], BYTES = O * LANES * SIZE;
  constexpr int PARTS = R * O <= 4 ? 2 : 1;  // sums that are independent hide how long an addition takes
  const int64_t step = PARTS * BYTES / ahead.passes;
  const char *next = ahead.next, *w[O];
  for (int o = 0; o < O; o++) w[o] = weight[o];
  Floats sums[PARTS][R][O] = {};
  int64_t i = 0;
  for (; i + PARTS * LANES <= in; i += PARTS * LANES) {
    fetch<PARTS * BYTES>(next, step);
    for (int k = 0; k < PARTS; k++)
      multiply_some<R, O>([&](int o) { return wide<TYPE>(w[o] + (i + k * LANES) * SIZE); },
                          [&](int r) { return load<Floats>(x + r * stride + i + k * LANES); }, sums[k]);
  }
  for (; i < in; i += LANES) {
    const int64_t count = std::min<int64_t>(LANES, in - i);
    multiply_some<R, O>([&](int o) { return wide_part<TYPE>(w[o] + i * SIZE, count); },
                        [&](int r) { return wide_part<FLOAT32>((const char*)(x + r * stride + i), count); }, sums[0]);
  }
  ahead.next = next;
  for (int r = 0; r < R; r++)
    for (int o = 0; o < O; o++) totals[r][o] = PARTS == 2 ? sums[0][r][o] + sums[1][r][o] : sums[0][r][o];
}

// Outputs `first` to first + TILE − 1 of some rows of x, `together` of them, `stride` apart -> y [together, TILE], its
// rows `y_stride` apart.
template <Type TYPE>
void float_tile(const char* weight, int64_t out, int64_t in, const float* x, int64_t together, int64_t stride,
                int64_t first, Ahead& ahead, float* y, int64_t y_stride) {
  const char* w[TILE];
  const int64_t outputs = std::min<int64_t>(TILE, out - first);
  for (int o = 0; o < TILE; o++)  // outputs that are missing are the last one again
    w[o] = weight + (first + std::min<int64_t>(o, outputs - 1)) * in * BYTES_OF_TYPE[TYPE];
  few_rows(
      together,
      [&](auto rows, auto abreast, int o, auto& sums) {
        float_product<TYPE, decltype(rows)::value, decltype(abreast)::value>(w + o, x, stride, in, ahead, sums);
      },
      outputs, y, y_stride);
}

}  // namespace
