/* Float32 kernels for small batches on a CPU: what a decode step is made of.
 *
 * Plain C with the vector extension of GCC and Clang, so that the same source is AVX2, AVX-512 or
 * NEON by the compiler's flags. Every row's sums are added in one order whatever the batch, so a
 * sequence's result does not depend on its company. Compiled on first use by `kernels/build.py`.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 8
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* ---- y = x W^T + b ------------------------------------------------------------------------ */

/* A panel is PANEL output features, stored input feature by input feature: [in][PANEL]. */
#define PANEL (2 * LANES)
/* Rows at a time: 2 x 6 sums, 2 weights and 1 input are 15 of AVX2's 16 registers. */
#define ROWS 6
/* Inputs of so many bytes stay in the second-level cache while all panels pass by. */
#define CHUNK_BYTES (192 * 1024)

/* `soon` is where the next panel begins to be fetched from, `step` floats for each input: several
 * passes over one panel share the fetching of the next, so that memory is never idle. */
#define DEFINE_PANEL(M)                                                                           \
    static void panel_##M(const float *x, size_t in, const float *w, const float *bias, float *y, \
                          size_t stride, const float *soon, size_t step) {                        \
        vec low[M], high[M];                                                                      \
        for (int m = 0; m < M; m++) {                                                             \
            low[m] = *(const vec *)bias;                                                          \
            high[m] = *(const vec *)(bias + LANES);                                               \
        }                                                                                         \
        for (size_t k = 0; k < in; k++) {                                                         \
            vec w0 = *(const vec *)(w + k * PANEL), w1 = *(const vec *)(w + k * PANEL + LANES);   \
            __builtin_prefetch(soon + k * step, 0, 2);                                            \
            _Pragma("GCC unroll 8") for (int m = 0; m < M; m++) {                                 \
                float s = x[m * in + k];                                                          \
                low[m] += w0 * s;                                                                 \
                high[m] += w1 * s;                                                                \
            }                                                                                     \
        }                                                                                         \
        for (int m = 0; m < M; m++) {                                                             \
            *(vec *)(y + m * stride) = low[m];                                                    \
            *(vec *)(y + m * stride + LANES) = high[m];                                           \
        }                                                                                         \
    }
DEFINE_PANEL(1)
DEFINE_PANEL(2)
DEFINE_PANEL(3)
DEFINE_PANEL(4)
DEFINE_PANEL(5)
DEFINE_PANEL(6)

static void panel(int rows, const float *x, size_t in, const float *w, const float *bias, float *y,
                  size_t stride, const float *soon, size_t step) {
    switch (rows) {
    case 1: panel_1(x, in, w, bias, y, stride, soon, step); break;
    case 2: panel_2(x, in, w, bias, y, stride, soon, step); break;
    case 3: panel_3(x, in, w, bias, y, stride, soon, step); break;
    case 4: panel_4(x, in, w, bias, y, stride, soon, step); break;
    case 5: panel_5(x, in, w, bias, y, stride, soon, step); break;
    default: panel_6(x, in, w, bias, y, stride, soon, step);
    }
}

/* `width` of the panel's features are wanted, from the feature that y and bias point at. */
static void panel_rows(const float *x, size_t rows, size_t in, const float *w, const float *bias,
                       float *y, size_t stride, size_t width) {
    static const float zeros[PANEL];
    float padded[PANEL] = {0}, part[ROWS * PANEL];
    if (bias == NULL) {
        bias = zeros;
    } else if (width < PANEL) {
        memcpy(padded, bias, width * sizeof(float));
        bias = padded;
    }
    size_t blocks = (rows + ROWS - 1) / ROWS, step = blocks < PANEL ? PANEL / blocks : 1;
    for (size_t block = 0; block < blocks; block++) {
        /* Even blocks: 8 rows are 4 and 4, not 6 and 2. */
        size_t start = rows * block / blocks, count = rows * (block + 1) / blocks - start;
        const float *from = x + start * in;
        float *to = y + start * stride;
        const float *soon = w + in * PANEL + in * block / blocks * PANEL;
        if (width == PANEL) {
            panel((int)count, from, in, w, bias, to, stride, soon, step);
            continue;
        }
        panel((int)count, from, in, w, bias, part, PANEL, soon, step);
        for (size_t m = 0; m < count; m++)
            memcpy(to + m * stride, part + m * PANEL, width * sizeof(float));
    }
}

/* x [rows, in], w [ceil(out / PANEL)][in][PANEL], bias [out] or NULL -> y [rows, out]. */
void stagemesh_linear(const float *x, int64_t rows, int64_t in, const float *w, int64_t out,
                      const float *bias, float *y, int threads) {
    int64_t panels = (out + PANEL - 1) / PANEL;
    int64_t chunk = CHUNK_BYTES / (int64_t)sizeof(float) / in / ROWS * ROWS;
    if (chunk < ROWS)
        chunk = ROWS;
    for (int64_t start = 0; start < rows; start += chunk) {
        int64_t count = rows - start < chunk ? rows - start : chunk;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int64_t p = 0; p < panels; p++) {
            int64_t feature = p * PANEL, left = out - feature;
            panel_rows(x + start * in, (size_t)count, (size_t)in, w + feature * in,
                       bias == NULL ? NULL : bias + feature, y + start * out + feature,
                       (size_t)out, (size_t)(left < PANEL ? left : PANEL));
        }
    }
}

/* ---- elementwise -------------------------------------------------------------------------- */

static inline vec choose(ivec mask, vec yes, vec no) {
    return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

static inline vec splat(float value) {
    return (vec){0} + value;
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

/* gate_up [rows, 2 * width] -> y [rows, width]: silu(gate) * up. width is a multiple of LANES. */
void stagemesh_silu_mul(const float *gate_up, int64_t rows, int64_t width, float *y) {
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + row * 2 * width, *up = gate + width;
        float *to = y + row * width;
        for (int64_t i = 0; i < width; i += LANES) {
            vec g = *(const vec *)(gate + i);
            *(vec *)(to + i) = g / (vexp(-g) + 1.0f) * *(const vec *)(up + i);
        }
    }
}

static inline float sum(vec v) {
    float total = 0.0f;
    for (int i = 0; i < LANES; i++)
        total += v[i];
    return total;
}

/* x [rows, width] -> y [rows, width]: x / sqrt(mean(x^2) + eps) * weight. width is a multiple of
 * LANES. */
void stagemesh_rms_norm(const float *x, int64_t rows, int64_t width, const float *weight, float eps,
                        float *y) {
    for (int64_t row = 0; row < rows; row++, x += width, y += width) {
        vec squares = {0};
        for (int64_t i = 0; i < width; i += LANES) {
            vec v = *(const vec *)(x + i);
            squares += v * v;
        }
        float factor = 1.0f / __builtin_sqrtf(sum(squares) / (float)width + eps);
        for (int64_t i = 0; i < width; i += LANES)
            *(vec *)(y + i) = *(const vec *)(x + i) * factor * *(const vec *)(weight + i);
    }
}

/* Rotates queries and keys of qkv [rows, heads + 2 * kv_heads, dim] in place by cos and signed
 * sin [rows, dim], and stores keys and values at the rows `slots` [rows] of the caches
 * [.., kv_heads, dim]. dim is a multiple of 2 * LANES. */
void stagemesh_rotate_and_store(float *qkv, int64_t rows, int64_t heads, int64_t kv_heads,
                                int64_t dim, const float *cosines, const float *sines,
                                const int64_t *slots, float *keys, float *values) {
    int64_t half = dim / 2, kv = kv_heads * dim, width = (heads + 2 * kv_heads) * dim;
    for (int64_t row = 0; row < rows; row++) {
        float *x = qkv + row * width;
        const float *c = cosines + row * dim, *s = sines + row * dim;
        for (int64_t head = 0; head < heads + kv_heads; head++, x += dim) {
            for (int64_t i = 0; i < half; i += LANES) {
                vec a = *(vec *)(x + i), b = *(vec *)(x + half + i);
                *(vec *)(x + i) = a * *(const vec *)(c + i) + b * *(const vec *)(s + i);
                *(vec *)(x + half + i) =
                    b * *(const vec *)(c + half + i) + a * *(const vec *)(s + half + i);
            }
        }
        memcpy(keys + slots[row] * kv, x - kv, (size_t)kv * sizeof(float));
        memcpy(values + slots[row] * kv, x, (size_t)kv * sizeof(float));
    }
}

/* ---- attention of decode rows over the paged cache ------------------------------------------ */

/* Positions at a time: their scores stay in registers and the first-level cache. */
#define SPAN 64
#define MAX_GROUP 32

typedef struct {
    const float *keys, *values;
    const int64_t *table;
    int64_t length, block_size, kv_heads, dim;
    int group; /* query heads of one KV head */
} sequence;

static inline const float *entry(const sequence *s, const float *cache, int64_t position,
                                 int64_t kv_head) {
    int64_t slot = s->table[position / s->block_size] * s->block_size + position % s->block_size;
    return cache + (slot * s->kv_heads + kv_head) * s->dim;
}

/* One KV head's query heads q [group, dim] -> out [group, dim], with a running maximum
 * (Milakov and Gimelshein, 2018), so that nothing of the length of the sequence is kept. */
static void attend(const sequence *s, int64_t kv_head, const float *q, float scale, float *out) {
    float scores[MAX_GROUP * SPAN], best[MAX_GROUP], total[MAX_GROUP];
    int64_t dim = s->dim;
    for (int g = 0; g < s->group; g++) {
        best[g] = -__builtin_inff();
        total[g] = 0.0f;
    }
    memset(out, 0, (size_t)s->group * (size_t)dim * sizeof(float));
    for (int64_t start = 0; start < s->length; start += SPAN) {
        int count = (int)(s->length - start < SPAN ? s->length - start : SPAN);
        for (int t = 0; t < count; t++) {
            const float *key = entry(s, s->keys, start + t, kv_head);
            for (int g = 0; g < s->group; g++) {
                vec dot = {0};
                for (int64_t i = 0; i < dim; i += LANES)
                    dot += *(const vec *)(q + g * dim + i) * *(const vec *)(key + i);
                scores[g * SPAN + t] = sum(dot) * scale;
            }
        }
        for (int g = 0; g < s->group; g++) {
            float *row = scores + g * SPAN, top = best[g];
            for (int t = 0; t < count; t++)
                top = row[t] > top ? row[t] : top;
            for (int t = count; t < SPAN; t++)
                row[t] = -__builtin_inff();
            /* exp(-inf) is 0 the first time. */
            float keep = vexp(splat(best[g] - top))[0];
            best[g] = top;
            vec part = {0};
            for (int t = 0; t < SPAN; t += LANES) {
                vec e = vexp(*(vec *)(row + t) - top);
                *(vec *)(row + t) = e;
                part += e;
            }
            total[g] = total[g] * keep + sum(part);
            for (int64_t i = 0; i < dim; i += LANES)
                *(vec *)(out + g * dim + i) *= keep;
        }
        for (int t = 0; t < count; t++) {
            const float *value = entry(s, s->values, start + t, kv_head);
            for (int g = 0; g < s->group; g++) {
                float weight = scores[g * SPAN + t];
                for (int64_t i = 0; i < dim; i += LANES)
                    *(vec *)(out + g * dim + i) += *(const vec *)(value + i) * weight;
            }
        }
    }
    for (int g = 0; g < s->group; g++) {
        float inverse = 1.0f / total[g];
        for (int64_t i = 0; i < dim; i += LANES)
            *(vec *)(out + g * dim + i) *= inverse;
    }
}

/* Row r of the rows `indices` [rows] of qkv [.., width] attends the first lengths[r] positions of
 * the blocks tables[r * blocks ...]; the result goes to the same row of y [.., heads, dim]. */
void stagemesh_decode_attention(const float *qkv, int64_t width, const int64_t *indices,
                                int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim,
                                const float *keys, const float *values, int64_t block_size,
                                const int64_t *tables, int64_t blocks, const int64_t *lengths,
                                float scale, float *y, int threads) {
    int group = (int)(heads / kv_heads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t unit = 0; unit < rows * kv_heads; unit++) {
        int64_t row = unit / kv_heads, kv_head = unit % kv_heads;
        int64_t offset = kv_head * group * dim;
        sequence s = {keys,       values,   tables + row * blocks, lengths[row],
                      block_size, kv_heads, dim,                   group};
        attend(&s, kv_head, qkv + indices[row] * width + offset, scale,
               y + indices[row] * heads * dim + offset);
    }
}

int64_t stagemesh_panel(void) { return PANEL; }
int64_t stagemesh_lanes(void) { return LANES; }
int64_t stagemesh_max_group(void) { return MAX_GROUP; }
