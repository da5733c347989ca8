// Products of a few rows with weights in 8 or 4 bits, each code read once; for codes.cpp and step.cpp.
//
//   exact   a code becomes a float32 in a register and is multiplied with the input as it is
//   q8      inputs are rounded to 8 bits, a scale a block; products are whole numbers, 32 codes in a few instructions
//           (the way of llama.cpp's q8_0 and q4_0)
//
// Codes come in chunks of 32: 32 bytes, or 16 bytes with code i in the lower and code 16 + i in the upper half. The sums
// of a block stay in 8 lanes, are scaled there, and only at the end of a row are the lanes added up. What depends on the
// inputs alone (their codes, scales and sums) is computed once a call.
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
constexpr float HIGHEST = 127;  // of an input's code
// Bytes of codes, fetched so far ahead. Codes are a few short rows at a time, which the processor follows too late: from
// memory this reads half as many again in the same time (measured), and in the cache it costs nothing.
constexpr int AHEAD = 8192;

template <Kind KIND>
inline void fetch(const uint8_t* row, int64_t chunk) {
  __builtin_prefetch(at<KIND>(row, chunk) + AHEAD, 0, 2);
}

inline int64_t up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Rows as the loops read them: padded to whole chunks, within a block in the order of a chunk's codes.
struct Rows {
  int64_t width, blocks;         // numbers and blocks of a row
  std::vector<float> numbers;    // exact: [rows, width]
  std::vector<int8_t> codes;     // q8: [rows, width] …
  std::vector<float> scales;     // … [rows, blocks] …
  std::vector<Sums> starts;      // … and −base · the sums of each lane [rows, blocks]
  std::vector<float> totals;     // Σx of each group [rows, groups], where the weight has zeros
  // The weight's last row, padded: whole chunks are read. Behind another row that is none lies the next, whose codes
  // meet zeros; behind the last nothing.
  std::vector<uint8_t> last;
};

// One block of x, n numbers, in the order of its codes; behind them zeros up to whole chunks.
template <Kind KIND, bool Q8>
void ordered(const float* x, int64_t n, float* to) {
  if constexpr (KIND != NIBBLES) {
    std::memcpy(to, x, n * sizeof(float));
    std::fill(to + n, to + up(n, CHUNK) * CHUNK, 0.f);
    return;
  }
  for (int64_t start = 0; start < n / 2; start += 16, to += CHUNK) {
    const float *lower = x + start, *upper = lower + n / 2;
    for (int i = 0; i < 16; i++) {
      const int place = Q8 ? i : LANES * (i % 4) + i / 4;  // `widen` has byte i there
      to[place] = lower[i];
      to[place + (Q8 ? 16 : 4)] = upper[i];
    }
  }
}

// What is added to the codes that are multiplied: x̂ = scale · (code + added) + zero.
template <Kind KIND, bool Q8>
float added(const Weight& w) {
  return KIND == NIBBLES && !Q8 ? w.shift - float(w.centre) : w.shift;
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
  const float rounding = 12582912.f;  // 1.5 · 2²³: adding it leaves a whole number in the last bits
  for (int64_t i = 0; i < n; i += LANES) {
    Floats scaled = load<Floats>(x + i) / divisor;
    scaled = scaled > HIGHEST ? Floats{} + HIGHEST : scaled < -HIGHEST ? Floats{} - HIGHEST : scaled;
    const Floats moved = scaled + rounding;
    const Sums whole = load<Sums>(&moved);
    for (int lane = 0; lane < LANES; lane++) codes[i + lane] = int8_t(whole[lane]);
  }
  return scale;
}

template <Kind KIND, bool Q8>
void arrange(const Weight& w, const float* x, int64_t rows, int64_t stride, Rows& to) {
  const bool sums_needed = w.zero || added<KIND, Q8>(w) != 0;
  const int64_t groups = w.in / w.group, within = up(w.group, w.block), padded = up(w.group, CHUNK) * CHUNK;
  to.blocks = groups * within;
  to.width = groups * padded;
  to.numbers.resize((Q8 ? 1 : rows) * to.width);
  if (Q8) {
    to.codes.resize(rows * to.width);
    to.scales.resize(rows * to.blocks);
    to.starts.resize(rows * to.blocks);
  }
  to.totals.assign(sums_needed ? rows * groups : 0, 0.f);
  to.last.clear();
  if (w.in % CHUNK) {
    to.last.resize(to.width);
    std::memcpy(to.last.data(), w.codes + (w.out - 1) * w.in, w.in);
  }
  for (int64_t row = 0; row < rows; row++)
    for (int64_t group = 0; group < groups; group++)
      for (int64_t part = 0; part < within; part++) {
        const int64_t begin = part * w.block, n = std::min(w.block, w.group - begin), wide = up(n, CHUNK) * CHUNK;
        const int64_t offset = group * padded + begin, block = row * to.blocks + group * within + part;
        float* numbers = to.numbers.data() + (Q8 ? 0 : row * to.width) + offset;
        ordered<KIND, Q8>(x + row * stride + group * w.group + begin, n, numbers);
        Floats total{};
        for (int64_t i = 0; sums_needed && !Q8 && i < wide; i += LANES) total += load<Floats>(numbers + i);
        if (Q8) {
          int8_t* codes = to.codes.data() + row * to.width + offset;
          to.scales[block] = rounded(numbers, wide, codes);
          Sums each{};
          const Codes ones = Codes{} + 1;
          for (int64_t i = 0; i < wide; i += CHUNK) each = dot_unsigned(each, ones, load<Codes>(codes + i));
          to.starts[block] = -base<KIND>(int(w.centre)) * each;
          int32_t all = 0;
          for (int lane = 0; lane < LANES; lane++) all += each[lane];
          total[0] = float(all) * to.scales[block];
        }
        if (sums_needed) to.totals[row * groups + group] += sum(total);
      }
}

// R rows times O outputs: `w` has the codes of each output, `scales` their scales [O, groups]. -> y [R, O]
// ONE: a block is a chunk, and a group a block.
template <Kind KIND, int R, int O, bool ONE>
void product_of_codes(const Weight& weight, const Rows& x, int64_t row, const uint8_t* const* w, const float* scales,
                      float (*y)[O]) {
  const int64_t groups = weight.in / weight.group, blocks = x.blocks, width = x.width;
  const int8_t* q = x.codes.data() + row * width;
  const float* of_block = x.scales.data() + row * blocks;
  const Sums* start = x.starts.data() + row * blocks;
  Floats totals[R][O] = {};
  int64_t chunk = 0;
  for (int64_t group = 0; group < groups; group++)
    for (int64_t begin = 0; begin < weight.group; begin += weight.block, of_block++, start++) {
      Sums whole[R][O];
      for (int r = 0; r < R; r++)
        for (int o = 0; o < O; o++) whole[r][o] = HAS_BASE<KIND> ? start[r * blocks] : Sums{};
      const int64_t end = ONE ? 0 : chunk + up(std::min(weight.block, weight.group - begin), CHUNK);
      do {
        for (int o = 0; o < O; o++) fetch<KIND>(w[o], chunk);
        for (int r = 0; r < R; r++) {
          const Codes of_row = load<Codes>(q + r * width + chunk * CHUNK);
          for (int o = 0; o < O; o++) whole[r][o] = dot<KIND>(whole[r][o], at<KIND>(w[o], chunk), of_row);
        }
        chunk++;
      } while (!ONE && chunk < end);
      for (int r = 0; r < R; r++)
        for (int o = 0; o < O; o++) {
          const Floats sums = __builtin_convertvector(whole[r][o], Floats) * of_block[r * blocks];
          totals[r][o] += sums * scales[o * groups + group];
        }
      if (ONE) begin = weight.group;
    }
  for (int r = 0; r < R; r++)
    for (int o = 0; o < O; o++) y[r][o] = sum(totals[r][o]);
}

// The same with inputs as they are. One row is scaled a group at a time; with several the codes are, which is once for
// all rows and takes fewer registers.
template <Kind KIND, int R, int O>
void product_of_numbers(const Weight& weight, const Rows& x, int64_t row, const uint8_t* const* w, const float* scales,
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
template <Kind KIND, int R, int O, bool Q8>
void few_rows(const Weight& w, const Rows& x, int64_t row, const uint8_t* const* codes, const float* scales,
              const float* zeros, int64_t outputs, float* y, int64_t stride) {
  const int64_t groups = w.in / w.group;
  for (int64_t o = 0; o < outputs; o += O) {
    float part[R][O];
    if (Q8 && w.group == CHUNK)
      product_of_codes<KIND, R, O, true>(w, x, row, codes + o, scales + o * groups, part);
    else if (Q8)
      product_of_codes<KIND, R, O, false>(w, x, row, codes + o, scales + o * groups, part);
    else
      product_of_numbers<KIND, R, O>(w, x, row, codes + o, scales + o * groups, part);
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
template <Kind KIND, bool Q8>
void tile(const Weight& w, const Rows& x, int64_t row, int64_t together, int64_t first, float* room, float* y,
          int64_t stride) {
  const int64_t groups = w.in / w.group, outputs = std::min<int64_t>(TILE, w.out - first);
  const float shift = added<KIND, Q8>(w);
  float *scales = room, *zeros = w.zero || shift != 0 ? room + TILE * groups : nullptr;
  const uint8_t* codes[TILE];
  for (int o = 0; o < TILE; o++) {  // outputs that are missing are the last one again
    const int64_t out = first + std::min<int64_t>(o, outputs - 1);
    const bool is_last = out == w.out - 1 && !x.last.empty();
    codes[o] = is_last ? x.last.data() : w.codes + out * (KIND == NIBBLES ? w.in / 2 : w.in);
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
    case 1: return few_rows<KIND, 1, 4, Q8>(w, x, row, codes, scales, zeros, outputs, y, stride);
    case 2: return few_rows<KIND, 2, 2, Q8>(w, x, row, codes, scales, zeros, outputs, y, stride);
    case 3: return few_rows<KIND, 3, 2, Q8>(w, x, row, codes, scales, zeros, outputs, y, stride);
    case 4: return few_rows<KIND, 4, 2, Q8>(w, x, row, codes, scales, zeros, outputs, y, stride);
    case 5: return few_rows<KIND, 5, 2, Q8>(w, x, row, codes, scales, zeros, outputs, y, stride);
    default: return few_rows<KIND, 6, 2, Q8>(w, x, row, codes, scales, zeros, outputs, y, stride);
  }
}

}  // namespace
