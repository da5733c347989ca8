// Attention of a few new tokens of each sequence over keys and values that are kept in codes; called by coded_attention.py,
// which says what the arguments are. What it does with codes is in coded_keys.h.
//
// An item of work is a key-value head and at most SPLIT tokens of a sequence; the items of a head are put together in
// their order, so that the result does not depend on the number of threads.
#include "coded_keys.h"

using namespace coded;

namespace {

constexpr int64_t SPLIT = 1024;  // tokens

struct Work {  // an item, and where its part of the result lies
  int64_t sequence, head, split, splits;
};

struct Call {
  const Layer& layer;
  const Sequence* sequences;
  const Run* runs;
  const float* q;
  int64_t q_stride;
  Rows keys, values;
  int64_t most_rows;
  std::vector<float>& parts;  // [items, most queries, 2 + wide_value]: top, total, and what is mixed

  int64_t per_split() const { return std::max<int64_t>(1, SPLIT / layer.group); }
  int64_t queries(const Sequence& sequence) const { return sequence.rows * layer.shared; }
  int64_t wide_value() const { return up(layer.values.size, LANES) * LANES; }

  float* part(int64_t item, int64_t which) const {  // which: 0 top, 1 total, 2 mixed
    const int64_t most = most_rows * layer.shared;
    return parts.data() + item * most * (2 + wide_value()) + which * most;
  }

  int64_t splits(const Sequence& sequence) const {
    return std::max<int64_t>(1, up(groups_of(sequence, runs, layer.group), per_split()));
  }

  // The bytes of the cache that it read.
  int64_t attend(const Work& work, int64_t index, Room& room) const {
    const Sequence& sequence = sequences[work.sequence];
    Item item{layer, sequence, work.head, queries(sequence), room, part(index, 0), part(index, 1), part(index, 2)};
    room.fit(layer, item.queries);
    item.start(q + sequence.first_row * q_stride, q_stride);
    const int64_t first = work.split * per_split();
    const bool is_last = work.split == work.splits - 1;
    item.see(runs, first, first + per_split(), is_last);
    if (is_last) {
      const float *k = keys.start + sequence.first_row * keys.row + work.head * keys.head;
      const float *v = values.start + sequence.first_row * values.row + work.head * values.head;
      item.floats(k, keys.row, v, values.row, sequence.rows, sequence.past);
      item.keep(k, keys.row, v, values.row, sequence.rows);
    }
    return item.bytes;
  }

  // The items of one head, from `index` on -> out [rows, H_q, D_v]
  void put_together(const Work& work, int64_t index, float* out) const {
    const Sequence& sequence = sequences[work.sequence];
    const int64_t size = layer.values.size;
    for (int64_t i = 0; i < queries(sequence); i++) {
      float largest = LOWEST, total = 0;
      for (int64_t split = 0; split < work.splits; split++) largest = std::max(largest, part(index + split, 0)[i]);
      const int64_t row = sequence.first_row + i / layer.shared, head = work.head * layer.shared + i % layer.shared;
      float* to = out + (row * layer.heads * layer.shared + head) * size;
      std::fill(to, to + size, 0.f);
      for (int64_t split = 0; split < work.splits; split++) {
        const float share = std::exp(part(index + split, 0)[i] - largest);
        const float* mixed = part(index + split, 2) + i * wide_value();
        total += share * part(index + split, 1)[i];
        for (int64_t d = 0; d < size; d++) to[d] += share * mixed[d];
      }
      for (int64_t d = 0; d < size; d++) to[d] /= total;
    }
  }
};

}  // namespace

extern "C" {

// q [N, H_q, D], keys [N, H_kv, D], values [N, H_kv, D_v] of the new tokens -> out [N, H_q, D_v], the rows of these
// sequences. Returns the bytes of the cache that were read.
int64_t attend_codes(const Layer* layer, const Sequence* sequences, int64_t count, const Run* runs, const float* q,
                     int64_t q_stride, const Rows* keys, const Rows* values, int64_t threads, float* out) {
  static thread_local std::vector<float> parts;
  static thread_local std::vector<Work> items;
  items.clear();
  Call call{*layer, sequences, runs, q, q_stride, *keys, *values, 0, parts};
  for (int64_t i = 0; i < count; i++) {
    const int64_t splits = call.splits(sequences[i]);
    call.most_rows = std::max(call.most_rows, sequences[i].rows);
    for (int64_t head = 0; head < layer->heads; head++)
      for (int64_t split = 0; split < splits; split++) items.push_back({i, head, split, splits});
  }
  const std::vector<Work>& work = items;
  const int64_t most = call.most_rows * layer->shared;
  parts.resize(work.size() * most * (2 + call.wide_value()));
  int64_t bytes = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local Room room;
#pragma omp for schedule(dynamic, 1) reduction(+ : bytes)
    for (size_t i = 0; i < work.size(); i++) bytes += call.attend(work[i], i, room);
#pragma omp for schedule(static)
    for (size_t i = 0; i < work.size(); i++)
      if (work[i].split == 0) call.put_together(work[i], i, out);
  }
  return bytes;
}

}  // extern "C"
