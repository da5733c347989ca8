// Products of a few rows with weights in 8 or 4 bits, as one function; called by codes.py, which says what the arguments
// are. The loops are those of products.h and products_q8.h.
#include "products_q8.h"

namespace {

constexpr int64_t TILES_AHEAD = 4;  // of four outputs: that far ahead codes are fetched

template <Kind KIND>
void multiply(const Weight& w, const float* x, int64_t rows, int64_t stride, int64_t threads, float* y) {
  static thread_local Rows arranged;
  Rows& inputs = arranged;
  arrange<KIND>(w, x, rows, stride, inputs);
  const int64_t tiles = up(w.out, TILE), passes = passes_of(rows);
  const int64_t bytes = TILE * w.in * BYTES_OF_CHUNK<KIND> / CHUNK;  // of a tile
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local std::vector<float> scales;
    scales.resize(room_of(w));
#pragma omp for schedule(static)
    for (int64_t i = 0; i < tiles; i++) {
      Ahead ahead{(const char*)w.codes + (i + TILES_AHEAD) * bytes, passes};
      for (int64_t row = 0, some; row < rows; row += some) {
        some = next_rows(rows - row);
        tile<KIND>(w, inputs, row, some, i * TILE, ahead, scales.data(), y + row * w.out + i * TILE, w.out);
      }
    }
  }
}

template <Kind KIND>
void multiply_q8(const Weight& w, const float* x, int64_t rows, int64_t stride, int64_t threads, float* y) {
  static thread_local CodedRows arranged;
  CodedRows& inputs = arranged;
  arrange_q8(w, x, rows, stride, inputs);
  const int64_t tiles = up(w.out, ABREAST), passes = passes_of(rows);
  const int64_t bytes = inputs.width / CHUNK * ABREAST * BYTES_OF_CHUNK<KIND>;  // of a tile
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < tiles; i++) {
    Ahead ahead{(const char*)w.codes + (i + TILES_AHEAD / 2) * bytes, passes};
    for (int64_t row = 0, some; row < rows; row += some) {
      some = next_rows(rows - row);
      tile_q8<KIND>(w, inputs, row, some, i * ABREAST, ahead, y + row * w.out + i * ABREAST, w.out);
    }
  }
}

}  // namespace

extern "C" {

const char* instructions() { return INSTRUCTIONS; }

// x [rows, in] float32, its rows `stride` apart, -> y [rows, out] float32
void multiply_codes(const Weight* w, const float* x, int64_t rows, int64_t stride, int64_t q8, int64_t threads, float* y) {
  if (q8) return (w->kind == NIBBLES ? multiply_q8<NIBBLES> : multiply_q8<SIGNED>)(*w, x, rows, stride, threads, y);
  switch (w->kind) {
    case SIGNED: return multiply<SIGNED>(*w, x, rows, stride, threads, y);
    case UNSIGNED: return multiply<UNSIGNED>(*w, x, rows, stride, threads, y);
    default: return multiply<NIBBLES>(*w, x, rows, stride, threads, y);
  }
}

}  // extern "C"
