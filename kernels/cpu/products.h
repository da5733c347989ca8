// Products of a few rows with weights in 8 or 4 bits, each code read once; for codes.cpp and step.cpp. Inputs are as they
// are: a code becomes a float32 in a register and is multiplied there. (With inputs in 8 bits: products_q8.h.)
//
// Codes come in chunks of 32: 32 bytes, or 16 bytes with code i in the lower and code 16 + i in the upper half. The sums
// of a group stay in 8 lanes, are scaled there, and only at the end of a row are the lanes added up. What depends on the
// inputs alone (their order, their sums) is computed once a call.
#pragma once
#include "chunks.h"

#include <algorithm>
#include <vector>

extern "C" {

struct Weight {
  const uint8_t* codes;
  const void *scale, *zero;  // [out, in/group], zero may be null
  int64_t out, in, group, block, kind, halves;
  int64_t centre;  // of nibbles: what a code is taken less
  float shift;     // x̂ = scale · (centred code + shift) + zero
};

}  // extern "C"

namespace {

constexpr int TILE = 4;         // outputs that are computed together
// Bytes of codes, fetched so far ahead. Codes are a few short rows at a time, which the processor follows too late: from
// memory this reads half as many again in the same time (measured), and in the cache it costs nothing.
constexpr int AHEAD = 8192;

constexpr int64_t TOGETHER = 6;  // rows that are multiplied at once with a weight: their sums stay in registers

// How many of the rows that are left come together: about as many each time.
inline int64_t next_rows(int64_t left) {
  return left <= TOGETHER ? left : left < 2 * TOGETHER ? (left + 1) / 2 : TOGETHER;
}

template <Kind KIND>
inline void fetch(const uint8_t* row, int64_t chunk) {
  __builtin_prefetch(at<KIND>(row, chunk) + AHEAD, 0, 2);
}

inline int64_t up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Rows as the loops read them: padded to whole chunks, within a block in the order of a chunk's codes.
struct Rows {
  int64_t width;               // numbers of a row
  std::vector<float> numbers;  // [rows, width]
  std::vector<float> totals;   // Σx of each group [rows, groups], where the weight has zeros
  // The weight's last rows, padded, as many as have less than a chunk behind them: whole chunks are read. Behind another
  // row that is none lies the next, whose codes meet zeros.
  std::vector<uint8_t> last;
  int64_t lasting = 0;  // how many
};

// One block of x, n numbers, in the order of its codes; behind them zeros up to whole chunks.
template <Kind KIND>
void ordered(const float* x, int64_t n, float* to) {
  if constexpr (KIND != NIBBLES) {
    std::memcpy(to, x, n * sizeof(float));
    std::fill(to + n, to + up(n, CHUNK) * CHUNK, 0.f);
    return;
  }
  for (int64_t start = 0; start < n / 2; start += 16, to += CHUNK) {
    const float *lower = x + start, *upper = lower + n / 2;
    for (int i = 0; i < 16; i++) {
      const int place = LANES * (i % 4) + i / 4;  // `widen` has byte i there
      to[place] = lower[i];
      to[place + 4] = upper[i];
    }
  }
}

// What is added to the codes that are multiplied: x̂ = scale · (code + added) + zero.
template <Kind KIND>
float added(const Weight& w) {
  return KIND == NIBBLES ? w.shift - float(w.centre) : w.shift;
}

template <Kind KIND>
void arrange(const Weight& w, const float* x, int64_t rows, int64_t stride, Rows& to) {
  const bool sums_needed = w.zero || added<KIND>(w) != 0;
  const int64_t groups = w.in / w.group, padded = up(w.group, CHUNK) * CHUNK;
  to.width = groups * padded;
  to.numbers.resize(rows * to.width);
  to.totals.assign(sums_needed ? rows * groups : 0, 0.f);
  to.lasting = w.in % CHUNK ? std::min(w.out, up(CHUNK, w.in)) : 0;
  to.last.assign(to.lasting * to.width, 0);
  for (int64_t row = 0; row < to.lasting; row++)
    std::memcpy(to.last.data() + row * to.width, w.codes + (w.out - to.lasting + row) * w.in, w.in);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t group = 0; group < groups; group++)
      for (int64_t begin = 0; begin < w.group; begin += w.block) {
        const int64_t n = std::min(w.block, w.group - begin), wide = up(n, CHUNK) * CHUNK;
        float* numbers = to.numbers.data() + row * to.width + group * padded + begin;
        ordered<KIND>(x + row * stride + group * w.group + begin, n, numbers);
        if (!sums_needed) continue;
        Floats total{};
        for (int64_t i = 0; i < wide; i += LANES) total += load<Floats>(numbers + i);
        to.totals[row * groups + group] += sum(total);
      }
}

// R rows times O outputs: `w` has the codes of each output, `scales` their scales [O, groups]. -> y [R, O]
// One row is scaled a group at a time; with several the codes are, which is once for all rows and takes fewer registers.
template <Kind KIND, int R, int O>
void product(const Weight& weight, const Rows& x, int64_t row, const uint8_t* const* w, const float* scales,
                        float (*y)[O]) {
  const int64_t groups = weight.in / weight.group, chunks = up(weight.group, CHUNK);
  const float* numbers = x.numbers.data() + row * x.width;
  Floats totals[R][O] = {};
  int64_t chunk = 0;
  for (int64_t group = 0; group < groups; group++) {
    Floats sums[O] = {};
    const int64_t end = chunk + chunks;
    do {
      for (int o = 0; o < O; o++) {
        Floats wide[PARTS];
        fetch<KIND>(w[o], chunk);
        widen<KIND>(at<KIND>(w[o], chunk), wide);
        for (int i = 0; i < PARTS; i++) {
          const float* some = numbers + chunk * CHUNK + i * LANES;
          if constexpr (R == 1) {
            sums[o] += wide[i] * load<Floats>(some);
          } else {
            const Floats scaled = wide[i] * scales[o * groups + group];
            for (int r = 0; r < R; r++) totals[r][o] += scaled * load<Floats>(some + r * x.width);
          }
        }
      }
    } while (++chunk < end);
    for (int o = 0; R == 1 && o < O; o++) totals[0][o] += sums[o] * scales[o * groups + group];
  }
  for (int r = 0; r < R; r++)
    for (int o = 0; o < O; o++) y[r][o] = sum(totals[r][o]);
}

float dot_floats(const float* a, const float* b, int64_t n) {
  Floats sums{};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) sums += load<Floats>(a + i) * load<Floats>(b + i);
  float total = sum(sums);
  for (; i < n; i++) total += a[i] * b[i];
  return total;
}

// R rows times the outputs of a tile, O at a time.
template <Kind KIND, int R, int O>
void few_rows(const Weight& w, const Rows& x, int64_t row, const uint8_t* const* codes, const float* scales,
              const float* zeros, int64_t outputs, float* y, int64_t stride) {
  const int64_t groups = w.in / w.group;
  for (int64_t o = 0; o < outputs; o += O) {
    float part[R][O];
    product<KIND, R, O>(w, x, row, codes + o, scales + o * groups, part);
    for (int r = 0; r < R; r++)
      for (int64_t i = 0; i < std::min<int64_t>(O, outputs - o); i++) {
        float& to = y[r * stride + o + i];
        to = part[r][i];
        if (zeros) to += dot_floats(zeros + (o + i) * groups, x.totals.data() + (row + r) * groups, groups);
      }
  }
}

// Outputs `first` to first + TILE − 1 of some rows, `together` of them, from `row` on -> y [together, TILE], its rows
// `stride` apart. room: [2, TILE, groups] floats.
template <Kind KIND>
void tile(const Weight& w, const Rows& x, int64_t row, int64_t together, int64_t first, float* room, float* y,
          int64_t stride) {
  const int64_t groups = w.in / w.group, outputs = std::min<int64_t>(TILE, w.out - first);
  const float shift = added<KIND>(w);
  float *scales = room, *zeros = w.zero || shift != 0 ? room + TILE * groups : nullptr;
  const uint8_t* codes[TILE];
  for (int o = 0; o < TILE; o++) {  // outputs that are missing are the last one again
    const int64_t out = first + std::min<int64_t>(o, outputs - 1);
    const int64_t last = out - (w.out - x.lasting);
    codes[o] = last >= 0 ? x.last.data() + last * x.width : w.codes + out * (KIND == NIBBLES ? w.in / 2 : w.in);
    read_scales(w.scale, w.halves, out * groups, groups, scales + o * groups);
    if (!zeros) continue;
    float* zero = zeros + o * groups;
    if (w.zero)
      read_scales(w.zero, w.halves, out * groups, groups, zero);
    else
      std::fill(zero, zero + groups, 0.f);
    for (int64_t i = 0; i < groups; i++) zero[i] += shift * scales[o * groups + i];
  }
  switch (together) {
    case 1: return few_rows<KIND, 1, 4>(w, x, row, codes, scales, zeros, outputs, y, stride);
    case 2: return few_rows<KIND, 2, 2>(w, x, row, codes, scales, zeros, outputs, y, stride);
    case 3: return few_rows<KIND, 3, 2>(w, x, row, codes, scales, zeros, outputs, y, stride);
    case 4: return few_rows<KIND, 4, 2>(w, x, row, codes, scales, zeros, outputs, y, stride);
    case 5: return few_rows<KIND, 5, 2>(w, x, row, codes, scales, zeros, outputs, y, stride);
    default: return few_rows<KIND, 6, 2>(w, x, row, codes, scales, zeros, outputs, y, stride);
  }
}

}  // namespace
