// A decode step of a few rows as one function: embedding, every layer with its attention over the cache, the last norm,
// the head and the choice; called by step.py, which says what the arguments are.
//
// All threads go through the same phases, and wait for each other after each:
//
//   project   norm of x; q, k, v                     a thread has some outputs of each matrix, for all rows
//   attend    q and k normed and turned; k and v     some key-value heads of the sequences; where threads would be left
//             into the cache; attention              over, a share of the keys each
//   mix       x += o · what attention gave           some outputs
//   feed      norm of x; gate and up; activation     some hidden units
//   return    x += down · hidden units               some outputs
//
// What a phase needs of a whole row (its norm, its codes in 8 bits, the shares of the keys put together) every thread
// computes for itself: for a few rows that takes less time than to wait for another.
#include <omp.h>

#include <limits>

#include "coded_blocks.h"
#include "coded_keys.h"
#include "floats.h"
#include "products_q8.h"

extern "C" {

enum CodesAre { CODES = 3, CODES_Q8 = 4 };  // multiplied with inputs as they are, or rounded to 8 bits

struct Matrix {         // y = (x / divisor) · Wᵀ + bias
  int64_t kind;         // a Type, CODES or CODES_Q8
  const char* numbers;  // [out, in]; null where there are codes
  Weight codes;
  int64_t out, in;
  const float *bias, *divisor;  // [out], [in]; may be null
};

struct Norm {
  int64_t kind;  // 0 none, 1 RMSNorm, 2 LayerNorm
  const float *weight, *bias;
  float eps;
};

struct Layer {
  Norm before_attention, of_q, of_k, after_attention, before_mlp, after_mlp;
  Matrix q, k, v, o, gate, up, down;
  int64_t owns_keys;  // else it attends over what stands at `place` already
  int64_t place;      // of its keys and values in the cache
  int64_t window;     // 0: it sees everything
  int64_t table;      // of cos and sin; −1: nothing turns
};

struct Model {
  int64_t width, heads, kv_heads, size, hidden, vocabulary, layers, sinks;
  int64_t gated, gelu;  // whether the feed-forward has a gate, and an activation of gelu (tanh) or silu
  float attention_scale, embedding_scale;
  int64_t type;                       // of the embeddings
  const char *embedding, *positions;  // [V, d], [positions, d]; the second may be null
  const Layer* layer;
  Norm last;
  Matrix head;
  Matrix of_given;  // of the hidden states that come with the rows, added to the embeddings; kind −1: none come
};

struct Stored {  // keys, or values; the strides in numbers
  char* start;
  int64_t layer, block, token, head;
};

struct Cache {
  Stored keys, values;
  int64_t type, block_size;
  coded::Cache* codes;    // where one of these is not null keys and values are there, and no numbers: in groups with
  coded::Blocks* blocks;  // their newest tokens whole, or in blocks
};

struct Tokens {
  int64_t rows, sequences, blocks;  // blocks of a sequence's table
  const int64_t *ids, *positions;   // [rows]
  const int64_t* starts;            // [sequences + 1] the first row of each
  const int32_t* tables;            // [sequences, blocks]
  const float* turns[2];            // [positions, 2, D] cos and signed sin
  int64_t wanted;
  const int64_t* wanted_rows;  // [wanted] that get logits
  // Of trees (null where all sequences are texts): [rows] which row of its sequence each follows, −1 for none, and
  // [sequences] how many of the first rows are a text.
  const int64_t *parents, *trunks;
  const float* given;  // [rows, d] hidden states, for a model that takes them
  float* states;       // [rows, d] gets what the rows are after the last norm; may be null
};

}  // extern "C"

namespace {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr int64_t LEAST_KEYS = 128;  // of a share; fewer are not worth putting together again
constexpr int64_t ALONE = 1 << 15;   // numbers of all rows, up to which one thread norms or gates them

struct Best {
  float top = LOWEST;
  int64_t token = 0;
  double total = 0;  // Σ e^(logit − top)
};

// What the threads share. A row of `shares` is the largest score, the sum of the weights, and what is mixed [D].
struct Shared {
  int64_t splits;
  std::vector<float> x, q, k, v, shares, added, hidden;
  std::vector<Best> best;  // [threads, wanted]
};

// What a thread has for itself, kept from call to call.
struct Own {
  std::vector<float> x, divided, scales, up, scores, query, part;
  std::vector<int64_t> branch;  // where the keys lie that a row of a tree sees beyond the text before it
  coded::Room room;
  Rows inputs;
  CodedRows coded_inputs;
};

float* sized(std::vector<float>& room, int64_t count) {
  if (int64_t(room.size()) < count) room.resize(count);
  return room.data();
}

// -- a row ---------------------------------------------------------------------------------------------------------

template <typename Function>
inline void by_type(int64_t type, Function function) {
  switch (type) {
    case FLOAT32: return function(std::integral_constant<Type, FLOAT32>{});
    case BFLOAT16: return function(std::integral_constant<Type, BFLOAT16>{});
    default: return function(std::integral_constant<Type, FLOAT16>{});
  }
}

template <typename Function>
inline void by_kind(int64_t kind, Function function) {
  switch (kind) {
    case SIGNED: return function(std::integral_constant<Kind, SIGNED>{});
    case UNSIGNED: return function(std::integral_constant<Kind, UNSIGNED>{});
    default: return function(std::integral_constant<Kind, NIBBLES>{});
  }
}

template <typename Function>  // of 8 numbers at a time, zeros behind the last
inline void each(float* to, int64_t n, Function function) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    const Floats some = function(i, LANES);
    std::memcpy(to + i, &some, sizeof some);
  }
  if (i < n) {
    const Floats some = function(i, n - i);
    std::memcpy(to + i, &some, (n - i) * sizeof(float));
  }
}

inline Floats some_of(const float* from, int64_t count) {
  if (count == LANES) return load<Floats>(from);
  Floats some{};
  std::memcpy(&some, from, count * sizeof(float));
  return some;
}

float product_of(const float* a, const float* b, int64_t n) {
  Floats sums{};
  for (int64_t i = 0; i < n; i += LANES) {
    const int64_t count = std::min<int64_t>(LANES, n - i);
    sums += some_of(a + i, count) * some_of(b + i, count);
  }
  return sum(sums);
}

// [n] -> [n]; may be the same place
void normed(const Norm& norm, const float* x, int64_t n, float* to) {
  float mean = 0;
  if (norm.kind == 2) {
    Floats sums{};
    for (int64_t i = 0; i < n; i += LANES) sums += some_of(x + i, std::min<int64_t>(LANES, n - i));
    mean = sum(sums) / n;
    each(to, n, [&](int64_t i, int64_t count) { return some_of(x + i, count) - mean; });
    x = to;
  }
  const float scale = 1 / std::sqrt(product_of(x, x, n) / n + norm.eps);
  each(to, n, [&](int64_t i, int64_t count) {
    const Floats y = some_of(x + i, count) * scale * some_of(norm.weight + i, count);
    return norm.bias ? y + some_of(norm.bias + i, count) : y;
  });
}

// act(gate) · up, or act(up) without a gate -> gate
void activated(float* gate, const float* up, int64_t n, bool gelu) {
  each(gate, n, [&](int64_t i, int64_t count) {
    const Floats x = some_of(gate + i, count);
    Floats argument = x;  // gelu(x) = x · sigmoid(2u), u the argument of its tanh
    if (gelu) argument = 1.5957691216f * (x + 0.044715f * x * x * x);
    const Floats e = exponential(argument < 0 ? argument : -argument);
    const Floats y = x * (argument < 0 ? e : Floats{} + 1) / (1 + e);
    return up ? y * some_of(up + i, count) : y;
  });
}

// A head [D] turned in place.
void turned(float* x, const float* turn, int64_t size) {
  for (int64_t i = 0, half = size / 2; i < half; i++) {
    const float first = x[i], second = x[half + i];
    x[i] = first * turn[i] + second * turn[size + i];
    x[half + i] = second * turn[half + i] + first * turn[size + half + i];
  }
}

// -- attention over a run of keys ------------------------------------------------------------------------------------

// count keys, `stride` numbers apart, times the queries [queries, size] -> scores [queries, of_query]
template <Type TYPE>
void score(const char* keys, int64_t stride, int64_t count, const float* query, int64_t queries, int64_t size,
           float* scores, int64_t of_query) {
  constexpr int64_t BYTES = BYTES_OF_TYPE[TYPE];
  const auto some = [&](auto together, int64_t t, int64_t i) {
    constexpr int T = decltype(together)::value;
    Floats sums[T] = {};
    for (int64_t d = 0; d < size; d += LANES) {
      const Floats q = load<Floats>(query + i * size + d);
      for (int k = 0; k < T; k++) sums[k] += q * wide<TYPE>(keys + ((t + k) * stride + d) * BYTES);
    }
    for (int k = 0; k < T; k++) scores[i * of_query + t + k] = sum(sums[k]);
  };
  int64_t t = 0;
  for (; t + 4 <= count; t += 4)
    for (int64_t i = 0; i < queries; i++) some(std::integral_constant<int, 4>{}, t, i);
  for (; t < count; t++)
    for (int64_t i = 0; i < queries; i++) some(std::integral_constant<int, 1>{}, t, i);
}

// mixed [queries, of_mixed] += weights [queries, of_query] · values
template <Type TYPE>
void mix(const char* values, int64_t stride, int64_t count, const float* weights, int64_t of_query, int64_t queries,
         int64_t size, float* mixed, int64_t of_mixed) {
  constexpr int64_t BYTES = BYTES_OF_TYPE[TYPE];
  const auto some = [&](auto together, int64_t i, int64_t d) {
    constexpr int V = decltype(together)::value;
    Floats sums[V];
    float* to = mixed + i * of_mixed + d;
    std::memcpy(sums, to, sizeof sums);
    for (int64_t t = 0; t < count; t++)
      for (int v = 0; v < V; v++)
        sums[v] += weights[i * of_query + t] * wide<TYPE>(values + (t * stride + d + v * LANES) * BYTES);
    std::memcpy(to, sums, sizeof sums);
  };
  for (int64_t i = 0; i < queries; i++) {
    int64_t d = 0;
    for (; d + 8 * LANES <= size; d += 8 * LANES) some(std::integral_constant<int, 8>{}, i, d);
    for (; d < size; d += LANES) some(std::integral_constant<int, 1>{}, i, d);
  }
}

// -- a thread's part of the step ---------------------------------------------------------------------------------------

struct Thread {
  const Model& m;
  const Cache& cache;
  const Tokens& tokens;
  Shared& shared;
  Own& own;
  int64_t thread, threads;
  float* logits;  // [wanted, V]
  const Matrix* arranged = nullptr;

  int64_t share_of(int64_t count, int64_t which) const { return count * which / threads; }
  int64_t row_of_share() const { return 2 + m.size; }
  float* share(int64_t row, int64_t head, int64_t split) const {
    return shared.shares.data() + ((row * m.heads + head) * shared.splits + split) * row_of_share();
  }

  void wait() const {
#pragma omp barrier
  }

  // - products

  // x [rows, in] as this matrix takes it; the matrices of a phase that take it alike share what is made.
  void arrange_for(const Matrix& w, const float*& x, int64_t rows) {
    if (w.divisor) {
      float* to = sized(own.divided, rows * w.in);
      for (int64_t row = 0; row < rows; row++)
        each(to + row * w.in, w.in, [&](int64_t i, int64_t n) {
          return some_of(x + row * w.in + i, n) / some_of(w.divisor + i, n);
        });
      x = to;
    }
    if (w.kind < CODES) return;
    const Matrix* before = arranged;
    arranged = &w;
    const auto alike = [&](const Weight& a, const Weight& b) {
      return a.kind == b.kind && a.group == b.group && a.block == b.block && a.centre == b.centre && a.shift == b.shift &&
             !a.zero == !b.zero && a.in % CHUNK == 0;
    };
    if (before && before->kind == w.kind && before->divisor == w.divisor && alike(before->codes, w.codes)) return;
    if (w.kind == CODES_Q8) return arrange_q8(w.codes, x, rows, w.in, own.coded_inputs);
    by_kind(w.codes.kind, [&](auto kind) { ::arrange<decltype(kind)::value>(w.codes, x, rows, w.in, own.inputs); });
  }

  // Where an output's weights begin.
  static const char* weights_of(const Matrix& w, int64_t out) {
    if (w.kind < CODES) return w.numbers + out * w.in * BYTES_OF_TYPE[w.kind];
    const int64_t group = w.codes.group, padded = w.kind == CODES_Q8 ? up(group, CHUNK) * CHUNK : group;
    return (const char*)w.codes.codes + out * (w.in / group * padded) / (w.codes.kind == NIBBLES ? 2 : 1);
  }

  // Outputs from `first` on, at most ABREAST, of some rows -> part [some, ABREAST]
  void tile_of(const Matrix& w, const float* x, int64_t row, int64_t some, int64_t first, Ahead& ahead, float* part) {
    if (w.kind == CODES_Q8) {
      const auto tile = w.codes.kind == NIBBLES ? tile_q8<NIBBLES> : tile_q8<SIGNED>;
      return tile(w.codes, own.coded_inputs, row, some, first, ahead, part, ABREAST);
    }
    for (int64_t out = first; out < std::min(w.out, first + ABREAST); out += TILE, part += TILE)
      if (w.kind == CODES) {
        float* room = sized(own.scales, room_of(w.codes));
        by_kind(w.codes.kind, [&](auto kind) {
          ::tile<decltype(kind)::value>(w.codes, own.inputs, row, some, out, ahead, room, part, ABREAST);
        });
      } else {
        by_type(w.kind, [&](auto type) {
          float_tile<decltype(type)::value>(w.numbers, w.out, w.in, x + row * w.in, some, w.in, out, ahead, part, ABREAST);
        });
      }
  }

  // This thread's outputs, x [rows, in] -> y [rows, stride], added to what is there or in its place. next: the matrix
  // that comes after this one, whose first weights are fetched.
  void multiply(const Matrix& w, const float* x, int64_t rows, float* y, int64_t stride, const Matrix* next,
                bool add = false) {
    arrange_for(w, x, rows);
    float part[TOGETHER * ABREAST];
    in_blocks(
        first_of(w.out, thread), first_of(w.out, thread + 1), rows, [&](int64_t out) { return weights_of(w, out); },
        next ? weights_of(*next, first_of(next->out, thread)) : nullptr,
        [&](int64_t row, int64_t some, int64_t out, Ahead& ahead) {
          tile_of(w, x, row, some, out, ahead, part);
          for (int64_t r = 0; r < some; r++) put_sums(w, out, part + r * ABREAST, y + (row + r) * stride + out, add);
        });
  }

  // sums [ABREAST], or as many as there are from output `out` on
  static void put_sums(const Matrix& w, int64_t out, const float* sums, float* y, bool add) {
    const int64_t count = std::min(ABREAST, w.out - out);
    each(y, count, [&](int64_t, int64_t) {
      Floats some = load<Floats>(sums);
      if (w.bias) some += some_of(w.bias + out, count);
      return add ? some + some_of(y, count) : some;
    });
  }

  // First and last of this thread's outputs of a matrix.
  int64_t first_of(int64_t out, int64_t which) const { return first_output(out, which, threads); }

  // - phases

  void embed() {
    const int64_t d = m.width;
    by_type(m.type, [&](auto type) {
      constexpr Type TYPE = decltype(type)::value;
      for (int64_t row = 0; row < tokens.rows; row++) {
        float* x = shared.x.data() + row * d;
        for (int64_t i = share_of(d, thread); i < share_of(d, thread + 1); i++) {
          const auto at = [&](const char* table, int64_t index) {
            return number<TYPE>(table + (index * d + i) * BYTES_OF_TYPE[TYPE]);
          };
          x[i] = at(m.embedding, tokens.ids[row]);
          if (m.embedding_scale != 1) {  // rounded to the embedding's type, as there
            char rounded[4];
            put<TYPE>(x[i] * m.embedding_scale, rounded);
            x[i] = number<TYPE>(rounded);
          }
          if (m.positions) x[i] += at(m.positions, tokens.positions[row]);
        }
      }
    });
    wait();
    if (m.of_given.kind < 0) return;
    multiply(m.of_given, tokens.given, tokens.rows, shared.x.data(), d, &m.layer->q, true);
    wait();
  }

  const float* normed_rows(const Norm& norm, const int64_t* which = nullptr, int64_t count = -1) {
    const int64_t rows = count < 0 ? tokens.rows : count;
    float* to = sized(own.x, rows * m.width);
    for (int64_t row = 0; row < rows; row++)
      normed(norm, shared.x.data() + (which ? which[row] : row) * m.width, m.width, to + row * m.width);
    arranged = nullptr;
    return to;
  }

  void project(const Layer& layer) {
    const float* x = normed_rows(layer.before_attention);
    multiply(layer.q, x, tokens.rows, shared.q.data(), m.heads * m.size, layer.owns_keys ? &layer.k : &layer.o);
    if (layer.owns_keys) {
      multiply(layer.k, x, tokens.rows, new_keys(layer), m.kv_heads * m.size, &layer.v);
      multiply(layer.v, x, tokens.rows, new_values(layer), m.kv_heads * m.size, &layer.o);
    }
    wait();
  }

  // Of a cache in codes those of all layers stay: where a group is to be quantized, its tokens come from here.
  float* new_keys(const Layer& layer) const {
    return cache.codes ? cache.codes->keys + of_layer(layer) : shared.k.data();
  }
  float* new_values(const Layer& layer) const {
    return cache.codes ? cache.codes->values + of_layer(layer) : shared.v.data();
  }
  int64_t of_layer(const Layer& layer) const { return layer.place * cache.codes->rows * m.kv_heads * m.size; }

  char* stored(const Stored& of, int64_t place, int64_t sequence, int64_t head, int64_t position) const {
    const int64_t block = tokens.tables[sequence * tokens.blocks + position / cache.block_size];
    const int64_t at = place * of.layer + block * of.block + position % cache.block_size * of.token + head * of.head;
    return of.start + at * BYTES_OF_TYPE[cache.type];
  }

  void ready(const Layer& layer, const Norm& norm, int64_t row, float* head) const {
    if (norm.kind) normed(norm, head, m.size, head);
    if (layer.table >= 0) turned(head, tokens.turns[layer.table] + tokens.positions[row] * 2 * m.size, m.size);
  }

  void attend(const Layer& layer) {
    const int64_t items = tokens.sequences * m.kv_heads * shared.splits;
    for (int64_t item = share_of(items, thread); item < share_of(items, thread + 1); item++) {
      const int64_t split = item % shared.splits, head = item / shared.splits % m.kv_heads;
      if (cache.codes || cache.blocks) {
        attend_codes(layer, item / shared.splits / m.kv_heads, head, split);
        continue;
      }
      by_type(cache.type, [&](auto type) {
        attend_head<decltype(type)::value>(layer, item / shared.splits / m.kv_heads, head, split);
      });
    }
    wait();
  }

  // The new tokens of a sequence, over a share of the keys of one head. The last share has the new keys. They lie in the
  // order of the rows, and in a tree stand where their branch has come to.
  template <Type TYPE>
  void attend_head(const Layer& layer, int64_t sequence, int64_t head, int64_t split) {
    const int64_t first_row = tokens.starts[sequence], past = tokens.positions[first_row];
    const int64_t begin = past * split / shared.splits;
    const bool is_last = split == shared.splits - 1;
    const int64_t trunk = tokens.trunks ? tokens.trunks[sequence] : tokens.rows;
    for (int64_t row = first_row; row < tokens.starts[sequence + 1]; row++) {
      const int64_t position = tokens.positions[row];
      if (is_last && layer.owns_keys) {
        float* k = shared.k.data() + (row * m.kv_heads + head) * m.size;
        const float* v = shared.v.data() + (row * m.kv_heads + head) * m.size;
        ready(layer, layer.of_k, row, k);
        char* keys = stored(cache.keys, layer.place, sequence, head, past + row - first_row);
        char* values = stored(cache.values, layer.place, sequence, head, past + row - first_row);
        for (int64_t i = 0; i < m.size; i++) {
          put<TYPE>(k[i], keys + i * BYTES_OF_TYPE[TYPE]);
          put<TYPE>(v[i], values + i * BYTES_OF_TYPE[TYPE]);
        }
      }
      const int64_t seen_from = layer.window ? std::max<int64_t>(0, position + 1 - layer.window) : 0;
      const int64_t sinks = layer.window ? std::min(m.sinks, seen_from) : 0;
      int64_t last = row - first_row;  // of the rows that are a text
      own.branch.clear();
      for (int64_t at = position; last >= trunk; at--, last = tokens.parents[first_row + last])
        if (is_last && (at >= seen_from || at < sinks)) own.branch.push_back(past + last);
      const int64_t end = is_last ? past + last + 1 : past * (split + 1) / shared.splits;
      attend_row<TYPE>(layer, sequence, head, split, row, begin, std::min(end, sinks), std::max(begin, seen_from), end);
    }
  }

  // One query of each head of the group, over keys from a to b − 1, from c to d − 1, and of its branch.
  template <Type TYPE>
  void attend_row(const Layer& layer, int64_t sequence, int64_t head, int64_t split, int64_t row, int64_t a, int64_t b,
                  int64_t c, int64_t d) {
    const int64_t group = m.heads / m.kv_heads, size = m.size;
    const int64_t count = std::max<int64_t>(0, b - a) + std::max<int64_t>(0, d - c) + int64_t(own.branch.size());
    float* query = sized(own.query, group * size);
    const float* from = shared.q.data() + (row * m.heads + head * group) * size;
    for (int64_t i = 0; i < group; i++) {
      std::memcpy(query + i * size, from + i * size, size * sizeof(float));
      ready(layer, layer.of_q, row, query + i * size);
      for (int64_t j = 0; j < size; j++) query[i * size + j] *= m.attention_scale;
    }
    const int64_t of_query = up(count, LANES) * LANES;
    float *scores = sized(own.scores, group * of_query), *to = share(row, head * group, split);
    const int64_t next = row_of_share() * shared.splits;  // from one query's share to the next query's
    for (int64_t i = 0; i < group; i++) {
      to[i * next] = LOWEST;
      std::fill(to + i * next + 1, to + i * next + 2 + size, 0.f);
    }
    if (!count) return;
    runs(a, b, c, d, [&](int64_t position, int64_t n, int64_t done) {
      score<TYPE>(stored(cache.keys, layer.place, sequence, head, position), cache.keys.token, n, query, group, size,
                  scores + done, of_query);
    });
    for (int64_t i = 0; i < group; i++) {
      float* weights = scores + i * of_query;
      float top = LOWEST;
      for (int64_t t = 0; t < count; t++) top = std::max(top, weights[t]);
      std::fill(weights + count, weights + of_query, LOWEST);
      Floats total{};
      each(weights, of_query, [&](int64_t t, int64_t) {
        const Floats weight = exponential(load<Floats>(weights + t) - top);
        total += weight;
        return weight;
      });
      to[i * next] = top;
      to[i * next + 1] = sum(total);
    }
    runs(a, b, c, d, [&](int64_t position, int64_t n, int64_t done) {
      mix<TYPE>(stored(cache.values, layer.place, sequence, head, position), cache.values.token, n, scores + done, of_query,
                group, size, to + 2, next);
    });
  }

  // The same over keys and values in codes, for all new tokens of a sequence at once.
  void attend_codes(const Layer& layer, int64_t sequence, int64_t head, int64_t split) {
    own.branch.clear();  // no row of a tree comes here; one that a thread attended before may have left its branch
    const int64_t first = tokens.starts[sequence], rows = tokens.starts[sequence + 1] - first;
    const bool windowed = layer.window;
    const coded::Layer alone = coded_layer(layer);
    const coded::Sequence before{0, tokens.positions[first], first, rows, 0, 0, -1};
    const coded::Layer& kept = cache.codes ? cache.codes->layers[layer.place] : alone;
    const coded::Sequence& of = cache.codes ? cache.codes->sequences[windowed][sequence] : before;
    const int64_t queries = rows * kept.shared;
    own.room.fit(kept, queries);
    float* top = sized(own.part, queries * (2 + own.room.wide_value));
    coded::Item item{kept, of, head, queries, own.room, top, top + queries, top + 2 * queries};
    item.done = tokens.positions[first] - of.past;
    item.clear();
    for (int64_t i = 0; i < queries; i++) {
      const int64_t row = first + i / kept.shared, its = head * kept.shared + i % kept.shared;
      float* q = own.room.q.data() + i * own.room.wide;
      std::memcpy(q, shared.q.data() + (row * m.heads + its) * m.size, m.size * sizeof(float));
      ready(layer, layer.of_q, row, q);
      for (int64_t j = 0; j < m.size; j++) q[j] *= kept.scale;
    }
    if (cache.codes) {
      see_groups(layer, item, first, rows, split, cache.codes->runs[windowed]);
    } else {
      see_blocks(layer, item, sequence, first, rows, split);
    }
    for (int64_t i = 0; i < queries; i++) {
      float* to = share(first + i / kept.shared, head * kept.shared + i % kept.shared, split);
      to[0] = top[i];
      to[1] = top[queries + i];
      std::memcpy(to + 2, item.out + i * own.room.wide_value, m.size * sizeof(float));
    }
    int64_t& bytes = cache.codes ? cache.codes->bytes : cache.blocks->bytes;
#pragma omp atomic
    bytes += item.bytes;
  }

  // What is to be known of a layer whose codes lie in blocks.
  coded::Layer coded_layer(const Layer& layer) const {
    coded::Layer shape{};
    shape.keys.size = shape.values.size = m.size;
    shape.heads = m.kv_heads, shape.shared = m.heads / m.kv_heads;
    shape.window = layer.window, shape.sinks = m.sinks, shape.scale = m.attention_scale;
    return shape;
  }

  // A share of the groups; the last one has the recent part and the new tokens, which it stores there.
  void see_groups(const Layer& layer, coded::Item& item, int64_t first, int64_t rows, int64_t split,
                  const coded::Run* runs) {
    const int64_t groups = coded::groups_of(item.sequence, runs, item.layer.group), stride = m.kv_heads * m.size;
    const bool is_last = split == shared.splits - 1;
    item.see(runs, groups * split / shared.splits, groups * (split + 1) / shared.splits, is_last);
    if (!is_last) return;
    const int64_t at = first * stride + item.head * m.size, earlier = item.done * stride;
    float *k = new_keys(layer) + at, *v = new_values(layer) + at;
    for (int64_t row = 0; layer.owns_keys && row < rows; row++) ready(layer, layer.of_k, first + row, k + row * stride);
    item.floats(k - earlier, stride, v - earlier, stride, item.done + rows, item.sequence.past);
    if (layer.owns_keys) item.keep(k, stride, v, stride, rows);
  }

  // A share of the tokens; the last one has the new ones, which it quantizes first.
  void see_blocks(const Layer& layer, coded::Item& item, int64_t sequence, int64_t first, int64_t rows, int64_t split) {
    const coded::Blocks& blocks = *cache.blocks;
    const int64_t past = item.sequence.past, head = item.head, size = blocks.block_size;
    const bool is_last = split == shared.splits - 1;
    const auto place = [&](int64_t position) {
      return tokens.tables[sequence * tokens.blocks + position / size] * size + position % size;
    };
    for (int64_t row = first; is_last && layer.owns_keys && row < first + rows; row++) {
      float* k = new_keys(layer) + (row * m.kv_heads + head) * m.size;
      const float* v = new_values(layer) + (row * m.kv_heads + head) * m.size;
      ready(layer, layer.of_k, row, k);
      const int64_t index = (layer.place * blocks.places + place(tokens.positions[row])) * m.kv_heads + head;
      coded::quantize_row(k, m.size, blocks.format, blocks.keys, index);
      coded::quantize_row(v, m.size, blocks.format, blocks.values, index);
    }
    for (int64_t i = 0; i < item.queries; i++) {
      Floats sums{};
      for (int64_t d = 0; d < m.size; d += LANES) sums += load<Floats>(own.room.q.data() + i * own.room.wide + d);
      own.room.shifts[i] = sum(sums);
    }
    const int64_t begin = past * split / shared.splits, end = is_last ? past + rows : past * (split + 1) / shared.splits;
    const int64_t seen_from = layer.window ? std::max<int64_t>(0, past + 1 - layer.window) : 0;
    const int64_t sinks = layer.window ? std::min(m.sinks, seen_from) : 0;
    runs(begin, std::min(end, sinks), std::max(begin, seen_from), end, [&](int64_t position, int64_t n, int64_t) {
      for (int64_t t = 0; t < n; t += coded::TILE)
        coded::attend_tile(item, blocks, layer.place, place(position) + t, std::min<int64_t>(coded::TILE, n - t),
                           position + t);
    });
  }

  // What of two ranges and the branch lies side by side: function(position, tokens, how many came before).
  template <typename Function>
  void runs(int64_t a, int64_t b, int64_t c, int64_t d, Function function) const {
    int64_t done = 0;
    for (auto [first, end] : {std::pair(a, b), std::pair(c, d)})
      for (int64_t at = first; at < end;) {
        const int64_t n = std::min(end - at, cache.block_size - at % cache.block_size);
        function(at, n, done);
        at += n;
        done += n;
      }
    for (const int64_t at : own.branch) function(at, 1, done++);
  }

  void mix_heads(const Layer& layer) {
    const int64_t wide = m.heads * m.size;
    float* mixed = sized(own.x, tokens.rows * wide);
    for (int64_t row = 0; row < tokens.rows; row++)
      for (int64_t head = 0; head < m.heads; head++) together(row, head, mixed + row * wide + head * m.size);
    arranged = nullptr;
    add(layer.o, mixed, layer.after_attention, m.gated ? &layer.gate : &layer.up);
  }

  // The shares of a query's keys -> [D]
  void together(int64_t row, int64_t head, float* to) const {
    float top = LOWEST, total = 0;
    for (int64_t split = 0; split < shared.splits; split++) top = std::max(top, share(row, head, split)[0]);
    std::fill(to, to + m.size, 0.f);
    for (int64_t split = 0; split < shared.splits; split++) {
      const float* from = share(row, head, split);
      const float weight = shared.splits == 1 ? 1 : std::exp(from[0] - top);
      total += weight * from[1];
      for (int64_t i = 0; i < m.size; i++) to[i] += weight * from[2 + i];
    }
    for (int64_t i = 0; i < m.size; i++) to[i] /= total;
  }

  // x += w · rows, normed before where there is such a norm
  void add(const Matrix& w, const float* rows, const Norm& norm, const Matrix* next) {
    const int64_t d = m.width;
    if (!norm.kind) {
      multiply(w, rows, tokens.rows, shared.x.data(), d, next, true);
      return wait();
    }
    multiply(w, rows, tokens.rows, shared.added.data(), d, next);
    wait();
    float* to = sized(own.divided, d);
    for (int64_t row = 0; row < tokens.rows; row++) {
      normed(norm, shared.added.data() + row * d, d, to);
      for (int64_t i = share_of(d, thread); i < share_of(d, thread + 1); i++) shared.x[row * d + i] += to[i];
    }
    wait();
  }

  void feed(const Layer& layer) {
    const float* x = normed_rows(layer.before_mlp);
    const int64_t hidden = m.hidden, first = first_of(hidden, thread), count = first_of(hidden, thread + 1) - first;
    float* up_rows = m.gated ? sized(own.up, tokens.rows * hidden) : nullptr;
    if (m.gated) {
      multiply(layer.gate, x, tokens.rows, shared.hidden.data(), hidden, &layer.up);
      multiply(layer.up, x, tokens.rows, up_rows, hidden, &layer.down);
    } else {
      multiply(layer.up, x, tokens.rows, shared.hidden.data(), hidden, &layer.down);
    }
    for (int64_t row = 0; row < tokens.rows; row++)
      activated(shared.hidden.data() + row * hidden + first, up_rows ? up_rows + row * hidden + first : nullptr, count,
                m.gelu);
    wait();
    arranged = nullptr;
    add(layer.down, shared.hidden.data(), layer.after_mlp, &layer == m.layer + m.layers - 1 ? &m.head : &(&layer)[1].q);
  }

  void choose(double* said) {
    if (tokens.states)
      for (int64_t row = share_of(tokens.rows, thread); row < share_of(tokens.rows, thread + 1); row++)
        normed(m.last, shared.x.data() + row * m.width, m.width, tokens.states + row * m.width);
    const float* x = normed_rows(m.last, tokens.wanted_rows, tokens.wanted);
    multiply(m.head, x, tokens.wanted, logits, m.vocabulary, nullptr);
    const int64_t first = first_of(m.vocabulary, thread), end = first_of(m.vocabulary, thread + 1);
    for (int64_t row = 0; row < tokens.wanted; row++) {
      const float* of_row = logits + row * m.vocabulary;
      Best best;
      for (int64_t i = first; i < end; i++)
        if (of_row[i] > best.top) best.top = of_row[i], best.token = i;
      Floats total{};
      const float top = best.top == LOWEST ? 0 : best.top;  // where all are −∞, so that none becomes NaN
      for (int64_t i = first; i < end; i += LANES) {
        const int64_t count = std::min<int64_t>(LANES, end - i);
        Floats from_top = some_of(of_row + i, count) - top;
        for (int64_t lane = count; lane < LANES; lane++) from_top[lane] = LOWEST;
        total += exponential(from_top);
      }
      best.total = sum(total);
      shared.best[row * threads + thread] = best;
    }
    wait();
    if (thread) return;
    for (int64_t row = 0; row < tokens.wanted; row++, said += 3) {
      Best best;
      for (int64_t other = 0; other < threads; other++) {
        const Best& one = shared.best[row * threads + other];
        if (one.top > best.top) best.top = one.top, best.token = one.token;
      }
      for (int64_t other = 0; other < threads; other++) {
        const Best& one = shared.best[row * threads + other];
        if (one.total != 0) best.total += one.total * std::exp(double(one.top) - double(best.top));
      }
      said[0] = double(best.token);
      said[1] = -std::log(best.total);
      said[2] = std::isfinite(best.total) ? best.top : std::numeric_limits<double>::quiet_NaN();
    }
  }

  // heads [rows, H_q + 2·H_kv, D], q alone of a layer that owns no keys -> [rows, H_q, D]
  void attend_alone(const Layer& layer, const float* heads, float* to) {
    const int64_t q = m.heads * m.size, kv = m.kv_heads * m.size, wide = q + (layer.owns_keys ? 2 * kv : 0);
    for (int64_t row = share_of(tokens.rows, thread); row < share_of(tokens.rows, thread + 1); row++) {
      const float* from = heads + row * wide;
      std::copy_n(from, q, shared.q.data() + row * q);
      if (!layer.owns_keys) continue;
      std::copy_n(from + q, kv, new_keys(layer) + row * kv);
      std::copy_n(from + q + kv, kv, new_values(layer) + row * kv);
    }
    wait();
    attend(layer);
    const int64_t items = tokens.rows * m.heads;
    for (int64_t item = share_of(items, thread); item < share_of(items, thread + 1); item++)
      together(item / m.heads, item % m.heads, to + item * m.size);
  }

  void step(double* said) {
    embed();
    for (int64_t index = 0; index < m.layers; index++) {
      const Layer& layer = m.layer[index];
      project(layer);
      attend(layer);
      mix_heads(layer);
      feed(layer);
    }
    choose(said);
  }
};

// Shares of a sequence's keys, so that every thread has some.
int64_t splits_for(const Model& m, const Tokens& tokens, int64_t threads) {
  int64_t longest = 0;
  for (int64_t row = 0; row < tokens.rows; row++) longest = std::max(longest, tokens.positions[row]);
  return std::max<int64_t>(1, std::min(threads / (tokens.sequences * m.kv_heads), longest / LEAST_KEYS));
}

// What attention takes of the room that is kept from call to call.
Shared& room_for(const Model& m, const Tokens& tokens, int64_t threads) {
  static thread_local Shared shared;
  shared.splits = splits_for(m, tokens, threads);
  sized(shared.q, tokens.rows * m.heads * m.size);
  sized(shared.k, tokens.rows * m.kv_heads * m.size);
  sized(shared.v, tokens.rows * m.kv_heads * m.size);
  sized(shared.shares, tokens.rows * m.heads * shared.splits * (2 + m.size));
  return shared;
}

template <typename Function>  // by every thread
void side_by_side(const Model& m, const Cache& cache, const Tokens& tokens, Shared& shared, int64_t threads,
                  float* logits, Function function) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local Own own;
    const int64_t all = omp_get_num_threads(), which = omp_get_thread_num();
#pragma omp single
    shared.best.resize(tokens.wanted * all);
    Thread one{m, cache, tokens, shared, own, which, all, logits};
    function(one);
  }
}

}  // namespace

extern "C" {

// -> logits [wanted, V], and of each of these rows in `said` [wanted, 3] the token of its highest logit, the natural log
// of that token's probability, and its logit, which is NaN where the row is no distribution.
void step(const Model* model, const Cache* cache, const Tokens* tokens, int64_t threads, float* logits, double* said) {
  Shared& shared = room_for(*model, *tokens, threads);
  sized(shared.x, tokens->rows * model->width);
  sized(shared.added, tokens->rows * model->width);
  sized(shared.hidden, tokens->rows * model->hidden);
  side_by_side(*model, *cache, *tokens, shared, threads, logits, [&](Thread& one) { one.step(said); });
}

// Parts of a step, each a call of its own.

// The attention of a layer. heads [rows, H_q + 2·H_kv, D]: q, and k and v where the layer owns keys; -> [rows, H_q, D]
void attend_rows(const Model* model, int64_t layer, const Cache* cache, const Tokens* tokens, int64_t threads,
                 const float* heads, float* to) {
  Shared& shared = room_for(*model, *tokens, threads);
  side_by_side(*model, *cache, *tokens, shared, threads, nullptr,
               [&](Thread& one) { one.attend_alone(model->layer[layer], heads, to); });
}

// x [rows, n] += added, which may be null; its norm -> [rows, n]
void norm_rows(const Norm* norm, int64_t n, float* x, const float* added, int64_t rows, int64_t threads, float* to) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * n > ALONE)
  for (int64_t row = 0; row < rows; row++) {
    float* mine = x + row * n;
    if (added)
      each(mine, n, [&](int64_t i, int64_t count) { return some_of(mine + i, count) + some_of(added + row * n + i, count); });
    normed(*norm, mine, n, to + row * n);
  }
}

// wide [rows, gate and up], n of each: the gate's place gets act(gate) · up
void gate_rows(float* wide, int64_t n, int64_t gelu, int64_t rows, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * n > ALONE)
  for (int64_t row = 0; row < rows; row++) activated(wide + row * 2 * n, wide + (row * 2 + 1) * n, n, gelu);
}

}  // extern "C"
