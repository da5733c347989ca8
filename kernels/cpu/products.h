// Products of a few rows with weights in 8 or 4 bits, each code read once; for codes.cpp and step.cpp. Inputs are as they
// are: a code becomes a float32 in a register and is multiplied there. (With inputs in 8 bits: products_q8.h.)
//
// Codes come in chunks of 32: 32 bytes, or 16 bytes with code i in the lower and code 16 + i in the upper half. The sums
// of a group stay in 8 lanes, are scaled there, and only at the end of a row are the lanes added up. What depends on the
// inputs alone (their order, their sums) is computed once a call.
#pragma once
#include "few_rows.h"

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

// Rows as the loops read them: padded to whole chunks, within a block in the order of a chunk's codes.
struct Rows {
  int64_t width;               // numbers of a row
  std::vector<float> numbers;  // [rows, width]
  std::vector<float> totals;   // Σx of each group [rows, padded groups], where the weight has zeros
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
      const int place = LANES * (i % 4) + i / 4;  // `widened` has byte i there
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

// Groups, with as many behind them as make whole vectors.
inline int64_t padded_groups(const Weight& w) { return up(w.in / w.group, LANES) * LANES; }

// Floats that a tile needs besides: its scales and zeros [2, TILE, padded groups].
inline int64_t room_of(const Weight& w) { return 2 * TILE * padded_groups(w); }

template <Kind KIND>
void arrange(const Weight& w, const float* x, int64_t rows, int64_t stride, Rows& to) {
  const bool sums_needed = w.zero || added<KIND>(w) != 0;
  const int64_t groups = w.in / w.group, padded = up(w.group, CHUNK) * CHUNK, totals = padded_groups(w);
  to.width = groups * padded;
  to.numbers.resize(rows * to.width);
  to.totals.assign(sums_needed ? rows * totals : 0, 0.f);
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
        to.totals[row * totals + group] += sum(total);
      }
}

// R rows times O outputs: `w` has the codes of each output, `scales` and `zeros` theirs [O, padded groups]; zeros may be
// null. -> vectors whose lanes add up to y [R, O]. One row is scaled a group at a time; with several the codes are, which
// is once for all rows and takes fewer registers.
template <Kind KIND, int R, int O>
void product(const Weight& weight, const Rows& x, int64_t row, const uint8_t* const* w, const float* scales,
             const float* zeros, Ahead& ahead, Floats (&totals)[R][O]) {
  constexpr int BYTES = O * BYTES_OF_CHUNK<KIND>;
  const int64_t groups = weight.in / weight.group, chunks = up(weight.group, CHUNK), padded = padded_groups(weight);
  const int64_t step = BYTES / ahead.passes;
  const float* numbers = x.numbers.data() + row * x.width;
  const char* next = ahead.next;
  Floats some[R][O] = {};
  int64_t chunk = 0;
  for (int64_t group = 0; group < groups; group++) {
    Floats sums[2][O] = {};  // of one row; two that are independent hide how long an addition takes
    const int64_t end = chunk + chunks;
    do {
      fetch<BYTES>(next, step);
      for (int k = 0; k < PARTS; k++) {
        const float* part = numbers + chunk * CHUNK + k * LANES;
        const auto weights = [&](int o) { return widened<KIND>(at<KIND>(w[o], chunk), k); };
        if constexpr (R == 1) {
          const Floats inputs = kept(load<Floats>(part));
          for (int o = 0; o < O; o++) sums[k % 2][o] += weights(o) * inputs;
        } else {
          multiply_some<R, O>([&](int o) { return weights(o) * scales[o * padded + group]; },
                              [&](int r) { return load<Floats>(part + r * x.width); }, some);
        }
      }
    } while (++chunk < end);
    for (int o = 0; R == 1 && o < O; o++) some[0][o] += (sums[0][o] + sums[1][o]) * scales[o * padded + group];
  }
  const float* of_groups = x.totals.data() + row * padded;
  for (int64_t group = 0; zeros && group < groups; group += LANES)
    multiply_some<R, O>([&](int o) { return load<Floats>(zeros + o * padded + group); },
                        [&](int r) { return load<Floats>(of_groups + r * padded + group); }, some);
  ahead.next = next;
  std::memcpy(totals, some, sizeof some);
}

// Outputs `first` to first + TILE − 1 of some rows, `together` of them, from `row` on -> y [together, TILE], its rows
// `stride` apart. room: as `room_of` says.
template <Kind KIND>
void tile(const Weight& w, const Rows& x, int64_t row, int64_t together, int64_t first, Ahead& ahead, float* room, float* y,
          int64_t stride) {
  const int64_t groups = w.in / w.group, padded = padded_groups(w), outputs = std::min<int64_t>(TILE, w.out - first);
  const float shift = added<KIND>(w);
  float *scales = room, *zeros = w.zero || shift != 0 ? room + TILE * padded : nullptr;
  const uint8_t* codes[TILE];
  for (int o = 0; o < TILE; o++) {  // outputs that are missing are the last one again
    const int64_t out = first + std::min<int64_t>(o, outputs - 1);
    const int64_t last = out - (w.out - x.lasting);
    codes[o] = last >= 0 ? x.last.data() + last * x.width : w.codes + out * (KIND == NIBBLES ? w.in / 2 : w.in);
    float* scale = scales + o * padded;
    read_scales(w.scale, w.halves, out * groups, groups, scale);
    if (!zeros) continue;
    float* zero = zeros + o * padded;
    std::fill(zero, zero + padded, 0.f);
    if (w.zero) read_scales(w.zero, w.halves, out * groups, groups, zero);
    for (int64_t i = 0; i < groups; i++) zero[i] += shift * scale[i];
  }
  few_rows(
      together,
      [&](auto rows, auto abreast, int o, auto& sums) {
        product<KIND, decltype(rows)::value, decltype(abreast)::value>(w, x, row, codes + o, scales + o * padded,
                                                                       zeros ? zeros + o * padded : nullptr, ahead, sums);
      },
      outputs, y, stride);
}

}  // namespace
