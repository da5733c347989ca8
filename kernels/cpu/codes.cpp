// Products of a few rows with weights in 8 or 4 bits, as one function; called by codes.py, which says what the arguments
// are. The loops are those of products.h.
#include "products.h"

namespace {

template <Kind KIND, bool Q8>
void multiply(const Weight& w, const float* x, int64_t rows, int64_t stride, int64_t threads, float* y) {
  static thread_local Rows arranged;
  Rows& inputs = arranged;
  arrange<KIND, Q8>(w, x, rows, stride, inputs);
  const int64_t tiles = up(w.out, TILE), room = 2 * TILE * (w.in / w.group);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local std::vector<float> scales;
    scales.resize(room);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < tiles; i++)
      for (int64_t row = 0, some; row < rows; row += some) {
        some = next_rows(rows - row);
        tile<KIND, Q8>(w, inputs, row, some, i * TILE, scales.data(), y + row * w.out + i * TILE, w.out);
      }
  }
}

}  // namespace

extern "C" {

const char* instructions() { return INSTRUCTIONS; }

// x [rows, in] float32, its rows `stride` apart, -> y [rows, out] float32
void multiply_codes(const Weight* w, const float* x, int64_t rows, int64_t stride, int64_t q8, int64_t threads, float* y) {
  switch (2 * w->kind + (q8 != 0)) {
    case 0: return multiply<SIGNED, false>(*w, x, rows, stride, threads, y);
    case 1: return multiply<SIGNED, true>(*w, x, rows, stride, threads, y);
    case 2: return multiply<UNSIGNED, false>(*w, x, rows, stride, threads, y);
    case 3: return multiply<UNSIGNED, true>(*w, x, rows, stride, threads, y);
    case 4: return multiply<NIBBLES, false>(*w, x, rows, stride, threads, y);
    case 5: return multiply<NIBBLES, true>(*w, x, rows, stride, threads, y);
  }
}

}  // extern "C"
