/* Float32 attention of prompt chunks over the paged cache, where it lies.
 *
 * Query rows stand side by side in a register, one in each lane: a position's key is multiplied with
 * all of them, number by number, so neither keys nor values have to be brought into another order,
 * however few rows there are. What a row adds up, and in which order, is the same however its
 * prompt is cut. */
#include "cache.h"
#include "kernels.h"
#include "vector.h"

/* Query rows (queries times heads of a group) at a time; with their sums they stay in the
 * second-level cache while all keys and values pass by. */
#define TILE_ROWS 192
#define MAX_DIM 256

typedef struct {
    float queries[TILE_ROWS * MAX_DIM];   /* in panels of rows, [dim][PANEL] */
    float weights[SPAN * PANEL];          /* of one panel, [position][row] */
    float best[TILE_ROWS], total[TILE_ROWS];
    float out[TILE_ROWS * MAX_DIM]; /* [row][dim] */
} tile;

/* Queries [dim][PANEL] against M keys [dim] -> scores [M][PANEL]. */
#define DEFINE_SCORES(M)                                                                          \
    static void scores_##M(const float *queries, const float *const *keys, int64_t dim,           \
                           float *scores) {                                                       \
        row sums[M];                                                                              \
        UNROLL for (int m = 0; m < M; m++) sums[m] = nothing();                                   \
        for (int64_t d = 0; d < dim; d++) {                                                       \
            row numbers = load(queries + d * PANEL);                                              \
            UNROLL for (int m = 0; m < M; m++)                                                    \
                sums[m] = times_plus(numbers, keys[m][d], sums[m]);                               \
        }                                                                                         \
        UNROLL for (int m = 0; m < M; m++) store(scores + m * PANEL, sums[m]);                    \
    }
/* out [M][dim] += weights [count][PANEL], of their first M rows, times values [count][dim]. */
#define DEFINE_MIX(M)                                                                             \
    static void mix_##M(const float *weights, const float *const *values, int count, int64_t dim, \
                        float *out) {                                                             \
        for (int64_t d = 0; d < dim; d += PANEL) {                                                \
            row sums[M];                                                                          \
            UNROLL for (int m = 0; m < M; m++) sums[m] = load(out + m * dim + d);                 \
            for (int t = 0; t < count; t++) {                                                     \
                row numbers = load(values[t] + d);                                                \
                UNROLL for (int m = 0; m < M; m++)                                                \
                    sums[m] = times_plus(numbers, weights[t * PANEL + m], sums[m]);               \
            }                                                                                     \
            UNROLL for (int m = 0; m < M; m++) store(out + m * dim + d, sums[m]);                 \
        }                                                                                         \
    }
EVERY_COUNT(DEFINE_SCORES)
EVERY_COUNT(DEFINE_MIX)

#define CASE_SCORES(M) \
    case M: scores_##M(queries, keys, dim, scores); break;
#define CASE_MIX(M) \
    case M: mix_##M(weights, values, count, dim, out); break;

static void score(int count, const float *queries, const float *const *keys, int64_t dim,
                  float *scores) {
    switch (count) { EVERY_COUNT(CASE_SCORES) }
}

static void mix(int rows, const float *weights, const float *const *values, int count, int64_t dim,
                float *out) {
    switch (rows) { EVERY_COUNT(CASE_MIX) }
}

/* Scores of `count` positions to weights, LANES rows side by side; rescales what these have summed
 * up, with a running maximum (Milakov and Gimelshein, 2018). */
static void soften(float *scores, int count, float *best, float *total, float *out, int64_t dim,
                   int rows) {
    vec before = *(vec *)best, largest = before, part = {0};
    for (int t = 0; t < count; t++) {
        vec s = *(vec *)(scores + t * PANEL);
        largest = choose(s > largest, s, largest);
    }
    for (int t = 0; t < count; t++) {
        vec e = vexp(*(vec *)(scores + t * PANEL) - largest);
        *(vec *)(scores + t * PANEL) = e;
        part += e;
    }
    /* exp(-inf) is 0 the first time. */
    vec keep = vexp(before - largest);
    *(vec *)best = largest;
    *(vec *)total = *(vec *)total * keep + part;
    for (int r = 0; r < rows; r++) {
        if (keep[r] == 1.0f)
            continue;
        for (int64_t d = 0; d < dim; d += LANES)
            *(vec *)(out + r * dim + d) *= keep[r];
    }
}

/* Keys or values [dim] of positions that follow each other. */
typedef struct {
    const float *keys[SPAN], *values[SPAN];
    int64_t start;
    int count;
} span;

static void find(const sequence *s, int64_t kv_head, int64_t start, int64_t end, span *to) {
    to->start = start;
    to->count = (int)(end - start < SPAN ? end - start : SPAN);
    locate(s, s->keys, kv_head, start, to->count, to->keys);
    locate(s, s->values, kv_head, start, to->count, to->values);
}

static void fetch(const span *s, int from, int count, int64_t dim) {
    for (int p = from; p < from + count && p < s->count; p++)
        for (int64_t d = 0; d < dim; d += LINE) {
            __builtin_prefetch(s->keys[p] + d, 0, 2);
            __builtin_prefetch(s->values[p] + d, 0, 2);
        }
}

/* The rows of one panel, `rows` from row `from` of the tile on, against a span of positions. Row r
 * of the tile is the query at position first + r / group. `soon`, or NULL, is fetched meanwhile. */
static void attend_panel(tile *t, int from, int rows, int group, int64_t first, const span *s,
                         const span *soon, int64_t dim) {
    int count = s->count;
    int64_t start = s->start;
    for (int p = 0; p < count; p += ROWS) {
        int some = count - p < ROWS ? count - p : ROWS;
        if (soon != NULL)
            fetch(soon, p, some, dim);
        score(some, t->queries + from * dim, s->keys + p, dim, t->weights + p * PANEL);
    }
    /* The diagonal: a row sees nothing behind its own position. */
    for (int p = 0; p < count; p++) {
        int64_t blind = (start + p - first) * group - from;
        for (int64_t r = 0; r < blind && r < PANEL; r++)
            t->weights[p * PANEL + r] = -__builtin_inff();
    }
    for (int r = 0; r < rows; r += LANES)
        soften(t->weights + r, count, t->best + from + r, t->total + from + r,
               t->out + (from + r) * dim, dim, rows - r < LANES ? rows - r : LANES);
    for (int r = 0; r < rows; r += ROWS)
        mix(rows - r < ROWS ? rows - r : ROWS, t->weights + r, s->values, count, dim,
            t->out + (from + r) * dim);
}

/* `rows` rows of the tile. */
static void attend_tile(tile *t, const sequence *s, int64_t kv_head, int rows, int64_t first) {
    int64_t dim = s->dim, last = first + (rows - 1) / s->group;
    memset(t->out, 0, (size_t)rows * (size_t)dim * sizeof(float));
    for (int r = 0; r < TILE_ROWS; r++) {
        t->best[r] = -__builtin_inff();
        t->total[r] = 0.0f;
    }
    span first_span, second_span, *now = &first_span, *next = &second_span;
    find(s, kv_head, 0, last + 1, now);
    for (int64_t start = 0; start <= last; start += SPAN) {
        int is_last = start + SPAN > last;
        if (!is_last)
            find(s, kv_head, start + SPAN, last + 1, next);
        /* Panels before the span see nothing of it. */
        int begin = start > first ? (int)(start - first) * s->group / PANEL * PANEL : 0;
        for (int from = begin; from < rows; from += PANEL)
            attend_panel(t, from, rows - from < PANEL ? rows - from : PANEL, s->group, first, now,
                         from > begin || is_last ? NULL : next, dim);
        span *done = now;
        now = next;
        next = done;
    }
}

/* Rows of qkv [.., width] from `query` on to the tile's panels; rows behind the last are 0. */
static void take_queries(tile *t, const float *query, int64_t width, int rows, int group,
                         int64_t dim, float scale) {
    for (int r = 0; r < (rows + PANEL - 1) / PANEL * PANEL; r++) {
        float *to = t->queries + r / PANEL * PANEL * dim + r % PANEL;
        const float *q = query + r / group * width + r % group * dim;
        for (int64_t d = 0; d < dim; d++)
            to[d * PANEL] = r < rows ? q[d] * scale : 0.0f;
    }
}

/* The `count` rows of qkv [.., width] are the queries at positions first, first + 1 ... of a
 * sequence with this block table, whose keys and values are in the cache; each attends what is not
 * behind it. -> y [count, heads, dim]. Returns 0, or -1 where there is no memory. */
int stagemesh_prompt_attention(const float *qkv, int64_t width, int64_t count, int64_t first,
                               int64_t heads, int64_t kv_heads, int64_t dim, const float *keys,
                               const float *values, int64_t block_size, const int64_t *table,
                               float scale, float *y, int threads) {
    int group = (int)(heads / kv_heads), failed = 0;
    int64_t queries = TILE_ROWS / group, tiles = (count + queries - 1) / queries;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        tile *t = malloc(sizeof(tile));
        if (t == NULL)
            failed = 1;
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < tiles * kv_heads; unit++) {
            int64_t kv_head = unit / tiles, start = unit % tiles * queries;
            int64_t taken = count - start < queries ? count - start : queries;
            sequence s = {keys,       values,   table, first + count,
                          block_size, kv_heads, dim,   group};
            if (t == NULL)
                continue;
            int rows = (int)taken * group;
            take_queries(t, qkv + start * width + kv_head * group * dim, width, rows, group, dim,
                         scale);
            attend_tile(t, &s, kv_head, rows, first + start);
            for (int64_t r = 0; r < rows; r++) {
                float *to = y + ((start + r / group) * heads + kv_head * group + r % group) * dim;
                float inverse = 1.0f / t->total[r];
                for (int64_t i = 0; i < dim; i += LANES)
                    *(vec *)(to + i) = *(vec *)(t->out + r * dim + i) * inverse;
            }
        }
        free(t);
    }
    return failed ? -1 : 0;
}

int64_t stagemesh_max_dim(void) { return MAX_DIM; }
