// Keys and values in codes with a scale (and zero) of each token and head, in blocks: what `workbench.kv.paged_store.Codes`
// keeps. A new token is quantized when it comes, and read like those before it.
//
//   int8, int4   low = min x, high = max x; zero = low rounded down to float16, scale = (high − zero) / highest rounded up
//                code = (x − zero) / scale to the nearest, ties to even, from 0 to highest
//   fp8 (e4m3)   scale = max |x| / 448 rounded up; code = x / scale to the nearest
//
// The same operations in the same order as `workbench.quantization.formats` (`fit`, `encode`), so the same codes. Of int4
// the first half of a row lies in the lower halves of its bytes.
#pragma once
#include "coded_keys.h"
#include "floats.h"

namespace coded {

struct Rounded {  // keys, or values, of all layers [layers, places, heads, …]
  uint8_t* codes;          // [… bytes of a row]
  uint16_t *scale, *zero;  // float16 […]; zero may be null
};

struct Blocks {
  Rounded keys, values;
  int64_t format, places, block_size;
  int64_t bytes;  // of the cache, which are counted here when they are read
};

inline uint16_t to_half(float x) {
  uint16_t bits;
  put<FLOAT16>(x, (char*)&bits);
  return bits;
}

// The least number of float16 that is not below x.
inline uint16_t half_above(float x) {
  const uint16_t near = to_half(x);
  if (!(half(near) < x)) return near;
  return near & 0x8000 ? near - 1 : near + 1;
}

// |x| <= 448 to e4m3, ties to even.
inline uint8_t to_e4m3(float x) {
  const uint32_t bits = load<uint32_t>(&x), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
  if (size < 0x3c800000) return sign | uint8_t(std::nearbyint(std::fabs(x) * 512));  // below 2^-6: a multiple of 2^-9
  return sign | uint8_t((size - (120u << 23) + 0x7ffff + (size >> 20 & 1)) >> 20);
}

// x / step as a code; what is no number becomes 0, as there.
inline float steps(float x, float step) {
  const float count = x / (step != 0 ? step : 1);
  return std::isnan(count) ? 0 : count;
}

// A row [size] -> its codes, scale and zero, the `index`th of all.
inline void quantize_row(const float* x, int64_t size, int64_t format, const Rounded& to, int64_t index) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), highest = format == INT8 ? 255 : format == INT4 ? 15 : 448;
  float low = x[0], high = x[0];
  for (int64_t i = 0; i < size; i++) {
    low = std::min(low, x[i]);
    high = std::max(high, x[i]);
  }
  for (int64_t i = 0; i < size; i++)
    if (std::isnan(x[i])) low = high = nan;
  const uint16_t zero = half_above(-low) ^ 0x8000;
  const float from = to.zero ? half(zero) : 0, reach = to.zero ? high - from : std::max(-low, high);
  float scale = reach / highest;
  if (reach > 0) scale = std::max(scale, std::numeric_limits<float>::min());
  uint16_t stored = half_above(scale);
  if (!std::isfinite(half(stored)) || !std::isfinite(from)) stored = to_half(nan);
  to.scale[index] = stored;
  if (to.zero) to.zero[index] = zero;
  const float step = half(stored);
  const auto code = [&](int64_t i) {
    return uint8_t(std::min(std::max(std::nearbyint(steps(x[i] - from, step)), 0.f), highest));
  };
  uint8_t* codes = to.codes + index * (format == INT4 ? size / 2 : size);
  for (int64_t i = 0; format == INT8 && i < size; i++) codes[i] = code(i);
  for (int64_t i = 0; format == INT4 && i < size / 2; i++) codes[i] = code(i) | code(size / 2 + i) << 4;
  for (int64_t i = 0; format == FP8 && i < size; i++)
    codes[i] = to_e4m3(std::min(std::max(steps(x[i], step), -highest), highest));
}

// Scales, or zeros, of tokens `stride` apart -> [TILE], zeros behind the last.
inline void read_apart(const uint16_t* from, int64_t stride, int count, float* to) {
  uint16_t bits[TILE] = {};
  for (int t = 0; t < count; t++) bits[t] = from[t * stride];
  read_scales(bits, true, 0, TILE, to);
}

// Up to TILE tokens side by side, the first at `place` of a layer and at `position` in its sequence. `shifts` of the room
// [Q]: the sum of each query's numbers.
inline void attend_tile(Item& item, const Blocks& blocks, int64_t layer, int64_t place, int count, int64_t position) {
  const int64_t size = item.layer.keys.size, heads = item.layer.heads, half_size = size / 2;
  const int64_t row = blocks.format == INT4 ? half_size : size, index = (layer * blocks.places + place) * heads + item.head;
  const uint8_t *keys = blocks.keys.codes + index * row, *values = blocks.values.codes + index * row;
  const bool has_zero = blocks.keys.zero;
  float of_keys[2 * TILE], of_values[2 * TILE];  // scales, then zeros
  read_apart(blocks.keys.scale + index, heads, count, of_keys);
  read_apart(blocks.values.scale + index, heads, count, of_values);
  for (int t = 0; blocks.format == FP8 && t < count; t++) of_keys[t] *= OF_E4M3, of_values[t] *= OF_E4M3;
  if (has_zero) {
    read_apart(blocks.keys.zero + index, heads, count, of_keys + TILE);
    read_apart(blocks.values.zero + index, heads, count, of_values + TILE);
  }
  const float* q = item.room.q.data();
  float *scores = item.room.scores.data(), *uppers = item.room.scaled.data();
  switch (blocks.format) {
    case INT8: item.score_tile<BYTES>(keys, heads * row, count, size, q, scores); break;
    case FP8: item.score_tile<E4M3>(keys, heads * row, count, size, q, scores); break;
    default:
      item.score_tile<LOWER>(keys, heads * row, count, half_size, q, scores);
      item.score_tile<UPPER>(keys, heads * row, count, half_size, q + half_size, uppers);
      for (int64_t i = 0; i < item.queries; i++)
        for (int t = 0; t < count; t++) scores[i * TILE + t] += uppers[i * TILE + t];
  }
  for (int64_t i = 0; i < item.queries; i++) {
    float* some = scores + i * TILE;
    for (int t = 0; t < count; t++) some[t] = some[t] * of_keys[t] + (has_zero ? item.room.shifts[i] * of_keys[TILE + t] : 0);
    item.weigh(i, position, count, some, of_values, has_zero ? of_values + TILE : nullptr,
               item.room.weights.data() + i * TILE);
  }
  switch (blocks.format) {
    case INT8: item.mix_tile<BYTES>(values, heads * row, count, size, item.out); break;
    case FP8: item.mix_tile<E4M3>(values, heads * row, count, size, item.out); break;
    default:
      item.mix_tile<LOWER>(values, heads * row, count, half_size, item.out);
      item.mix_tile<UPPER>(values, heads * row, count, half_size, item.out + half_size);
  }
  item.bytes += count * 2 * (row + int64_t(sizeof(uint16_t)) * (1 + has_zero));
}

}  // namespace coded
