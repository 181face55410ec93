/* Float32 matrix products y = x W^T + b for a CPU.
 *
 * A few rows wait for the weights to come from memory, so weights that say less than their 32 bits
 * are kept shorter (compact.c finds out which) and are float32 again in a register. All that is
 * added up is the same, bit by bit.
 *
 * Many rows wait for arithmetic. Rows that share a weight lie interleaved, [in][rows], so that the
 * kernel reads one stream of inputs beside one of weights, and both come in time from the
 * second-level cache (Goto and van de Geijn, 2008). */
#include "kernels.h"
#include "weights.h"

/* Rows that share a weight: as many as there are registers for their sums. */
#ifdef __AVX512F__
#define GROUP 24
#define EVERY_GROUP(DO)                                                                           \
    EVERY_COUNT(DO) DO(9) DO(10) DO(11) DO(12) DO(13) DO(14) DO(15) DO(16) DO(17) DO(18) DO(19)   \
    DO(20) DO(21) DO(22) DO(23) DO(24)
#else
#define GROUP ROWS
#define EVERY_GROUP(DO) EVERY_COUNT(DO)
#endif

/* Inputs of so many bytes stay in the second-level cache while all panels pass by. */
#define CHUNK_BYTES (384 * 1024)
/* Memory that is asked for before it is needed. */
#define AHEAD_BYTES 4096
/* Groups of rows that make short weights floats again in registers before these are written down:
 * writing and reading them costs as much as making them so many times (measured on Zen 4). */
#define MOST_PASSES (48 / GROUP)

/* ---- a panel for a group of rows ---------------------------------------------------------------- */

#define UNROLL_GROUP _Pragma("GCC unroll 24")

/* Memory that is fetched beside a product, which does not wait for it. */
typedef struct {
    const char *at;
    size_t step;
} stream;

static inline void fetch(stream *s) {
    __builtin_prefetch(s->at, 0, 2);
    s->at += s->step;
}

static inline size_t divided(size_t amount, size_t parts) { return (amount + parts - 1) / parts; }

/* x [in][M] -> y [M][PANEL]. `soon` and `later` are fetched beside it, so many bytes for each input. */
#define DEFINE_GROUP(M)                                                                           \
    static void floats_##M(const float *x, size_t in, const float *w, const float *bias,          \
                           float *y, size_t stride, stream soon, stream later) {                  \
        row sums[M];                                                                              \
        UNROLL_GROUP for (int m = 0; m < M; m++) sums[m] = load(bias);                            \
        for (size_t k = 0; k < in; k++, w += PANEL, x += M) {                                     \
            row weights = load(w);                                                                \
            fetch(&soon);                                                                         \
            fetch(&later);                                                                        \
            UNROLL_GROUP for (int m = 0; m < M; m++) sums[m] = times_plus(weights, x[m], sums[m]); \
        }                                                                                         \
        UNROLL_GROUP for (int m = 0; m < M; m++) store(y + m * stride, sums[m]);                  \
    }                                                                                             \
    static void codes_##M(const float *x, size_t in, const code_block *w, const float *bias,      \
                          float *y, size_t stride, stream later) {                                \
        row sums[M];                                                                              \
        UNROLL_GROUP for (int m = 0; m < M; m++) sums[m] = load(bias);                            \
        for (size_t first = 0; first < in; first += CODE_BLOCK, w++) {                            \
            row scale = load(w->scale), minus = load(w->minus);                                   \
            for (size_t i = 0; i < sizeof(code_block); i += LINE * sizeof(float))                 \
                __builtin_prefetch((const char *)w + AHEAD_BYTES + i, 0, 2);                      \
            for (size_t j = 0; j < CODE_BLOCK; j++, x += M) {                                     \
                row weights = from_codes(w->codes[j], scale, minus);                              \
                fetch(&later);                                                                    \
                UNROLL_GROUP for (int m = 0; m < M; m++)                                          \
                    sums[m] = times_plus(weights, x[m], sums[m]);                                 \
            }                                                                                     \
        }                                                                                         \
        UNROLL_GROUP for (int m = 0; m < M; m++) store(y + m * stride, sums[m]);                  \
    }                                                                                             \
    static void halves_##M(const float *x, size_t in, const uint16_t *w, const float *bias,       \
                           float *y, size_t stride, stream later) {                               \
        row sums[M];                                                                              \
        UNROLL_GROUP for (int m = 0; m < M; m++) sums[m] = load(bias);                            \
        for (size_t k = 0; k < in; k++, w += PANEL, x += M) {                                     \
            row weights = from_halves(w);                                                         \
            __builtin_prefetch((const char *)w + AHEAD_BYTES, 0, 2);                              \
            fetch(&later);                                                                        \
            UNROLL_GROUP for (int m = 0; m < M; m++)                                              \
                sums[m] = times_plus(weights, x[m], sums[m]);                                     \
        }                                                                                         \
        UNROLL_GROUP for (int m = 0; m < M; m++) store(y + m * stride, sums[m]);                  \
    }
EVERY_GROUP(DEFINE_GROUP)

#define CASE_GROUP(M)                                                       \
    case M:                                                                 \
        if (kind == FLOATS)                                                 \
            floats_##M(x, in, w, bias, y, stride, soon, later);             \
        else if (kind == CODES)                                             \
            codes_##M(x, in, w, bias, y, stride, later);                    \
        else                                                                \
            halves_##M(x, in, w, bias, y, stride, later);                   \
        break;

static void group(int kind, size_t rows, const float *x, size_t in, const void *w,
                  const float *bias, float *y, size_t stride, stream soon, stream later) {
    switch (rows) { EVERY_GROUP(CASE_GROUP) }
}

/* ---- all of a matrix ---------------------------------------------------------------------------- */

/* Rows in groups of even size: where 6 go at a time, 8 rows are 4 and 4, not 6 and 2. */
typedef struct {
    size_t rows, groups;
} grouping;

static inline grouping in_groups(size_t rows, size_t most) {
    return (grouping){rows, divided(rows, most)};
}

static inline size_t group_start(grouping g, size_t number) { return g.rows * number / g.groups; }

/* x [rows][in] -> to [in][rows]. */
static void interleave(const float *x, size_t rows, size_t in, float *to) {
    size_t whole_rows = rows / LANES * LANES, whole_in = in / LANES * LANES;
    for (size_t k = 0; k < in; k += LANES) {
        size_t squares = k < whole_in ? whole_rows : 0, left = k < whole_in ? LANES : in - k;
        for (size_t m = 0; m < squares; m += LANES) {
            vec square[LANES];
            for (int i = 0; i < LANES; i++)
                square[i] = *(const vec *)(x + (m + i) * in + k);
            transpose(square);
            for (int i = 0; i < LANES; i++)
                *(vec *)(to + (k + i) * rows + m) = square[i];
        }
        for (size_t m = squares; m < rows; m++)
            for (size_t i = 0; i < left; i++)
                to[(k + i) * rows + m] = x[m * in + k + i];
    }
}

/* The same panel as float32, for many rows. */
static void expand(int kind, const char *w, size_t in, float *to) {
    if (kind == CODES)
        expand_codes((const code_block *)w, in, to);
    else
        for (size_t i = 0; i < in * PANEL; i += PANEL)
            store(to + i, from_halves((const uint16_t *)w + i));
}

/* x holds the groups one after the other. `width` of the panel's features are wanted, from the
 * feature that y and bias point at. `room` is for a panel of floats, or NULL; `later` is for the
 * first group. */
static void panel_rows(int kind, const float *x, grouping g, size_t in, const char *w,
                       const float *bias, float *y, size_t stride, size_t width, float *room,
                       stream later) {
    static const float zeros[PANEL];
    float padded[PANEL] = {0}, part[GROUP * PANEL];
    /* The groups that a panel passes by share the fetching of the next. */
    size_t bytes = bytes_of_panel(kind, in);
    stream soon = {w + bytes, divided(bytes, in * g.groups)};
    if (bias == NULL) {
        bias = zeros;
    } else if (width < PANEL) {
        memcpy(padded, bias, width * sizeof(float));
        bias = padded;
    }
    if (kind != FLOATS && room != NULL) {
        expand(kind, w, in, room);
        kind = FLOATS;
        w = (const char *)room;
    }
    for (size_t number = 0; number < g.groups; number++, soon.at += soon.step * in) {
        size_t start = group_start(g, number), count = group_start(g, number + 1) - start;
        float *to = width == PANEL ? y + start * stride : part;
        size_t to_stride = width == PANEL ? stride : PANEL;
        group(kind, count, x + start * in, in, w, bias, to, to_stride, soon, later);
        later = (stream){w, 0};
        for (size_t m = 0; m < count && to == part; m++)
            memcpy(y + (start + m) * stride, part + m * PANEL, width * sizeof(float));
    }
}

/* Memory of a thread that is kept from product to product, so that no page is asked for again. */
typedef struct {
    float *floats;
    size_t size;
} memory;
static _Thread_local memory for_inputs, for_panel;

/* NULL where there is none. */
static float *at_least(memory *kept, size_t size) {
    if (kept->size < size) {
        free(kept->floats);
        kept->floats = malloc(size * sizeof(float));
        kept->size = kept->floats == NULL ? 0 : size;
    }
    return kept->floats;
}

/* What is fetched beside a panel. */
static stream beside(const to_come *cache, int64_t panel, const char *w, size_t in) {
    int64_t part = cache == NULL ? 0 : cache->next + panel;
    if (cache == NULL || part >= 2 * cache->num_blocks)
        return (stream){w, 0};
    const char *base = part % 2 ? cache->values : cache->keys;
    size_t bytes = (size_t)cache->block_bytes;
    return (stream){base + (size_t)cache->blocks[part / 2] * bytes, divided(bytes, in)};
}

/* x [rows, in], w [ceil(out / PANEL)] panels of this kind, bias [out] or NULL -> y [rows, out]. As
 * much of `cache` as fits beside it, or NULL, is fetched meanwhile. */
void stagemesh_linear_beside(const float *x, int64_t rows, int64_t in, int kind, const char *w,
                             int64_t out, const float *bias, float *y, int threads,
                             to_come *cache) {
    int64_t panels = (out + PANEL - 1) / PANEL, panel_bytes = (int64_t)bytes_of_panel(kind, (size_t)in);
    int64_t chunk = CHUNK_BYTES / (int64_t)sizeof(float) / in / GROUP * GROUP;
    if (chunk < GROUP)
        chunk = GROUP;
    if (chunk > rows)
        chunk = rows;
    /* One row is interleaved as it is, so that is the way where there is no memory. */
    size_t most = GROUP;
    float *interleaved = rows == 1 ? NULL : at_least(&for_inputs, (size_t)(chunk * in));
    if (interleaved == NULL)
        most = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        for (int64_t start = 0; start < rows; start += chunk) {
            grouping g = in_groups((size_t)(rows - start < chunk ? rows - start : chunk), most);
            const float *given = x + start * in, *inputs = given;
            if (interleaved != NULL) {
                inputs = interleaved;
#pragma omp for schedule(static)
                for (size_t number = 0; number < g.groups; number++) {
                    size_t first = group_start(g, number);
                    interleave(given + first * (size_t)in, group_start(g, number + 1) - first,
                               (size_t)in, interleaved + first * (size_t)in);
                }
            }
            float *room = NULL;
            if (kind != FLOATS && g.groups > MOST_PASSES)
                room = at_least(&for_panel, (size_t)in * PANEL);
#pragma omp for schedule(static)
            for (int64_t p = 0; p < panels; p++) {
                int64_t feature = p * PANEL, left = out - feature;
                panel_rows(kind, inputs, g, (size_t)in, w + p * panel_bytes,
                           bias == NULL ? NULL : bias + feature, y + start * out + feature,
                           (size_t)out, (size_t)(left < PANEL ? left : PANEL), room,
                           beside(start == 0 ? cache : NULL, p, w, (size_t)in));
            }
        }
    }
    if (cache != NULL)
        cache->next += panels;
}

void stagemesh_linear(const float *x, int64_t rows, int64_t in, int kind, const char *w,
                      int64_t out, const float *bias, float *y, int threads) {
    stagemesh_linear_beside(x, rows, in, kind, w, out, bias, y, threads, NULL);
}

int64_t stagemesh_panel_bytes(int kind, int64_t in) { return (int64_t)bytes_of_panel(kind, (size_t)in); }
int64_t stagemesh_panel(void) { return PANEL; }
