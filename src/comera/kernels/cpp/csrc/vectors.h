// Vectors as long as the processor's, and the functions that activations and softmax consist of.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

#define INLINE __attribute__((always_inline))  // a call that is not inlined passes its vectors through memory

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t Int __attribute__((vector_size(W * 4)));

static inline Vec load(const float* from) {
    Vec x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
static inline void store(float* to, Vec x) { std::memcpy(to, &x, sizeof x); }
#if defined(__AVX__) && defined(__FMA__) && !defined(__AVX512F__)
// All bits of the first `count` lanes.
static inline __m256i first_lanes(long count) {
    static const int32_t lanes[2 * W] = {-1, -1, -1, -1, -1, -1, -1, -1};
    return _mm256_loadu_si256((const __m256i*)(lanes + W - count));
}
#endif
// The first `count` < W elements, zeros beyond them; memory beyond them is not touched. A copy of a length that is not
// known to the compiler is a call and a trip through memory: 60 ms instead of 13 for 4,096 rows of 16 x 48 from rank 30.
static inline Vec load_part(const float* from, long count) {
#if defined(__AVX512F__)
    return (Vec)_mm512_maskz_loadu_ps((__mmask16)((1 << count) - 1), from);
#elif defined(__AVX__) && defined(__FMA__)
    return (Vec)_mm256_maskload_ps(from, first_lanes(count));
#else
    Vec x{};
    std::memcpy(&x, from, count * sizeof(float));
    return x;
#endif
}
static inline void store_part(float* to, Vec x, long count) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(to, (__mmask16)((1 << count) - 1), (__m512)x);
#elif defined(__AVX__) && defined(__FMA__)
    _mm256_maskstore_ps(to, first_lanes(count), (__m256)x);
#else
    std::memcpy(to, &x, count * sizeof(float));
#endif
}
static inline Vec splat(float x) { return x - Vec{}; }  // not x + 0, which the compiler must keep because of -0
// x y + sum, rounded once where the processor can. Written x * y + sum, a compiler fuses the two in some loops and not in
// others, so that a result would depend on which loop its row falls into.
static inline Vec multiply_add(Vec x, Vec y, Vec sum) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
#elif defined(__AVX__) && defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
#elif defined(__aarch64__)
    return (Vec)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)y);
#else
    return x * y + sum;
#endif
}
// NaN where x is NaN
static inline Vec smaller(Vec x, Vec y) { return y < x ? y : x; }
static inline Vec larger(Vec x, Vec y) { return y > x ? y : x; }
static inline Vec magnitude(Vec x) { return (Vec)((Int)x & 0x7fffffff); }

// e^x = 2^n 2^f with integer n and |f| <= 1/2, 2^f fitted to 8e-8; 0 below -87.7. Exact to 1e-7 for x <= 0; all callers
// stay there, except gates of large negative arguments.
static inline Vec exponential(Vec x) {
    const Vec y = smaller(larger(x * 1.44269504f, splat(-127.0f)), splat(127.0f));
    const Vec shift = splat(12582912.0f + 127.0f);  // 1.5 * 2^23 + bias: adding it rounds to an integer in the low bits
    const Vec shifted = y + shift;
    const Vec f = y - (shifted - shift);
    Vec p = f * 0.00132673633f + 0.0096754678f;
    p = p * f + 0.0555074144f;
    p = p * f + 0.240221216f;
    p = p * f + 0.69314695f;
    p = p * f + 1.00000007f;
    return p * (Vec)((Int)shifted << 23);
}

// The normal distribution at y: density exp(-y²/2) and tail Φ(-|y|), to a relative 2e-7. One exponential serves both:
// erfc(x) = t P(t) exp(-x²), t = 1/(1 + 0.33 x), x >= 0, P fitted for x up to 9.5.
static inline void normal(Vec y, Vec& density, Vec& tail) {
    density = exponential(y * y * -0.5f);
    const Vec t = 1.0f / (magnitude(y) * (0.33f * 0.70710678f) + 1.0f);
    Vec p = t * -0.0681689084f + 0.232244728f;
    p = p * t + -0.179371488f;
    p = p * t + 0.207902915f;
    p = p * t + 0.0215697944f;
    p = p * t + 0.10127228f;
    p = p * t + 0.0913635573f;
    p = p * t + 0.0931870789f;
    tail = p * t * density;
}
