/* What the kernels share: vectors, panels of numbers, functions of vectors.
 *
 * Plain C with the vector extension of GCC and Clang, so that the same source is AVX2, AVX-512 or
 * NEON by the compiler's flags. Every row's sums are added in one order whatever the batch, so a
 * sequence's result does not depend on its company. Compiled on first use by `kernels/build.py`.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX2__) || defined(__FMA__) /* A few CPUs have the latter alone. */
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define LANES 8
#define LINE 16 /* floats that come from memory together */
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define UNROLL _Pragma("GCC unroll 8")

/* ---- what products are made of -------------------------------------------------------------- */

/* A panel is PANEL output features, stored input feature by input feature: [in][PANEL]. */
#define PANEL (2 * LANES)

static inline vec splat(float v) { return (vec){v, v, v, v, v, v, v, v}; }

/* a * b + sum with one rounding, and so the same in every loop: GCC, left to itself, takes products and
 * sums apart in some. Where a CPU has no such instruction, two roundings, in every loop too. */
static inline vec fused(vec a, vec b, vec sum) {
#if defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_FMA)
    typedef union {
        vec all;
        float32x4_t half[2];
    } parts;
    parts x = {a}, y = {b}, z = {sum};
    for (int i = 0; i < 2; i++)
        z.half[i] = vfmaq_f32(z.half[i], x.half[i], y.half[i]);
    return z.all;
#else
    return a * b + sum;
#endif
}

static inline vec vec_times_plus(vec w, float x, vec sum) { return fused(w, splat(x), sum); }

/* The PANEL features of one input, or of one sum: a register where there are such, else two. ROWS
 * is how many rows share a weight. */
#ifdef __AVX512F__
#define ROWS 8
typedef float row __attribute__((vector_size(4 * PANEL), aligned(4), may_alias));
static inline row load(const float *from) { return *(const row *)from; }
static inline void store(float *to, row r) { *(row *)to = r; }
static inline row times_plus(row w, float x, row sum) {
    return (row)_mm512_fmadd_ps((__m512)w, _mm512_set1_ps(x), (__m512)sum);
}
static inline row nothing(void) { return (row){0}; }
#else
#ifdef __aarch64__
#define ROWS 8
#else
#define ROWS 6 /* 2 x 6 sums, 2 weights and 1 input are 15 of AVX2's 16 registers. */
#endif
typedef struct {
    vec low, high;
} row;
static inline row load(const float *from) {
    return (row){*(const vec *)from, *(const vec *)(from + LANES)};
}
static inline void store(float *to, row r) {
    *(vec *)to = r.low;
    *(vec *)(to + LANES) = r.high;
}
static inline row times_plus(row w, float x, row sum) {
    return (row){vec_times_plus(w.low, x, sum.low), vec_times_plus(w.high, x, sum.high)};
}
static inline row nothing(void) { return (row){{0}, {0}}; }
#endif

/* DO(M) for every number of rows that there may be at a time. */
#define EVERY_COUNT(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8)

/* ---- functions of vectors ------------------------------------------------------------------- */

static inline vec choose(ivec mask, vec yes, vec no) {
    return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

/* e^x to 2 units in the last place, 0 below -87.3 (Cephes' expf). x above 88 is not asked for. */
static inline vec vexp(vec x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    ivec tiny = x < splat(-87.3f);
    x = choose(tiny, splat(-87.3f), x);
    x = choose(x > splat(88.0f), splat(88.0f), x);
    vec n = (x * 1.44269504088896341f + magic) - magic;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    vec e = p * r * r + r + 1.0f;
    ivec exponent = (__builtin_convertvector(n, ivec) + 127) << 23;
    return choose(tiny, splat(0.0f), e * (vec)exponent);
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLE /* GCC before 12 */
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

#define LOG2_E 1.44269504088896341f

/* A largest score to begin with: below all others, and -inf less this is not NaN. */
#define LEAST (-__FLT_MAX__)

/* 2^r for r from 0 to 1, to 1e-7 of it (minimax, exactly 1 at 0). */
#define POWER_OF_2(r)                                                                              \
    (((((r * 1.8671300e-3f + 9.0170307e-3f) * r + 5.5799913e-2f) * r + 2.4016444e-1f) * r +       \
      6.9315130e-1f) * r + 1.0f)

/* 2^x for x of 0 and below, WIDE numbers at a time: to 2e-7 of it, 0 below -126, where sums would be
 * slow for some CPUs. NaN stays NaN: what comes of a broken key must be seen. */
#ifdef __AVX512DQ__
#define WIDE PANEL
typedef row wide;
static inline wide power_of_2(wide x) {
    wide r = (wide)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (wide)_mm512_maskz_scalef_ps(normal, (__m512)POWER_OF_2(r), (__m512)x);
}
/* b where a is NaN. */
static inline wide larger_of(wide a, wide b) { return (wide)_mm512_max_ps((__m512)a, (__m512)b); }
static inline float largest_in(wide a) { return _mm512_reduce_max_ps((__m512)a); }
/* a * b + sum with one rounding. */
static inline wide wide_times_plus(wide a, wide b, wide sum) {
    return (wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
}
/* Half as many numbers with the same sum, where there are more than LANES. */
static inline vec fold(wide a) {
    return (vec)_mm512_castps512_ps256((__m512)a) + (vec)_mm512_extractf32x8_ps((__m512)a, 1);
}
#else
#define WIDE LANES
typedef vec wide;
static inline wide power_of_2(wide x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    ivec normal = ~(x < splat(-126.0f));
    x = (vec)((ivec)x & normal);
    vec n = (x - 0.5f + magic) - magic, r = x - n;
    ivec exponent = (__builtin_convertvector(n, ivec) + 127) << 23;
    return (vec)((ivec)(POWER_OF_2(r) * (vec)exponent) & normal);
}
static inline wide larger_of(wide a, wide b) { return choose(a > b, a, b); }
static inline float largest_in(wide a) {
    a = larger_of(a, SHUFFLE(a, a, 4, 5, 6, 7, 0, 1, 2, 3));
    a = larger_of(a, SHUFFLE(a, a, 2, 3, 0, 1, 6, 7, 4, 5));
    return a[0] > a[1] ? a[0] : a[1];
}
static inline wide wide_times_plus(wide a, wide b, wide sum) { return fused(a, b, sum); }
static inline vec fold(wide a) { return a; }
#endif

static inline float sum(vec v) {
    float total = 0.0f;
    for (int i = 0; i < LANES; i++)
        total += v[i];
    return total;
}

/* The sums of LANES vectors, one in each lane. Lanes stay in their half until the end, and half of each
 * sum's lanes in their place: shuffles are what this costs. */
static inline vec sums(const vec d[LANES]) {
    vec pairs[LANES / 2], fours[LANES / 4];
    for (int i = 0; i < LANES / 2; i++)
        pairs[i] = SHUFFLE(d[2 * i], d[2 * i + 1], 0, 1, 10, 11, 4, 5, 14, 15) +
                   SHUFFLE(d[2 * i], d[2 * i + 1], 2, 3, 8, 9, 6, 7, 12, 13);
    for (int i = 0; i < LANES / 4; i++)
        fours[i] = SHUFFLE(pairs[2 * i], pairs[2 * i + 1], 0, 2, 8, 10, 4, 6, 12, 14) +
                   SHUFFLE(pairs[2 * i], pairs[2 * i + 1], 1, 3, 9, 11, 5, 7, 13, 15);
    return SHUFFLE(fours[0], fours[1], 0, 1, 2, 3, 12, 13, 14, 15) +
           SHUFFLE(fours[0], fours[1], 4, 5, 6, 7, 8, 9, 10, 11);
}

/* LANES vectors to their columns. */
static inline void transpose(vec v[LANES]) {
    vec pairs[LANES], fours[LANES];
    for (int i = 0; i < LANES; i += 2) {
        pairs[i] = SHUFFLE(v[i], v[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        pairs[i + 1] = SHUFFLE(v[i], v[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = i; j < i + 2; j++) {
            fours[j] = SHUFFLE(pairs[j], pairs[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            fours[j + 2] = SHUFFLE(pairs[j], pairs[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < LANES / 2; i++) {
        v[i] = SHUFFLE(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        v[i + 4] = SHUFFLE(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
