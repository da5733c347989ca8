// Attention of a few new tokens over keys and values that are kept in codes: what the loop over a cache in codes
// (coded_attention.cpp) and a step as one function (step.cpp) both do.
//
// A key is s_d · code_d + z_d, its scales and zeros of a channel and a group of tokens. So a group's scales go into the
// query once, q'_d = q_d · s_d, and every token's score is Σ q'_d · code_d + Σ q_d · z_d. A value's scale and zero are
// of its token and go into the weight: Σ w_t · s_t · code_td + Σ w_t · z_t. A code becomes a float in a register, is
// multiplied with the queries of its group of heads, and is never written.
//
// Softmax is kept online (Milakov & Gimelshein, arXiv 1805.02867), a tile of tokens at a time.
#pragma once
#include "chunks.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace coded {

struct Side {                    // the keys, or the values, of one layer [slots, H_kv, …]
  const uint8_t* codes;          // [… places, rows of a group, size]
  const uint16_t *scale, *zero;  // float16: of keys [… places, size], of values [… places, group]; zero may be null
  float* recent;                 // [… recent places, size]
  int64_t size;
};

struct Layer {
  Side keys, values;
  int64_t heads, shared;  // key-value heads, and query heads that share one
  int64_t group, places, recent_places, format;
  int64_t window, sinks;  // window 0: none
  float scale;
};

struct Run {  // tokens side by side, the first of them at `position` in the sequence
  int64_t place, skip, tokens, position;  // from the group at `place` on, after `skip` tokens; −1: the recent part
};

struct Sequence {
  int64_t slot, past;       // tokens before the new ones
  int64_t first_row, rows;  // of the batch: the new ones
  int64_t first_run, runs;  // what they see of the others
  int64_t keep_at;          // where in the recent part the new ones are to be kept; −1: nowhere yet
};

struct Rows {  // the new tokens' keys or values [rows, H_kv, size], strides in floats
  const float* start;
  int64_t row, head;
};

// A cache in codes as a step as one function reads it, all layers of it.
struct Cache {
  const Layer* layers;                  // by their places
  const Sequence* sequences[2];         // as layers without a window see them, and those with one
  const Run* runs[2];
  float *keys, *values;                 // [layers, rows, H_kv, size] of the new tokens
  int64_t rows;                         // of the whole batch
  int64_t bytes;                        // of the cache, which are counted here when they are read
};

constexpr int TILE = 32;        // tokens
constexpr int TOGETHER = 4;     // queries that a code is multiplied with while it is in a register
constexpr float OF_E4M3 = 256;  // its numbers as `widen` has them are so many times less
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

enum Format { INT8, FP8, INT4 };
enum Form { BYTES, E4M3, LOWER, UPPER, FLOATS };  // of the numbers of a row: two forms for int4, a half of a byte each

template <Form FORM>
constexpr int64_t BYTES_OF = FORM == FLOATS ? sizeof(float) : 1;

inline int64_t up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// 8 numbers of a row. The bits of e4m3 are moved to where float16 has them, whose exponent has another bias.
template <Form FORM>
inline Floats widen(const uint8_t* from) {
  if constexpr (FORM == FLOATS) return load<Floats>(from);
#if defined(__AVX2__) && defined(__F16C__)
  __m128i some = _mm_loadl_epi64((const __m128i*)from);
  if constexpr (FORM == E4M3) {
    const __m128i moved = _mm_slli_epi16(_mm_cvtepi8_epi16(some), 7);
    return (Floats)_mm256_cvtph_ps(_mm_and_si128(moved, _mm_set1_epi16(int16_t(~(1 << 14)))));
  }
  if constexpr (FORM == UPPER) some = _mm_srli_epi16(some, 4);
  if constexpr (FORM == LOWER || FORM == UPPER) some = _mm_and_si128(some, _mm_set1_epi8(15));
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(some));
#else
  Floats wide;
  for (int i = 0; i < LANES; i++) {
    if (FORM == E4M3) wide[i] = half(uint16_t(int16_t(int8_t(from[i])) * 128) & 0xbfff);
    if (FORM == BYTES) wide[i] = from[i];
    if (FORM == LOWER) wide[i] = from[i] & 15;
    if (FORM == UPPER) wide[i] = from[i] >> 4;
  }
  return wide;
#endif
}

// The last `count` numbers of a row, zeros behind them.
template <Form FORM>
inline Floats widen_rest(const uint8_t* from, int64_t count) {
  uint8_t rest[LANES * sizeof(float)] = {};
  std::memcpy(rest, from, count * BYTES_OF<FORM>);
  return widen<FORM>(rest);
}

// -- a tile: scores of its keys, and its values with their weights ----------------------------------------------------

template <Form FORM, int R, int T>
inline void dots(const uint8_t* rows, int64_t stride, int64_t size, const float* q, int64_t width, float* scores) {
  Floats sums[R][T] = {};
  int64_t d = 0;
  for (; d + LANES <= size; d += LANES)
    for (int t = 0; t < T; t++) {
      const Floats key = widen<FORM>(rows + t * stride + d * BYTES_OF<FORM>);
      for (int r = 0; r < R; r++) sums[r][t] += key * load<Floats>(q + r * width + d);
    }
  for (int t = 0; d < size && t < T; t++) {
    const Floats key = widen_rest<FORM>(rows + t * stride + d * BYTES_OF<FORM>, size - d);
    for (int r = 0; r < R; r++) sums[r][t] += key * load<Floats>(q + r * width + d);
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) scores[r * TILE + t] = sum(sums[r][t]);
}

// q [R, width] -> scores [R, TILE]
template <Form FORM, int R>
void score(const uint8_t* rows, int64_t stride, int count, int64_t size, const float* q, int64_t width, float* scores) {
  constexpr int T = R == 1 ? 4 : 2;
  int t = 0;
  for (; t + T <= count; t += T) dots<FORM, R, T>(rows + t * stride, stride, size, q, width, scores + t);
  for (; t < count; t++) dots<FORM, R, 1>(rows + t * stride, stride, size, q, width, scores + t);
}

// P · 8 channels from d on; REST: the last ones, fewer than 8.
template <Form FORM, int R, int P, bool REST>
inline void add(const uint8_t* rows, int64_t stride, int count, int64_t size, int64_t d, const float* weights,
                float* out, int64_t width) {
  Floats sums[R][P];
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) sums[r][p] = load<Floats>(out + r * width + d + p * LANES);
  for (int t = 0; t < count; t++)
    for (int p = 0; p < P; p++) {
      const uint8_t* from = rows + t * stride + (d + p * LANES) * BYTES_OF<FORM>;
      const Floats value = REST ? widen_rest<FORM>(from, size - d) : widen<FORM>(from);
      for (int r = 0; r < R; r++) sums[r][p] += value * weights[r * TILE + t];
    }
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) std::memcpy(out + r * width + d + p * LANES, &sums[r][p], sizeof(Floats));
}

// weights [R, TILE] -> out [R, width] + Σ weight · value
template <Form FORM, int R>
void mix(const uint8_t* rows, int64_t stride, int count, int64_t size, const float* weights, float* out,
         int64_t width) {
  constexpr int P = R == 1 ? 8 : R == 2 ? 4 : 2, STEP = P * LANES;
  int64_t d = 0;
  for (; d + STEP <= size; d += STEP) add<FORM, R, P, false>(rows, stride, count, size, d, weights, out, width);
  for (; d + LANES <= size; d += LANES) add<FORM, R, 1, false>(rows, stride, count, size, d, weights, out, width);
  if (d < size) add<FORM, R, 1, true>(rows, stride, count, size, d, weights, out, width);
}

// Groups that a sequence reads from, as often as a run of its does.
inline int64_t groups_of(const Sequence& sequence, const Run* runs, int64_t group) {
  int64_t groups = 0;
  for (const Run* run = runs + sequence.first_run; run < runs + sequence.first_run + sequence.runs; run++)
    if (run->place >= 0) groups += up(run->skip + run->tokens, group);
  return groups;
}

// -- an item: a head, and some of the tokens --------------------------------------------------------------------------

struct Room {  // of one item, in floats; Q queries, `wide` is a key and `wide_value` a value, up to whole lanes
  int64_t wide, wide_value;
  std::vector<float> q, scaled, shifts, weights, scales, scores;

  void fit(const Layer& layer, int64_t queries) {
    wide = up(layer.keys.size, LANES) * LANES;
    wide_value = up(layer.values.size, LANES) * LANES;
    q.assign(queries * wide, 0.f);
    scaled.assign(queries * std::max<int64_t>(wide, TILE), 0.f);
    shifts.resize(queries);
    weights.resize(queries * TILE);
    scores.resize(queries * TILE);
    scales.resize(2 * std::max<int64_t>(wide, TILE));
  }
};

struct Item {
  const Layer& layer;
  const Sequence& sequence;
  int64_t head, queries;  // rows · query heads of this one
  Room& room;
  float *top, *total, *out;  // [Q], [Q], [Q, wide_value]
  int64_t bytes = 0;         // of the cache that were read
  int64_t done = 0;          // new tokens before those of these rows

  int64_t at(int64_t place, int64_t places) const { return (sequence.slot * layer.heads + head) * places + place; }

  void start(const float* q, int64_t q_stride) {
    clear();
    for (int64_t i = 0; i < queries; i++) {
      const float* from = q + i / layer.shared * q_stride + (head * layer.shared + i % layer.shared) * layer.keys.size;
      for (int64_t d = 0; d < layer.keys.size; d++) room.q[i * room.wide + d] = from[d] * layer.scale;
    }
  }

  void clear() {
    std::fill(top, top + queries, LOWEST);
    std::fill(total, total + queries, 0.f);
    std::fill(out, out + queries * room.wide_value, 0.f);
  }

  // Scores of tokens that a row must not see become LOWEST; how many are left.
  int hide(int64_t row, int64_t position, int count, float* scores) const {
    const int64_t last = sequence.past + done + row, low = layer.window ? last - layer.window + 1 : 0;
    if (position + count - 1 <= last && (position >= low || position + count <= layer.sinks)) return count;
    int seen = 0;
    for (int t = 0; t < count; t++) {
      const int64_t here = position + t;
      const bool sees = here <= last && (here >= low || here < layer.sinks);
      if (!sees) scores[t] = LOWEST;
      seen += sees;
    }
    return seen;
  }

  // Scores of a tile [TILE] -> its weights; the sums so far are rescaled where a larger score comes. scale, zero: of
  // the values, null for those that are floats.
  void weigh(int64_t i, int64_t position, int count, float* scores, const float* scale, const float* zero,
             float* weights) {
    std::fill(weights, weights + TILE, 0.f);
    if (!hide(i / layer.shared, position, count, scores)) return;
    std::fill(scores + count, scores + TILE, LOWEST);
    Floats most = load<Floats>(scores);
    for (int t = LANES; t < TILE; t += LANES) {
      const Floats some = load<Floats>(scores + t);
      most = some > most ? some : most;
    }
    float largest = top[i];
    for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, most[lane]);
    float* mixed = out + i * room.wide_value;
    if (largest != top[i]) {
      const float keep = std::exp(top[i] - largest);
      total[i] *= keep;
      for (int64_t d = 0; d < room.wide_value; d++) mixed[d] *= keep;
      top[i] = largest;
    }
    Floats sums{}, shift{};
    for (int t = 0; t < up(count, LANES) * LANES; t += LANES) {
      Floats raised = exponential(load<Floats>(scores + t) - largest);
      sums += raised;
      if (zero) shift += raised * load<Floats>(zero + t);
      if (scale) raised *= load<Floats>(scale + t);
      std::memcpy(weights + t, &raised, sizeof raised);
    }
    total[i] += sum(sums);
    if (!zero) return;
    const float added = sum(shift);
    for (int64_t d = 0; d < layer.values.size; d++) mixed[d] += added;
  }

  // q [Q, wide] times a tile's keys -> `scores` of the room [Q, TILE]
  template <Form FORM>
  void score_tile(const uint8_t* keys, int64_t stride, int count, int64_t size, const float* q, float* scores) const {
    for (int64_t i = 0; i < queries; i += TOGETHER) {
      const float* some = q + i * room.wide;
      float* to = scores + i * TILE;
      switch (std::min<int64_t>(TOGETHER, queries - i)) {
        case 1: score<FORM, 1>(keys, stride, count, size, some, room.wide, to); break;
        case 2: score<FORM, 2>(keys, stride, count, size, some, room.wide, to); break;
        case 3: score<FORM, 3>(keys, stride, count, size, some, room.wide, to); break;
        default: score<FORM, 4>(keys, stride, count, size, some, room.wide, to);
      }
    }
  }

  // `weights` of the room [Q, TILE] times a tile's values, to `mixed`, rows of wide_value
  template <Form FORM>
  void mix_tile(const uint8_t* values, int64_t stride, int count, int64_t size, float* mixed) const {
    for (int64_t i = 0; i < queries; i += TOGETHER) {
      const float* some = room.weights.data() + i * TILE;
      float* to = mixed + i * room.wide_value;
      switch (std::min<int64_t>(TOGETHER, queries - i)) {
        case 1: mix<FORM, 1>(values, stride, count, size, some, to, room.wide_value); break;
        case 2: mix<FORM, 2>(values, stride, count, size, some, to, room.wide_value); break;
        case 3: mix<FORM, 3>(values, stride, count, size, some, to, room.wide_value); break;
        default: mix<FORM, 4>(values, stride, count, size, some, to, room.wide_value);
      }
    }
  }

  // One tile whose keys and values have this form. q [Q, wide]; shifts [Q], scale and zero [TILE] or null.
  template <Form FORM>
  void tile(const uint8_t* keys, int64_t key_stride, const uint8_t* values, int64_t value_stride, int count,
            int64_t position, const float* q, const float* shifts, const float* scale, const float* zero) {
    float* scores = room.scores.data();
    score_tile<FORM>(keys, key_stride, count, layer.keys.size, q, scores);
    for (int64_t i = 0; i < queries; i++) {
      for (int t = 0; shifts && t < count; t++) scores[i * TILE + t] += shifts[i];
      weigh(i, position, count, scores + i * TILE, scale, zero, room.weights.data() + i * TILE);
    }
    mix_tile<FORM>(values, value_stride, count, layer.values.size, out);
  }

  // Rows of floats: the recent part, and the new tokens.
  void floats(const float* keys, int64_t key_stride, const float* values, int64_t value_stride, int64_t tokens,
              int64_t position) {
    for (int64_t t = 0; t < tokens; t += TILE)
      tile<FLOATS>((const uint8_t*)(keys + t * key_stride), key_stride * sizeof(float),
                   (const uint8_t*)(values + t * value_stride), value_stride * sizeof(float),
                   std::min<int64_t>(TILE, tokens - t), position + t, room.q.data(), nullptr, nullptr, nullptr);
  }

  void recent(int64_t skip, int64_t tokens, int64_t position) {
    const int64_t key = layer.keys.size, value = layer.values.size, first = at(skip, layer.recent_places);
    floats(layer.keys.recent + first * key, key, layer.values.recent + first * value, value, tokens, position);
    bytes += tokens * (key + value) * sizeof(float);
  }

  // Tokens begin … end − 1 of a group whose codes have this form, their rows from `row` on.
  template <Form FORM>
  void codes(int64_t place, int64_t row, int64_t begin, int64_t end, int64_t position) {
    const Side &keys = layer.keys, &values = layer.values;
    const int64_t rows = FORM == LOWER || FORM == UPPER ? layer.group / 2 : layer.group;
    const int64_t group = at(place, layer.places);
    const float* shifts = keys.zero ? room.shifts.data() : nullptr;
    float *scale = room.scales.data(), *zero = values.zero ? scale + TILE : nullptr;
    for (int64_t t = begin; t < end; t += TILE, row += TILE, position += TILE) {
      const int count = std::min<int64_t>(TILE, end - t);
      std::fill(scale, scale + 2 * TILE, 0.f);
      read_scales(values.scale, true, group * layer.group + t, count, scale);
      if (FORM == E4M3)
        for (int i = 0; i < count; i++) scale[i] *= OF_E4M3;
      if (zero) read_scales(values.zero, true, group * layer.group + t, count, zero);
      const int64_t first = group * rows + row;
      tile<FORM>(keys.codes + first * keys.size, keys.size, values.codes + first * values.size, values.size, count,
                 position, room.scaled.data(), shifts, scale, zero);
    }
  }

  // A group's scales into the queries.
  void scale_queries(int64_t place) {
    const int64_t size = layer.keys.size, first = at(place, layer.places) * size;
    float *scale = room.scales.data(), *zero = scale + room.wide;
    read_scales(layer.keys.scale, true, first, size, scale);
    if (layer.format == FP8)
      for (int64_t d = 0; d < size; d++) scale[d] *= OF_E4M3;
    if (layer.keys.zero) read_scales(layer.keys.zero, true, first, size, zero);
    for (int64_t i = 0; i < queries; i++) {
      const float* q = room.q.data() + i * room.wide;
      float* to = room.scaled.data() + i * room.wide;
      for (int64_t d = 0; d < size; d++) to[d] = q[d] * scale[d];
      if (!layer.keys.zero) continue;
      Floats sums{};
      int64_t d = 0;
      for (; d + LANES <= size; d += LANES) sums += load<Floats>(q + d) * load<Floats>(zero + d);
      float shift = sum(sums);
      for (; d < size; d++) shift += q[d] * zero[d];
      room.shifts[i] = shift;
    }
  }

  void group(int64_t place, int64_t begin, int64_t end, int64_t position) {
    const int64_t half = layer.group / 2, of_scale = sizeof(uint16_t) * (layer.keys.zero ? 2 : 1);
    int64_t rows = end - begin;
    scale_queries(place);
    switch (layer.format) {
      case INT8: codes<BYTES>(place, begin, begin, end, position); break;
      case FP8: codes<E4M3>(place, begin, begin, end, position); break;
      default: {
        const int64_t low = std::min(end, half), high = std::max(begin, half);
        if (begin < low) codes<LOWER>(place, begin, begin, low, position);
        if (high < end) codes<UPPER>(place, high - half, high, end, position + high - begin);
        rows = std::min(rows, half);  // a row has a token in each half
      }
    }
    bytes += rows * (layer.keys.size + layer.values.size) + of_scale * (layer.keys.size + end - begin);
  }

  // Of the tokens before the new ones groups first … end − 1, counted over all runs; with the last of them the recent
  // part.
  void see(const Run* runs, int64_t first, int64_t end, bool is_last) {
    int64_t number = 0;
    for (int64_t i = 0; i < sequence.runs; i++) {
      const Run& run = runs[sequence.first_run + i];
      if (run.place < 0) {
        if (is_last) recent(run.skip, run.tokens, run.position);
        continue;
      }
      for (int64_t passed = 0; passed < run.tokens; number++) {
        const int64_t at = run.skip + passed, begin = at % layer.group;
        const int64_t count = std::min(layer.group - begin, run.tokens - passed);
        if (number >= first && number < end)
          group(run.place + at / layer.group, begin, begin + count, run.position + passed);
        passed += count;
      }
    }
  }

  // New rows to the recent part, where nobody reads them yet; not where a group is to leave it.
  void keep(const float* k, int64_t key_stride, const float* v, int64_t value_stride, int64_t rows) const {
    const int64_t key = layer.keys.size, value = layer.values.size;
    for (int64_t row = 0; sequence.keep_at >= 0 && row < rows; row++) {
      const int64_t to = at(sequence.keep_at + done + row, layer.recent_places);
      std::memcpy(layer.keys.recent + to * key, k + row * key_stride, key * sizeof(float));
      std::memcpy(layer.values.recent + to * value, v + row * value_stride, value * sizeof(float));
    }
  }
};

}  // namespace coded
