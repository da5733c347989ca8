// 32 codes at a time, by what the processor has: dot products of whole numbers, and codes as floats. Everything that
// depends on the processor is here; codes.cpp is the same everywhere.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int CHUNK = 32, LANES = 8, PARTS = CHUNK / LANES;

typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Sums __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef int8_t Codes __attribute__((vector_size(CHUNK)));

enum Kind { SIGNED, UNSIGNED, NIBBLES };  // bytes of −128 … 127, of 0 … 255, two of 0 … 15 a byte

template <typename V>
inline V load(const void* from) {
  V loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return loaded;
}

inline float sum(Floats x) { return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])); }

template <Kind KIND>
constexpr int BYTES_OF_CHUNK = KIND == NIBBLES ? CHUNK / 2 : CHUNK;

template <Kind KIND>
inline const uint8_t* at(const uint8_t* row, int64_t chunk) {
  return row + chunk * BYTES_OF_CHUNK<KIND>;
}

// -- what the processor has: dot products of codes, and codes as floats ----------------------------------------------

// 32 codes of a weight as `dot` takes them, 32 of the inputs, and 8 sums of 4 products each.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
constexpr const char* INSTRUCTIONS = "AVX512-VNNI";
inline Sums dot_unsigned(Sums sums, Codes w, Codes q) {
  return (Sums)_mm256_dpbusd_epi32((__m256i)sums, (__m256i)w, (__m256i)q);
}
#elif defined(__AVXVNNI__)
constexpr const char* INSTRUCTIONS = "AVX-VNNI";
inline Sums dot_unsigned(Sums sums, Codes w, Codes q) {
  return (Sums)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, (__m256i)q);
}
#elif defined(__AVX2__)
#define WITHOUT_VNNI
constexpr const char* INSTRUCTIONS = "AVX2";
// Two products are added in 16 bits, where 2 · 255 · 127 does not fit, but 2 · 128 · 127 does.
inline Sums dot_unsigned(Sums sums, Codes w, Codes q) {
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)w, (__m256i)q);
  return sums + (Sums)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
inline Sums dot_signed(Sums sums, Codes w, Codes q) {  // |w| · (q with the sign of w)
  return dot_unsigned(sums, (Codes)_mm256_sign_epi8((__m256i)w, (__m256i)w),
                      (Codes)_mm256_sign_epi8((__m256i)q, (__m256i)w));
}
#else
#define WITHOUT_VNNI
constexpr const char* INSTRUCTIONS = "plain C++";
template <typename Code>
inline Sums dot_plain(Sums sums, Codes w, Codes q) {
  for (int i = 0; i < CHUNK; i++) sums[i / 4] += int32_t(Code(w[i])) * q[i];
  return sums;
}
inline Sums dot_unsigned(Sums sums, Codes w, Codes q) { return dot_plain<uint8_t>(sums, w, q); }
inline Sums dot_signed(Sums sums, Codes w, Codes q) { return dot_plain<int8_t>(sums, w, q); }
#endif

// Part k of 32 codes as floats: signed ones as they are, unsigned ones less 128, and nibbles as they lie (0 to 15), byte
// after byte of each 4: part k has the lower halves of bytes k, 4 + k, 8 + k, 12 + k, then the upper ones. No code is
// moved to another lane, which would take longest; `ordered` moves the inputs instead, once a call.
template <Kind KIND>
inline Floats widened(const uint8_t* w, int k) {
#ifdef __AVX2__
  if constexpr (KIND == NIBBLES) {
    const int low = 8 * k, high = 8 * k + 4;
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)w));
    const __m256i moved = _mm256_srlv_epi32(twice, _mm256_setr_epi32(low, low, low, low, high, high, high, high));
    return (Floats)_mm256_cvtepi32_ps(_mm256_and_si256(moved, _mm256_set1_epi32(15)));
  }
  const __m128i some = _mm_loadl_epi64((const __m128i*)(w + LANES * k));
  const __m256i whole = KIND == SIGNED ? _mm256_cvtepi8_epi32(some) : _mm256_cvtepu8_epi32(some);
  const Floats wide = (Floats)_mm256_cvtepi32_ps(whole);
  return KIND == UNSIGNED ? wide - 128.f : wide;
#else
  Floats wide;
  for (int i = 0; i < LANES; i++) {
    const int byte = KIND == NIBBLES ? 4 * (i % 4) + k : LANES * k + i;
    if (KIND == NIBBLES) wide[i] = w[byte] >> (i < 4 ? 0 : 4) & 15;
    if (KIND == UNSIGNED) wide[i] = int(w[byte]) - 128;
    if (KIND == SIGNED) wide[i] = int8_t(w[byte]);
  }
  return wide;
#endif
}

inline float half(uint16_t bits) {
#ifdef __F16C__
  return _cvtsh_ss(bits);
#else
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7fff;
  if (rest < 0x400) return std::copysign(float(rest) * 0x1p-24f, sign ? -1.f : 1.f);
  const uint32_t wide = sign | (rest >= 0x7c00 ? 0x7f800000 | (rest & 0x3ff) << 13 : (rest << 13) + (112u << 23));
  return load<float>(&wide);
#endif
}

void read_scales(const void* from, bool halves, int64_t start, int64_t count, float* to) {
  if (!halves) {
    std::memcpy(to, (const float*)from + start, count * sizeof(float));
    return;
  }
  const uint16_t* bits = (const uint16_t*)from + start;
  int64_t i = 0;
#ifdef __F16C__
  for (; i + LANES <= count; i += LANES)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(bits + i))));
  for (; i + 4 <= count; i += 4) _mm_storeu_ps(to + i, _mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)(bits + i))));
#endif
  for (; i < count; i++) to[i] = half(bits[i]);
}

// e^x for x <= 0 as 2^n · e^r with |r| <= ln(2) / 2: the bits of 2^n, and a polynomial for e^r (relative error < 3e-7).
inline Floats exponential(Floats x) {
  const float rounding = 12582912.f;  // 1.5 · 2²³: adding it leaves a whole number in the last bits
  const Floats within = x < -87.f ? Floats{} - 87.f : x;
  const Floats shifted = within * 1.44269504f + rounding, n = shifted - rounding;
  const Floats r = within - n * 0.693359375f + n * 2.12194440e-4f;
  Floats e = Floats{} + 1.9875691e-4f;
  e = e * r + 1.3981999e-3f;
  e = e * r + 8.3334519e-3f;
  e = e * r + 4.1665796e-2f;
  e = e * r + 0.16666665f;
  e = e * r + 0.5f;
  e = e * r * r + r + 1.f;
  const Sums bits = (load<Sums>(&shifted) + 127) << 23;
  return x < -87.f ? Floats{} : e * load<Floats>(&bits);
}

}  // namespace
