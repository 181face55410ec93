/* Float32 attention of decode rows over the paged cache, where it lies. */
#include "cache.h"
#include "kernels.h"
#include "vector.h"

#define MAX_GROUP 32
/* Query heads at a time; a group at least. */
#define MAX_HEADS 64

/* H query heads q [H][dim] of one KV head against LANES keys [dim] -> LANES products of each, SPAN
 * apart. As much of `soon` is fetched. */
#define DEFINE_PRODUCTS(H)                                                                        \
    static void products_##H(const float *q, const float *const *keys, const float *const *soon,  \
                             int64_t offset, int64_t dim, float scale, float *scores) {           \
        vec d[H][LANES] = {0};                                                                    \
        for (int64_t i = 0; i < dim; i += LANES) {                                                \
            UNROLL for (int l = 0; l < LANES; l++) {                                              \
                vec key = *(const vec *)(keys[l] + offset + i);                                   \
                UNROLL for (int h = 0; h < H; h++)                                                \
                    d[h][l] += *(const vec *)(q + h * dim + i) * key;                             \
            }                                                                                     \
            if (soon != NULL && i % LINE == 0)                                                    \
                for (int l = 0; l < LANES; l++)                                                   \
                    __builtin_prefetch(soon[l] + offset + i, 0, 2);                               \
        }                                                                                         \
        UNROLL for (int h = 0; h < H; h++) *(vec *)(scores + h * SPAN) = sums(d[h]) * scale;      \
    }
DEFINE_PRODUCTS(1)
#ifdef __AVX512VL__ /* 32 registers */
#define MOST_PRODUCTS 3
DEFINE_PRODUCTS(2)
DEFINE_PRODUCTS(3)
#else
#define MOST_PRODUCTS 1
#endif

static void products(int heads, const float *q, const float *const *keys, const float *const *soon,
                     int64_t offset, int64_t dim, float scale, float *scores) {
    switch (heads) {
#if MOST_PRODUCTS > 1
    case 3: products_3(q, keys, soon, offset, dim, scale, scores); break;
    case 2: products_2(q, keys, soon, offset, dim, scale, scores); break;
#endif
    default: products_1(q, keys, soon, offset, dim, scale, scores);
    }
}

/* out [M][dim] += weights [M][SPAN] x values [count][dim], PANEL features at a time; as much of
 * `soon` is fetched. */
#define DEFINE_MIX(M)                                                                             \
    static void mix_##M(const float *weights, const float *const *values,                         \
                        const float *const *soon, int64_t offset, int count, int64_t dim,         \
                        float *out) {                                                             \
        for (int64_t i = 0; i < dim; i += PANEL) {                                                \
            vec low[M], high[M];                                                                  \
            for (int m = 0; m < M; m++) {                                                         \
                low[m] = *(vec *)(out + m * dim + i);                                             \
                high[m] = *(vec *)(out + m * dim + i + LANES);                                    \
            }                                                                                     \
            for (int t = 0; t < count; t++) {                                                     \
                const float *value = values[t] + offset + i;                                      \
                vec v0 = *(const vec *)value, v1 = *(const vec *)(value + LANES);                 \
                __builtin_prefetch(soon[t] + offset + i, 0, 2);                                   \
                for (int m = 0; m < M; m++) {                                                     \
                    low[m] += v0 * weights[m * SPAN + t];                                         \
                    high[m] += v1 * weights[m * SPAN + t];                                        \
                }                                                                                 \
            }                                                                                     \
            for (int m = 0; m < M; m++) {                                                         \
                *(vec *)(out + m * dim + i) = low[m];                                             \
                *(vec *)(out + m * dim + i + LANES) = high[m];                                    \
            }                                                                                     \
        }                                                                                         \
    }
DEFINE_MIX(1)
DEFINE_MIX(2)
DEFINE_MIX(3)
DEFINE_MIX(4)

static void mix(int heads, const float *weights, const float *const *values,
                const float *const *soon, int64_t offset, int count, int64_t dim, float *out) {
    switch (heads) {
    case 1: mix_1(weights, values, soon, offset, count, dim, out); break;
    case 2: mix_2(weights, values, soon, offset, count, dim, out); break;
    case 3: mix_3(weights, values, soon, offset, count, dim, out); break;
    default: mix_4(weights, values, soon, offset, count, dim, out);
    }
}

/* Scores of `seen` positions of a span to weights of all SPAN, 0 behind them; rescales what is summed up, with a
 * running maximum (Milakov and Gimelshein, 2018), so that nothing of the sequence's length is
 * kept. */
static void soften(float *row, int64_t seen, float *best, float *total, float *out, int64_t dim) {
    vec largest = splat(*best), part = {0};
    float top = *best;
    int64_t padded = (seen + LANES - 1) / LANES * LANES;
    for (int64_t i = seen; i < padded; i++)
        row[i] = -__builtin_inff();
    for (int64_t i = 0; i < padded; i += LANES) {
        vec scores = *(vec *)(row + i);
        largest = choose(scores > largest, scores, largest);
    }
    for (int i = 0; i < LANES; i++)
        top = largest[i] > top ? largest[i] : top;
    for (int64_t i = 0; i < padded; i += LANES) {
        vec e = vexp(*(vec *)(row + i) - top);
        *(vec *)(row + i) = e;
        part += e;
    }
    for (int64_t i = padded; i < SPAN; i += LANES)
        *(vec *)(row + i) = splat(0.0f);
    if (top > *best) {
        /* exp(-inf) is 0 the first time. */
        float keep = vexp(splat(*best - top))[0];
        *total *= keep;
        for (int64_t i = 0; i < dim; i += LANES)
            *(vec *)(out + i) *= keep;
        *best = top;
    }
    *total += sum(part);
}

/* The query heads q [heads, dim] of KV heads `kv_head` and on -> out [heads, dim]. A position's
 * keys of all heads lie together, and so do a block's positions: the cache is read as it lies.
 * The first keys of the sequence `after` are fetched at the end. */
static void attend(const sequence *s, const sequence *after, int64_t kv_head, int heads,
                   const float *q, float scale, float *out) {
    float scores[MAX_HEADS * SPAN], best[MAX_HEADS], total[MAX_HEADS];
    const float *first[SPAN], *second[SPAN], *values[SPAN];
    const float **keys = first, **next_keys = second;
    int64_t dim = s->dim, group = s->group;
    for (int h = 0; h < heads; h++) {
        best[h] = -__builtin_inff();
        total[h] = 0.0f;
    }
    memset(out, 0, (size_t)heads * (size_t)dim * sizeof(float));
    locate(s, s->keys, kv_head, 0, span_end(s, 0), keys);
    for (int64_t start = 0; start < s->length; start += SPAN) {
        int count = (int)span_end(s, start), padded = (count + LANES - 1) / LANES * LANES;
        locate(s, s->values, kv_head, start, count, values);
        /* Behind the end the last one again: its product is not looked at. */
        for (int t = count; t < padded; t++) {
            keys[t] = keys[count - 1];
            values[t] = values[count - 1];
        }
        /* Values come while keys are multiplied, and the next keys while values are: memory is
         * never idle, and nothing waits that could have been asked for before. */
        for (int t = 0; t < padded; t += LANES)
            for (int64_t h = 0; h < heads; h += group)
                for (int64_t g = 0; g < group; g += MOST_PRODUCTS)
                    products((int)(group - g < MOST_PRODUCTS ? group - g : MOST_PRODUCTS),
                             q + (h + g) * dim, keys + t, g == 0 ? values + t : NULL,
                             h / group * dim, dim, scale, scores + (h + g) * SPAN + t);
        for (int h = 0; h < heads; h++)
            soften(scores + h * SPAN, count, best + h, total + h, out + h * dim, dim);
        int is_last = start + SPAN >= s->length;
        const sequence *next = is_last ? after : s;
        int64_t next_start = is_last ? 0 : start + SPAN, left = span_end(next, next_start);
        locate(next, next->keys, kv_head, next_start, left, next_keys);
        for (int64_t t = left; t < count; t++)
            next_keys[t] = values[t];
        for (int64_t h = 0; h < heads; h += group)
            for (int64_t g = 0; g < group; g += 4)
                mix((int)(group - g), scores + (h + g) * SPAN, values, next_keys, h / group * dim,
                    count, dim, out + (h + g) * dim);
        const float **done = keys;
        keys = next_keys;
        next_keys = done;
    }
    for (int h = 0; h < heads; h++) {
        float inverse = 1.0f / total[h];
        for (int64_t i = 0; i < dim; i += LANES)
            *(vec *)(out + h * dim + i) *= inverse;
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
    /* KV heads that are attended together: all, unless threads would have nothing to do. */
    int64_t together = MAX_HEADS / group < kv_heads ? MAX_HEADS / group : kv_heads;
    int64_t share = (kv_heads + threads - 1) / threads;
    if (rows < threads && share < together)
        together = share;
    int64_t parts = (kv_heads + together - 1) / together;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t unit = 0; unit < rows * parts; unit++) {
        int64_t row = unit / parts, kv_head = unit % parts * together;
        int64_t taken = kv_heads - kv_head < together ? kv_heads - kv_head : together;
        int64_t offset = kv_head * group * dim, following = row + 1 < rows ? row + 1 : row;
        sequence s = {keys,       values,   tables + row * blocks, lengths[row],
                      block_size, kv_heads, dim,                   group};
        sequence after = s;
        after.table = tables + following * blocks;
        after.length = lengths[following];
        attend(&s, &after, kv_head, (int)taken * group, qkv + indices[row] * width + offset, scale,
               y + indices[row] * heads * dim + offset);
    }
}

int64_t stagemesh_max_group(void) { return MAX_GROUP; }
