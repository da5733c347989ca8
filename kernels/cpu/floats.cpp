// Products of a few rows with weights that are numbers, as one function; called by floats.py, which says what the
// arguments are. The loops are those of floats.h.
#include "floats.h"

#include <omp.h>

namespace {

template <Type TYPE>
void multiply(const char* weight, const float* bias, int64_t out, int64_t in, const float* x, int64_t rows,
              int64_t stride, int64_t threads, float* y) {
  const auto where = [&](int64_t output) { return weight + output * in * BYTES_OF_TYPE[TYPE]; };
  const auto tile = [&](int64_t row, int64_t some, int64_t output, Ahead& ahead) {
    const float* inputs = x + row * stride;
    for (int64_t end = std::min(out, output + ABREAST); output < end; output += TILE)
      float_tile<TYPE>(weight, out, in, inputs, some, stride, output, ahead, y + row * out + output, out);
  };
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t thread = omp_get_thread_num(), all = omp_get_num_threads();
    const int64_t first = first_output(out, thread, all), end = first_output(out, thread + 1, all);
    in_blocks(first, end, rows, where, nullptr, tile);
    for (int64_t row = 0; bias && row < rows; row++)
      for (int64_t output = first; output < end; output++) y[row * out + output] += bias[output];
  }
}

}  // namespace

extern "C" {

// x [rows, in] float32, its rows `stride` apart, times weight [out, in] of this type, plus bias [out], which may be null,
// -> y [rows, out] float32
void multiply_floats(int64_t type, const char* weight, const float* bias, int64_t out, int64_t in, const float* x,
                     int64_t rows, int64_t stride, int64_t threads, float* y) {
  switch (type) {
    case FLOAT32: return multiply<FLOAT32>(weight, bias, out, in, x, rows, stride, threads, y);
    case BFLOAT16: return multiply<BFLOAT16>(weight, bias, out, in, x, rows, stride, threads, y);
    default: return multiply<FLOAT16>(weight, bias, out, in, x, rows, stride, threads, y);
  }
}

}  // extern "C"
