// Attention of a step's queries over keys and values in blocks, read through each sequence's table; called by
// paged_blocks.py, which says what the arguments are.
//
// One item of work is one sequence and its key-value heads, each with the G query heads that share it. The tokens pass
// in tiles. Softmax is kept online (Milakov & Gimelshein, arXiv 1805.02867): the largest score so far, the sum of the
// weights and the weighted sum of the values, all three rescaled when a larger score comes. No key is copied, and
// nothing is padded but the last tile. The blocks lie anywhere, so the processor cannot foresee what comes next: while a
// tile is computed the next one is fetched, a share with each query (measured: 13 ms where it took 20).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int TILE = 16;      // tokens
constexpr int64_t LINE = 16;  // floats of a cache line
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

template <int N>
struct Lanes {
  typedef float Type __attribute__((vector_size(N * sizeof(float))));
};
template <int N>
using Vector = typename Lanes<N>::Type;

template <int N>
inline Vector<N> load(const float* from) {
  Vector<N> loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return loaded;
}

template <int N>
inline float sum(Vector<N> x) {
  if constexpr (N == 2) {
    return x[0] + x[1];
  } else {
    Vector<N / 2> halves[2];
    std::memcpy(halves, &x, sizeof halves);
    return sum<N / 2>(halves[0] + halves[1]);
  }
}

// e^x for x <= 0 as 2^n · e^r with |r| <= ln(2) / 2: the bits of 2^n, and a polynomial for e^r (relative error < 3e-7).
inline Vector<TILE> exponential(Vector<TILE> x) {
  typedef int32_t Bits __attribute__((vector_size(TILE * sizeof(int32_t))));
  const float rounding = 12582912.f;  // 1.5 · 2^23: adding it leaves a whole number in the last bits
  x = x < -87.f ? Vector<TILE>{} - 87.f : x;
  const Vector<TILE> shifted = x * 1.44269504f + rounding, n = shifted - rounding;
  const Vector<TILE> r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vector<TILE> e = r * 1.3888889e-3f + 8.3333333e-3f;
  e = e * r + 4.1666667e-2f;
  e = e * r + 0.16666667f;
  e = e * r + 0.5f;
  e = e * r + 1.f;
  e = e * r + 1.f;
  Bits bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127) << 23;
  Vector<TILE> power;
  std::memcpy(&power, &bits, sizeof power);
  return e * power;
}

// The places of the tokens that a query sees, in their order: the sinks, then from `first` on.
struct Places {
  const int32_t* table;
  int64_t block_size, sinks, first, count;

  int64_t operator[](int64_t index) const {
    const int64_t at = index < sinks ? index : index - sinks + first;
    return table[at / block_size] * block_size + at % block_size;
  }
};

// The keys or values of some heads side by side, at each place.
struct Rows {
  const float* start;
  int64_t stride;

  const float* operator[](int64_t place) const { return start + place * stride; }
};

// A head of PARTS · LANES values.
template <int LANES, int PARTS>
struct Head {
  static constexpr int64_t SIZE = LANES * PARTS;

  static void score(const float* q, const float* const* keys, int64_t within, float scale, float* scores) {
    Vector<LANES> query[PARTS];
    for (int part = 0; part < PARTS; part++) query[part] = load<LANES>(q + part * LANES) * scale;
    for (int t = 0; t < TILE; t += 4) {
      Vector<LANES> dots[4] = {};
      for (int part = 0; part < PARTS; part++)
        for (int i = 0; i < 4; i++) dots[i] += query[part] * load<LANES>(keys[t + i] + within + part * LANES);
      for (int i = 0; i < 4; i++) scores[t + i] = sum<LANES>(dots[i]);
    }
  }

  // mixed · keep + Σ weight · value
  static void mix(const float* weights, const float* const* values, int64_t within, int count, float keep, float* mixed) {
    Vector<LANES> sums[PARTS];
    for (int part = 0; part < PARTS; part++) sums[part] = load<LANES>(mixed + part * LANES) * keep;
    for (int t = 0; t < count; t++)
      for (int part = 0; part < PARTS; part++) sums[part] += weights[t] * load<LANES>(values[t] + within + part * LANES);
    std::memcpy(mixed, sums, sizeof sums);
  }

  // One query [heads, G, SIZE] over the places it sees -> out [heads, G, SIZE]. The heads of a place lie side by side
  // and are read together. top, total: room for heads · G numbers each.
  static void attend(const float* q, int64_t heads, int64_t group, Rows keys, Rows values, const Places& places,
                     float scale, float* out, float* top, float* total) {
    const int64_t queries = heads * group;
    std::fill(top, top + queries, LOWEST);
    std::fill(total, total + queries, 0.f);
    std::fill(out, out + queries * SIZE, 0.f);
    for (int64_t start = 0; start < places.count; start += TILE) {
      const int count = std::min<int64_t>(TILE, places.count - start);
      const float *key[TILE], *value[TILE], *next_key[TILE], *next_value[TILE];
      for (int t = 0; t < TILE; t++) {
        const int64_t place = places[start + std::min(t, count - 1)];
        const int64_t next = places[std::min(start + TILE + t, places.count - 1)];
        key[t] = keys[place];
        value[t] = values[place];
        next_key[t] = keys[next];
        next_value[t] = values[next];
      }
      for (int64_t i = 0; i < queries; i++) {
        for (int64_t d = i * LINE; d < heads * SIZE; d += queries * LINE)  // its share of the next tile, into L2
          for (int t = 0; t < TILE; t++) {
            __builtin_prefetch(next_key[t] + d, 0, 2);
            __builtin_prefetch(next_value[t] + d, 0, 2);
          }
        alignas(64) float weights[TILE];
        const int64_t within = i / group * SIZE;
        score(q + i * SIZE, key, within, scale, weights);
        std::fill(weights + count, weights + TILE, LOWEST);
        const float largest = std::max(top[i], *std::max_element(weights, weights + count));
        const Vector<TILE> raised = exponential(load<TILE>(weights) - largest);
        std::memcpy(weights, &raised, sizeof raised);
        const float keep = std::exp(top[i] - largest);
        for (int t = count; t < TILE; t++) weights[t] = 0;
        total[i] = total[i] * keep + sum<TILE>(load<TILE>(weights));
        top[i] = largest;
        mix(weights, value, within, count, keep, out + i * SIZE);
      }
    }
    for (int64_t i = 0; i < queries; i++)
      for (int64_t d = 0; d < SIZE; d++) out[i * SIZE + d] /= total[i];
  }
};

using Attend = void (*)(const float*, int64_t, int64_t, Rows, Rows, const Places&, float, float*, float*, float*);

Attend attend_for(int64_t size) {
  switch (size) {
    case 8: return Head<8, 1>::attend;
    case 16: return Head<16, 1>::attend;
    case 24: return Head<8, 3>::attend;
    case 32: return Head<16, 2>::attend;
    case 48: return Head<16, 3>::attend;
    case 64: return Head<16, 4>::attend;
    case 80: return Head<16, 5>::attend;
    case 96: return Head<16, 6>::attend;
    case 128: return Head<16, 8>::attend;
    case 256: return Head<16, 16>::attend;
    default: return nullptr;
  }
}

}  // namespace

extern "C" {

struct Step {
  const int32_t *tables, *lengths, *query_starts;  // query_starts null: one new token each
  int64_t sequences, table_width, kv_heads, group, size, block_size;
};

struct Layer {
  const float *q, *keys, *values;
  float* out;
  int64_t q_stride, key_stride, value_stride, window, sinks;  // strides in floats; window 0: none
  float scale;
};

int has_size(int64_t size) { return attend_for(size) != nullptr; }

void attend(const Step* step, const Layer* layer, int64_t threads) {
  const Attend attend_one = attend_for(step->size);
  // all heads of a sequence are one item, unless there are too few sequences for the threads
  const int64_t heads = step->sequences < 2 * threads ? 1 : step->kv_heads;
  const int64_t queries = heads * step->group, items = step->kv_heads / heads;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> sums(2 * queries);
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (int64_t i = 0; i < step->sequences; i++)
      for (int64_t item = 0; item < items; item++) {
        const int64_t begin = step->query_starts ? step->query_starts[i] : i;
        const int64_t end = step->query_starts ? step->query_starts[i + 1] : i + 1;
        for (int64_t row = begin; row < end; row++) {
          const int64_t length = step->lengths[i] - (end - 1 - row);
          const int64_t first = layer->window ? std::max<int64_t>(0, length - layer->window) : 0;
          const int64_t sinks = std::min(first, layer->sinks);
          const Places places{step->tables + i * step->table_width, step->block_size, sinks, first,
                              length - first + sinks};
          attend_one(layer->q + row * layer->q_stride + item * queries * step->size, heads, step->group,
                     Rows{layer->keys + item * heads * step->size, layer->key_stride},
                     Rows{layer->values + item * heads * step->size, layer->value_stride}, places, layer->scale,
                     layer->out + (row * items + item) * queries * step->size, sums.data(), sums.data() + queries);
        }
      }
  }
}

}  // extern "C"
