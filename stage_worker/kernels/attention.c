/* Float32 attention of decode rows over the paged cache, where it lies. */
#include "cache.h"
#include "kernels.h"
#include "vector.h"

#define MAX_GROUP 32
/* Query heads at a time; a group at least. */
#define MAX_HEADS 64

#ifdef __AVX512DQ__ /* 32 registers */
#define MOST_PRODUCTS 3
#define KEYS 4
#define MOST_ROWS 4
#else
#define MOST_PRODUCTS 1
#define KEYS LANES
#define MOST_ROWS 1
#endif

/* H query heads q [H][dim] of one KV head against LANES keys [dim], KEYS at a time -> LANES products of
 * each, SPAN apart. As much of `soon` is fetched, and the keys that come next once more: a core
 * drops what it is asked to fetch while too much is under way (measured on Zen 4: the cache comes
 * with 18 GB/s where keys are asked for once, with 24 where twice). */
#define DEFINE_PRODUCTS(H)                                                                        \
    static void products_##H(const float *q, const float *const *keys, const float *const *soon,  \
                             int64_t offset, int64_t dim, float scale, float *scores) {           \
        vec d[H][LANES];                                                                          \
        UNROLL for (int l = 0; l < LANES; l += KEYS) {                                            \
            wide part[H][KEYS] = {0};                                                             \
            for (int64_t i = 0; i < dim; i += WIDE) {                                             \
                UNROLL for (int k = 0; k < KEYS; k++) {                                           \
                    wide key = *(const wide *)(keys[l + k] + offset + i);                         \
                    UNROLL for (int h = 0; h < H; h++)                                            \
                        part[h][k] = wide_times_plus(*(const wide *)(q + h * dim + i), key,       \
                                                     part[h][k]);                                 \
                }                                                                                 \
                if (soon != NULL && i % LINE == 0)                                                \
                    UNROLL for (int k = 0; k < KEYS; k++) {                                       \
                        __builtin_prefetch(soon[l + k] + offset + i, 0, 2);                       \
                        __builtin_prefetch(keys[l + k + LANES] + offset + i, 0, 2);               \
                    }                                                                             \
            }                                                                                     \
            UNROLL for (int h = 0; h < H; h++)                                                    \
                UNROLL for (int k = 0; k < KEYS; k++) d[h][l + k] = fold(part[h][k]);             \
        }                                                                                         \
        UNROLL for (int h = 0; h < H; h++) *(vec *)(scores + h * SPAN) = sums(d[h]) * scale;      \
    }
DEFINE_PRODUCTS(1)
#if MOST_PRODUCTS > 1
DEFINE_PRODUCTS(2)
DEFINE_PRODUCTS(3)
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

/* The first R * PANEL features of out [M][dim] += weights [M][SPAN] x values [count][dim]; as much of
 * `soon` is fetched. */
#define DEFINE_MIX(M, R)                                                                          \
    static void mix_##M##_##R(const float *weights, const float *const *values,                   \
                              const float *const *soon, int64_t offset, int count, int64_t dim,   \
                              float *out) {                                                       \
        row mixed[M][R];                                                                          \
        UNROLL for (int m = 0; m < M; m++)                                                        \
            UNROLL for (int r = 0; r < R; r++) mixed[m][r] = load(out + m * dim + r * PANEL);     \
        for (int t = 0; t < count; t++) {                                                         \
            row value[R];                                                                         \
            UNROLL for (int r = 0; r < R; r++) {                                                  \
                value[r] = load(values[t] + offset + r * PANEL);                                  \
                __builtin_prefetch(soon[t] + offset + r * PANEL, 0, 2);                           \
            }                                                                                     \
            UNROLL for (int m = 0; m < M; m++)                                                    \
                UNROLL for (int r = 0; r < R; r++)                                                \
                    mixed[m][r] = times_plus(value[r], weights[m * SPAN + t], mixed[m][r]);       \
        }                                                                                         \
        UNROLL for (int m = 0; m < M; m++)                                                        \
            UNROLL for (int r = 0; r < R; r++) store(out + m * dim + r * PANEL, mixed[m][r]);     \
    }
#define CASE_MIX(M, R)                                                                            \
    case M: mix_##M##_##R(weights, values, soon, offset + i, count, dim, out + i); break;
#define EVERY_MIX(DO, R) DO(1, R) DO(2, R) DO(3, R) DO(4, R)
EVERY_MIX(DEFINE_MIX, 1)
#if MOST_ROWS > 1
EVERY_MIX(DEFINE_MIX, 4)
#endif

static void mix(int heads, const float *weights, const float *const *values,
                const float *const *soon, int64_t offset, int count, int64_t dim, float *out) {
    int64_t i = 0;
#if MOST_ROWS > 1
    for (; i + MOST_ROWS * PANEL <= dim; i += MOST_ROWS * PANEL)
        switch (heads) { EVERY_MIX(CASE_MIX, 4) }
#endif
    for (; i < dim; i += PANEL)
        switch (heads) { EVERY_MIX(CASE_MIX, 1) }
}

/* Scores of `count` positions of a span, as powers of 2, to weights; rescales what these have summed up,
 * with a running maximum (Milakov and Gimelshein, 2018), so that nothing of the sequence's length
 * is kept. */
static void soften(float *scores, int count, float *best, wide *total, float *out, int64_t dim) {
    for (int i = count; i % WIDE != 0; i++)
        scores[i] = -__builtin_inff();
    wide largest = *(wide *)scores, part = {0};
    for (int i = WIDE; i < count; i += WIDE)
        largest = larger_of(*(wide *)(scores + i), largest);
    float before = *best, top = largest_in(largest);
    if (top > before) {
        /* 0 the first time. */
        float keep = power_of_2((wide){0} + (before - top))[0];
        *total *= keep;
        for (int64_t i = 0; i < dim; i += LANES)
            *(vec *)(out + i) *= keep;
        *best = top;
    }
    for (int i = 0; i < count; i += WIDE) {
        wide e = power_of_2(*(wide *)(scores + i) - *best);
        *(wide *)(scores + i) = e;
        part += e;
    }
    *total += part;
}

/* Positions of a span of this sequence: about as many in the last as in the others, so that each has time
 * to fetch the next. */
static int64_t span_size(const sequence *s) {
    int64_t spans = (s->length + SPAN - 1) / SPAN, size = (s->length + spans - 1) / spans;
    return (size + LANES - 1) / LANES * LANES;
}

/* The query heads q [heads, dim] of KV heads `kv_head` and on -> out [heads, dim]. A position's
 * keys of all heads lie together, and so do a block's positions: the cache is read as it lies.
 * The first keys of the sequence `after` are fetched at the end. */
static void attend(const sequence *s, const sequence *after, int64_t kv_head, int heads,
                   const float *q, float scale, float *out) {
    float scores[MAX_HEADS * SPAN] __attribute__((aligned(LINE * sizeof(float))));
    float best[MAX_HEADS];
    wide total[MAX_HEADS];
    span first, second, *now = &first, *next = &second;
    int64_t dim = s->dim, group = s->group, size = span_size(s);
    for (int h = 0; h < heads; h++) {
        best[h] = LEAST;
        total[h] = (wide){0};
    }
    memset(out, 0, (size_t)heads * (size_t)dim * sizeof(float));
    find(s, kv_head, 0, smaller(size, s->length), now);
    for (int64_t start = 0; start < s->length; start += size) {
        int count = now->count, padded = (count + LANES - 1) / LANES * LANES;
        /* Behind the end the last one again: its product is not looked at. */
        for (int t = count; t < padded + LANES; t++)
            now->keys[t] = now->keys[count - 1];
        for (int t = count; t < padded; t++)
            now->values[t] = now->values[count - 1];
        if (start + size < s->length)
            find(s, kv_head, start + size, smaller(start + 2 * size, s->length), next);
        else
            find(after, kv_head, 0, smaller(span_size(after), after->length), next);
        for (int t = next->count; t < count; t++)
            next->keys[t] = now->values[t];
        /* Values come while keys are multiplied, and the next keys while values are: memory is
         * never idle, and nothing waits that could have been asked for before. */
        for (int t = 0; t < padded; t += LANES)
            for (int64_t h = 0; h < heads; h += group)
                for (int64_t g = 0; g < group; g += MOST_PRODUCTS)
                    products((int)smaller(group - g, MOST_PRODUCTS), q + (h + g) * dim,
                             now->keys + t, g == 0 ? now->values + t : NULL, h / group * dim, dim,
                             scale, scores + (h + g) * SPAN + t);
        for (int h = 0; h < heads; h++)
            soften(scores + h * SPAN, count, best + h, total + h, out + h * dim, dim);
        for (int64_t h = 0; h < heads; h += group)
            for (int64_t g = 0; g < group; g += 4)
                mix((int)smaller(group - g, 4), scores + (h + g) * SPAN, now->values, next->keys,
                    h / group * dim, count, dim, out + (h + g) * dim);
        span *done = now;
        now = next;
        next = done;
    }
    for (int h = 0; h < heads; h++) {
        float inverse = 1.0f / sum(fold(total[h]));
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
        attend(&s, &after, kv_head, (int)taken * group, qkv + indices[row] * width + offset,
               scale * LOG2_E, y + indices[row] * heads * dim + offset);
    }
}

int64_t stagemesh_max_group(void) { return MAX_GROUP; }
