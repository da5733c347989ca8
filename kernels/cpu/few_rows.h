// What products of a few rows with any weights have in common: a weight is read once for as many rows as there are
// registers for their sums, and memory is read ahead meanwhile.
#pragma once
#include "chunks.h"

#include <algorithm>
#include <type_traits>

namespace {

constexpr int TILE = 4;          // outputs that are computed one after the other for the same rows
constexpr int64_t ABREAST = 8;   // outputs that a thread has at least
constexpr int64_t TOGETHER = 6;  // rows that are multiplied at once with a weight
constexpr int64_t BLOCK_BYTES = 12 << 10;  // of weights that stay in the cache while rows pass
constexpr int64_t AHEAD_BYTES = 32 << 10;  // so far ahead weights are fetched that all rows pass at once

inline int64_t up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// How many of the rows that are left come together: about as many each time.
inline int64_t next_rows(int64_t left) {
  return left <= TOGETHER ? left : left < 2 * TOGETHER ? (left + 1) / 2 : TOGETHER;
}

// How often a weight is read for so many rows.
inline int64_t passes_of(int64_t rows) { return up(rows, TOGETHER); }

// What comes from memory while some outputs are multiplied: the weights of the next ones, a part in each pass of rows.
struct Ahead {
  const char* next;
  int64_t passes;
};

// While so many bytes of weights are read; memory gives 64 at a time.
template <int BYTES>
inline void fetch(const char*& next, int64_t step) {
  for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(next + line, 0, 2);
  next += step;
}

// Of so many outputs a thread's first one.
inline int64_t first_output(int64_t out, int64_t thread, int64_t threads) {
  return std::min(out, up(out, ABREAST) * thread / threads * ABREAST);
}

// Outputs `first` to end − 1 of all rows, a block after the other: tile(row, rows, output, ahead), at most ABREAST
// outputs from that one on. An output's weights begin at where(output). next: what is read after the last of them, or
// null.
template <typename Where, typename Tile>
void in_blocks(int64_t first, int64_t end, int64_t rows, Where where, const char* next, Tile tile) {
  const int64_t bytes = where(ABREAST) - where(0);  // none where there are no inputs
  const int64_t outputs = ABREAST * up(BLOCK_BYTES, std::max<int64_t>(1, bytes));
  Ahead ahead{nullptr, passes_of(rows)};
  for (int64_t block = first; block < end; block += outputs) {
    ahead.next = ahead.passes == 1 ? where(block) + AHEAD_BYTES : where(block + outputs);
    if (next && block + outputs >= end) ahead.next = next;
    for (int64_t row = 0, some; row < rows; row += some) {
      some = next_rows(rows - row);
      for (int64_t out = block; out < std::min(end, block + outputs); out += ABREAST) tile(row, some, out, ahead);
    }
  }
}

// A value stays in its register. Otherwise the compiler reads it from memory again for each product that takes it, and
// reading, not multiplying, takes the time.
inline Floats kept(Floats x) {
#ifdef __AVX2__
  asm("" : "+v"(x));
#endif
  return x;
}

// sums[r][o] += input(r) · weight(o). What there are fewer of stays in registers while the others pass.
template <int R, int O, typename Weight, typename Input>
inline void multiply_some(Weight weight, Input input, Floats (&sums)[R][O]) {
  if constexpr (O <= R) {
    Floats weights[O];
    for (int o = 0; o < O; o++) weights[o] = kept(weight(o));
    for (int r = 0; r < R; r++) {
      const Floats some = kept(input(r));
      for (int o = 0; o < O; o++) sums[r][o] += weights[o] * some;
    }
  } else {
    Floats inputs[R];
    for (int r = 0; r < R; r++) inputs[r] = kept(input(r));
    for (int o = 0; o < O; o++) {
      const Floats some = R == 1 ? weight(o) : kept(weight(o));
      for (int r = 0; r < R; r++) sums[r][o] += some * inputs[r];
    }
  }
}

// Eight vectors -> the sum of each, added up as `sum` does.
inline Floats sums_of(const Floats* v) {
#ifdef __AVX2__
  const auto halves = [&](int i) {  // the lower half of one and of the next but three, plus their upper halves
    const __m256 a = (__m256)v[i], b = (__m256)v[i + 4];
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  };
  const auto pairs = [](__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
  };
  return (Floats)pairs(pairs(halves(0), halves(1)), pairs(halves(2), halves(3)));
#else
  Floats sums;
  for (int i = 0; i < LANES; i++) sums[i] = sum(v[i]);
  return sums;
#endif
}

template <int NUMBER>
using Count = std::integral_constant<int, NUMBER>;

// y [R, outputs], its rows `stride` apart, of a tile: product(R, O, first, sums [R, O]) of O of its outputs at a time.
template <int R, int O, typename Product>
inline void rows_of_tile(Product product, int64_t outputs, float* y, int64_t stride) {
  Floats all[R + R % 2][TILE];  // two rows are added up together
  for (int o = 0; R % 2 && o < TILE; o++) all[R + R % 2 - 1][o] = Floats{};
  for (int first = 0; first < TILE; first += O) {
    Floats sums[R][O];
    product(Count<R>{}, Count<O>{}, first, sums);
    for (int r = 0; r < R; r++)
      for (int o = 0; o < O; o++) all[r][first + o] = sums[r][o];
  }
  for (int r = 0; r < R; r += 2) {
    const Floats sums = sums_of(all[r]);
    for (int row = r; row < std::min(R, r + 2); row++)
      std::memcpy(y + row * stride, (const float*)&sums + (row - r) * TILE, outputs * sizeof(float));
  }
}

// The same of `together` rows. As many outputs at a time as there are registers for.
template <typename Product>
void few_rows(int64_t together, Product product, int64_t outputs, float* y, int64_t stride) {
  switch (together) {
    case 1: return rows_of_tile<1, 4>(product, outputs, y, stride);
    case 2: return rows_of_tile<2, 4>(product, outputs, y, stride);
    case 3: return rows_of_tile<3, 4>(product, outputs, y, stride);
    case 4: return rows_of_tile<4, 2>(product, outputs, y, stride);
    case 5: return rows_of_tile<5, 2>(product, outputs, y, stride);
    default: return rows_of_tile<6, 2>(product, outputs, y, stride);
  }
}

}  // namespace
