/* How a panel of weights lies in memory: PANEL output features, input feature by input feature. */
#include "vector.h"

/* float32; or the upper halves of float32 whose lower ones are 0, which is bfloat16; or codes. */
enum { FLOATS, HALVES, CODES };

#define HALF_BITS 16

/* Inputs that share a scale in the block formats of GGUF. */
#define CODE_BLOCK 32

/* code * scale - minus, exactly what the weights were. Of CODE_BLOCK inputs. */
typedef struct {
    float scale[PANEL], minus[PANEL];
    int8_t codes[CODE_BLOCK][PANEL];
} code_block;

/* A row of codes or halves as float32. Of short vectors GCC 12 makes one lane after the other. */
#if defined(__AVX512F__)
static inline row floats_of(const int8_t *codes) {
    return (row)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes)));
}
static inline row from_halves(const uint16_t *halves) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)halves));
    return (row)_mm512_slli_epi32(wide, HALF_BITS);
}
static inline row scaled(row codes, row scale, row minus) { return codes * scale - minus; }
#else
#ifdef __AVX2__
static inline vec few_floats_of(const int8_t *codes) {
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
}
static inline vec from_few_halves(const uint16_t *halves) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)halves));
    return (vec)_mm256_slli_epi32(wide, HALF_BITS);
}
#else
typedef int8_t code_vec __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint16_t half_vec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t word_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
static inline vec few_floats_of(const int8_t *codes) {
    ivec wide = __builtin_convertvector(*(const code_vec *)codes, ivec);
    return __builtin_convertvector(wide, vec);
}
static inline vec from_few_halves(const uint16_t *halves) {
    return (vec)(__builtin_convertvector(*(const half_vec *)halves, word_vec) << HALF_BITS);
}
#endif
static inline row floats_of(const int8_t *codes) {
    return (row){few_floats_of(codes), few_floats_of(codes + LANES)};
}
static inline row from_halves(const uint16_t *halves) {
    return (row){from_few_halves(halves), from_few_halves(halves + LANES)};
}
static inline row scaled(row codes, row scale, row minus) {
    return (row){codes.low * scale.low - minus.low, codes.high * scale.high - minus.high};
}
#endif

/* The product has 24 bits or fewer (compact.c), so it makes no difference whether it is rounded. */
static inline row from_codes(const int8_t *codes, row scale, row minus) {
    return scaled(floats_of(codes), scale, minus);
}

static inline void expand_codes(const code_block *w, size_t in, float *to) {
    for (size_t first = 0; first < in; first += CODE_BLOCK, w++) {
        row scale = load(w->scale), minus = load(w->minus);
        for (size_t j = 0; j < CODE_BLOCK; j++, to += PANEL)
            store(to, from_codes(w->codes[j], scale, minus));
    }
}

static inline size_t bytes_of_panel(int kind, size_t in) {
    if (kind == CODES)
        return in / CODE_BLOCK * sizeof(code_block);
    return in * PANEL * (kind == HALVES ? sizeof(uint16_t) : sizeof(float));
}
