/* Float32 attention of prompt chunks over the paged cache, where it lies.
 *
 * Query rows stand side by side in a register, one in each lane: a position's key is multiplied with
 * all of them, number by number, so neither keys nor values have to be brought into another order,
 * however few rows there are. All KV heads that fit attend a span of positions before the next, so
 * the cache is read once, as it lies, and fetched beside the arithmetic. What a row adds up, and in
 * which order, is the same however its prompt is cut, where all values are finite: those that a row
 * does not see it may add 0 times. */
#include "cache.h"
#include "kernels.h"
#include "vector.h"

/* Floats of a tile's queries, and of their sums: 288 KB together, which stay in the second-level cache
 * while all keys and values pass by. */
#define TILE_FLOATS (36 * 1024)
/* Query rows (queries times heads of a group) of a KV head in a tile. More would be fewer tiles for
 * threads to share. */
#define MOST_ROWS 192
/* Numbers of a position's keys that a tile attends: a span and the next find room beside it. */
#define MOST_WIDTH 512
#define MAX_DIM 256

typedef struct {
    float queries[TILE_FLOATS];  /* of one head after the other, in panels of rows, [dim][PANEL] */
    float out[TILE_FLOATS];      /* [row][dim] */
    float weights[SPAN * PANEL]; /* of one panel, [position][row] */
    float best[TILE_FLOATS / PANEL], total[TILE_FLOATS / PANEL];
} tile __attribute__((aligned(LINE * sizeof(float))));

/* A span that is fetched beside the products of the one before, so evenly that neither waits. */
typedef struct {
    const span *span;
    int64_t width, offset, step;
    int position, lines; /* of keys, and as many of values, for each `step` numbers of a product */
} ahead;

/* More at once make a core wait (measured on Zen 4). */
#define MOST_LINES 2

static ahead fetch_beside(const span *s, int64_t width, int64_t dim, int64_t products) {
    ahead a = {s, width, 0, dim, 0, 0};
    int64_t lines = s->count * width / LINE;
    while (a.step % 2 == 0 && lines > MOST_LINES * products) {
        a.step /= 2;
        products *= 2;
    }
    a.lines = (int)((lines + products - 1) / products);
    return a;
}

static inline void fetch(ahead *a) {
    for (int line = 0; line < a->lines && a->position < a->span->count; line++) {
        __builtin_prefetch(a->span->keys[a->position] + a->offset, 0, 2);
        __builtin_prefetch(a->span->values[a->position] + a->offset, 0, 2);
        a->offset += LINE;
        if (a->offset >= a->width) {
            a->offset = 0;
            a->position++;
        }
    }
}

/* What row's functions are, for the first half of a panel. The other half is 0. */
#define times_plus_half vec_times_plus
static inline vec load_half(const float *from) { return *(const vec *)from; }
static inline void store_half(float *to, vec v) { store(to, nothing()), *(vec *)to = v; }
static inline vec nothing_half(void) { return (vec){0}; }

/* Queries [dim][PANEL] against M keys [dim], at this offset -> scores [M][PANEL]. */
#define SCORES(M, type, half)                                                                     \
    static void scores##half##_##M(const float *queries, const float *const *keys, int64_t offset, \
                                   int64_t dim, float *scores, ahead *soon) {                     \
        type sums[M];                                                                             \
        int64_t step = soon->step;                                                                \
        UNROLL for (int m = 0; m < M; m++) sums[m] = nothing##half();                             \
        for (int64_t d = offset; d < offset + dim;) {                                             \
            fetch(soon);                                                                          \
            for (int64_t end = d + step; d < end; d++, queries += PANEL) {                        \
                type numbers = load##half(queries);                                               \
                UNROLL for (int m = 0; m < M; m++)                                                \
                    sums[m] = times_plus##half(numbers, keys[m][d], sums[m]);                     \
            }                                                                                     \
        }                                                                                         \
        UNROLL for (int m = 0; m < M; m++) store##half(scores + m * PANEL, sums[m]);              \
    }
#define DEFINE_SCORES(M) SCORES(M, row, ) SCORES(M, vec, _half)
/* out [M][dim] += weights [count][PANEL], of their first M rows, times values [count][dim]. */
#define DEFINE_MIX(M)                                                                             \
    static void mix_##M(const float *weights, const float *const *values, int64_t offset,         \
                        int count, int64_t dim, float *out) {                                     \
        for (int64_t d = 0; d < dim; d += PANEL) {                                                \
            row sums[M];                                                                          \
            UNROLL for (int m = 0; m < M; m++) sums[m] = load(out + m * dim + d);                 \
            for (int t = 0; t < count; t++) {                                                     \
                row numbers = load(values[t] + offset + d);                                       \
                UNROLL for (int m = 0; m < M; m++)                                                \
                    sums[m] = times_plus(numbers, weights[t * PANEL + m], sums[m]);               \
            }                                                                                     \
            UNROLL for (int m = 0; m < M; m++) store(out + m * dim + d, sums[m]);                 \
        }                                                                                         \
    }
EVERY_COUNT(DEFINE_SCORES)
EVERY_COUNT(DEFINE_MIX)

#define CASE_SCORES(M)                                                      \
    case M:                                                                 \
        if (rows > LANES)                                                   \
            scores_##M(queries, keys, offset, dim, scores, soon);           \
        else                                                                \
            scores_half_##M(queries, keys, offset, dim, scores, soon);      \
        break;
#define CASE_MIX(M) \
    case M: mix_##M(weights, values, offset, count, dim, out); break;

static void score(int rows, int count, const float *queries, const float *const *keys,
                  int64_t offset, int64_t dim, float *scores, ahead *soon) {
    switch (count) { EVERY_COUNT(CASE_SCORES) }
}

static void mix(int rows, const float *weights, const float *const *values, int64_t offset,
                int count, int64_t dim, float *out) {
    switch (rows) { EVERY_COUNT(CASE_MIX) }
}

/* Scores of `count` positions, as powers of 2, to weights, WIDE rows side by side; rescales what
 * these have summed up, with a running maximum (Milakov and Gimelshein, 2018). */
static void soften(float *scores, int count, float *best, float *total, float *out, int64_t dim,
                   int rows) {
    wide before = *(wide *)best, largest = before, part = {0};
    for (int t = 0; t < count; t++)
        largest = larger_of(*(wide *)(scores + t * PANEL), largest);
    for (int t = 0; t < count; t++) {
        wide e = power_of_2(*(wide *)(scores + t * PANEL) - largest);
        *(wide *)(scores + t * PANEL) = e;
        part += e;
    }
    /* 0 the first time. */
    wide keep = power_of_2(before - largest);
    *(wide *)best = largest;
    *(wide *)total = *(wide *)total * keep + part;
    for (int r = 0; r < rows; r++) {
        if (keep[r] == 1.0f)
            continue;
        for (int64_t d = 0; d < dim; d += LANES)
            *(vec *)(out + r * dim + d) *= keep[r];
    }
}

/* Queries of a tile: `rows` rows of each of `heads` KV heads, `padded` apart. Row r of a head is the
 * query at position first + r / group. */
typedef struct {
    int64_t heads, first, padded;
    int rows, group;
} queries;

/* The rows of one panel, from row `from` of the head on, against a span. */
static void attend_panel(tile *t, const queries *q, int64_t head, int from, const span *s,
                         int64_t dim, ahead *soon) {
    int rows = q->rows - from < PANEL ? q->rows - from : PANEL;
    int64_t at = head * q->padded + from, offset = head * dim;
    /* The diagonal: a row sees nothing behind its own position, so none what is behind the last's. */
    int64_t all_see = q->first + from / q->group + 1 - s->start;
    int64_t some_see = q->first + (from + rows - 1) / q->group + 1 - s->start;
    int count = some_see < s->count ? (int)some_see : s->count;
    for (int p = 0; p < count; p += ROWS)
        score(rows, count - p < ROWS ? count - p : ROWS, t->queries + at * dim, s->keys + p, offset,
              dim, t->weights + p * PANEL, soon);
    for (int64_t p = all_see > 0 ? all_see : 0; p < count; p++) {
        int64_t blind = (s->start + p - q->first) * q->group - from;
        for (int64_t r = 0; r < blind && r < PANEL; r++)
            t->weights[p * PANEL + r] = -__builtin_inff();
    }
    for (int r = 0; r < rows; r += WIDE)
        soften(t->weights + r, count, t->best + at + r, t->total + at + r, t->out + (at + r) * dim,
               dim, rows - r < WIDE ? rows - r : WIDE);
    for (int r = 0; r < rows; r += ROWS)
        mix(rows - r < ROWS ? rows - r : ROWS, t->weights + r, s->values, offset, count, dim,
            t->out + (at + r) * dim);
}

static void attend_tile(tile *t, const sequence *s, int64_t kv_head, const queries *q) {
    int64_t dim = s->dim, first = q->first, last = first + (q->rows - 1) / q->group;
    memset(t->out, 0, (size_t)(q->heads * q->padded * dim) * sizeof(float));
    for (int64_t r = 0; r < q->heads * q->padded; r++) {
        t->best[r] = LEAST;
        t->total[r] = 0.0f;
    }
    span first_span, second_span, *now = &first_span, *next = &second_span;
    find(s, kv_head, 0, last + 1, now);
    for (int64_t start = 0; start <= last; start += SPAN) {
        next->count = 0;
        if (start + SPAN <= last)
            find(s, kv_head, start + SPAN, last + 1, next);
        /* Panels before the span see nothing of it. */
        int begin = start > first ? (int)(start - first) * q->group / PANEL * PANEL : 0;
        int64_t panels = q->heads * (q->padded - begin) / PANEL;
        ahead soon = fetch_beside(next, q->heads * dim, dim, panels * (SPAN / ROWS));
        for (int64_t head = 0; head < q->heads; head++)
            for (int from = begin; from < q->rows; from += PANEL)
                attend_panel(t, q, head, from, now, dim, &soon);
        span *done = now;
        now = next;
        next = done;
    }
}

/* Rows of qkv [.., width] from `query` on to panels; rows behind the last are 0. */
static void take_queries(const float *query, int64_t width, const queries *q, int64_t dim,
                         float scale, float *panels) {
    for (int r = 0; r < q->padded; r++) {
        float *to = panels + r / PANEL * PANEL * dim + r % PANEL;
        const float *from = query + r / q->group * width + r % q->group * dim;
        for (int64_t d = 0; d < dim; d++)
            to[d * PANEL] = r < q->rows ? from[d] * scale : 0.0f;
    }
}

/* Sums of a head's rows -> y [.., width]. */
static void give_sums(const float *out, const float *total, const queries *q, int64_t dim,
                      int64_t width, float *y) {
    for (int r = 0; r < q->rows; r++) {
        float *to = y + r / q->group * width + r % q->group * dim;
        float inverse = 1.0f / total[r];
        for (int64_t d = 0; d < dim; d += LANES)
            *(vec *)(to + d) = *(vec *)(out + r * dim + d) * inverse;
    }
}

static inline int64_t whole_panels(int64_t rows) { return (rows + PANEL - 1) / PANEL * PANEL; }

/* The `count` rows of qkv [.., width] are the queries at positions first, first + 1 ... of a
 * sequence with this block table, whose keys and values are in the cache; each attends what is not
 * behind it. -> y [count, heads, dim]. Returns 0, or -1 where there is no memory. */
int stagemesh_prompt_attention(const float *qkv, int64_t width, int64_t count, int64_t first,
                               int64_t heads, int64_t kv_heads, int64_t dim, const float *keys,
                               const float *values, int64_t block_size, const int64_t *table,
                               float scale, float *y, int threads) {
    int64_t group = heads / kv_heads, failed = 0;
    int64_t room = TILE_FLOATS / dim / PANEL * PANEL; /* rows */
    int64_t most = smaller(count, smaller(room, MOST_ROWS) / group);
    int64_t tiles = (count + most - 1) / most;
    /* KV heads that are attended together: all that fit, unless threads would have nothing to do. */
    int64_t together = smaller(room / whole_panels(most * group), MOST_WIDTH / dim);
    together = smaller(together, (tiles * kv_heads + threads - 1) / threads);
    together = smaller(together, kv_heads);
    int64_t parts = (kv_heads + together - 1) / together;
    sequence s = {keys, values, table, first + count, block_size, kv_heads, dim, (int)group};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        tile *t = aligned_alloc(_Alignof(tile), sizeof(tile));
        if (t == NULL)
            failed = 1;
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < tiles * parts; unit++) {
            if (t == NULL)
                continue;
            int64_t start = unit / parts * most, kv_head = unit % parts * together;
            int64_t rows = smaller(count - start, most) * group;
            queries q = {smaller(kv_heads - kv_head, together), first + start, whole_panels(rows),
                         (int)rows, (int)group};
            const float *query = qkv + start * width + kv_head * group * dim;
            float *to = y + (start * heads + kv_head * group) * dim;
            for (int64_t head = 0; head < q.heads; head++)
                take_queries(query + head * group * dim, width, &q, dim, scale * LOG2_E,
                             t->queries + head * q.padded * dim);
            attend_tile(t, &s, kv_head, &q);
            for (int64_t head = 0; head < q.heads; head++)
                give_sums(t->out + head * q.padded * dim, t->total + head * q.padded, &q, dim,
                          heads * dim, to + head * group * dim);
        }
        free(t);
    }
    return failed ? -1 : 0;
}

int64_t stagemesh_max_dim(void) { return MAX_DIM; }
