/* Float32 matrix products y = x W^T + b for a CPU.
 *
 * A few rows wait for the weights to come from memory, so weights that say less than their 32 bits
 * are kept shorter (compact.c finds out which) and are float32 again in a register. All that is
 * added up is the same, bit by bit. */
#include "weights.h"

/* Inputs of so many bytes stay in the second-level cache while all panels pass by. */
#define CHUNK_BYTES (192 * 1024)
/* Memory that is asked for before it is needed. */
#define AHEAD_BYTES 4096
/* Times that short weights are made floats again in registers before they are written down as such:
 * writing and reading them costs as much as making them six times (measured on Zen 4). */
#define MOST_PASSES 6

/* ---- a panel of codes or halves, for a few rows ------------------------------------------------ */

#define DEFINE_SHORT_PANEL(M)                                                                     \
    static void codes_##M(const float *x, size_t in, const code_block *w, const float *bias,      \
                          float *y, size_t stride) {                                              \
        row sums[M];                                                                              \
        UNROLL for (int m = 0; m < M; m++) sums[m] = load(bias);                                  \
        for (size_t first = 0; first < in; first += CODE_BLOCK, w++) {                            \
            row scale = load(w->scale), minus = load(w->minus);                                   \
            for (size_t i = 0; i < sizeof(code_block); i += LINE * sizeof(float))                 \
                __builtin_prefetch((const char *)w + AHEAD_BYTES + i, 0, 2);                      \
            for (size_t j = 0; j < CODE_BLOCK; j++) {                                             \
                row weights = from_codes(w->codes[j], scale, minus);                              \
                UNROLL for (int m = 0; m < M; m++)                                                \
                    sums[m] = times_plus(weights, x[m * in + first + j], sums[m]);                \
            }                                                                                     \
        }                                                                                         \
        UNROLL for (int m = 0; m < M; m++) store(y + m * stride, sums[m]);                        \
    }                                                                                             \
    static void halves_##M(const float *x, size_t in, const uint16_t *w, const float *bias,       \
                           float *y, size_t stride) {                                             \
        row sums[M];                                                                              \
        UNROLL for (int m = 0; m < M; m++) sums[m] = load(bias);                                  \
        for (size_t k = 0; k < in; k++, w += PANEL) {                                             \
            row weights = from_halves(w);                                                         \
            __builtin_prefetch((const char *)w + AHEAD_BYTES, 0, 2);                              \
            UNROLL for (int m = 0; m < M; m++)                                                    \
                sums[m] = times_plus(weights, x[m * in + k], sums[m]);                            \
        }                                                                                         \
        UNROLL for (int m = 0; m < M; m++) store(y + m * stride, sums[m]);                        \
    }
EVERY_COUNT(DEFINE_SHORT_PANEL)

#define CASE_SHORT(M)                                                  \
    case M:                                                            \
        if (kind == CODES)                                             \
            codes_##M(x, in, (const code_block *)w, bias, y, stride);  \
        else                                                           \
            halves_##M(x, in, (const uint16_t *)w, bias, y, stride);   \
        break;

static void short_panel(int kind, int rows, const float *x, size_t in, const char *w,
                        const float *bias, float *y, size_t stride) {
    switch (rows) { EVERY_COUNT(CASE_SHORT) }
}

/* ---- all of a matrix ---------------------------------------------------------------------------- */

/* The same panel as float32, for many rows. */
static void expand(int kind, const char *w, size_t in, float *to) {
    if (kind == CODES)
        expand_codes((const code_block *)w, in, to);
    else
        for (size_t i = 0; i < in * PANEL; i += PANEL)
            store(to + i, from_halves((const uint16_t *)w + i));
}

/* `width` of the panel's features are wanted, from the feature that y and bias point at. */
static void panel_rows(int kind, const float *x, size_t rows, size_t in, const char *w,
                       const float *bias, float *y, size_t stride, size_t width, float *room) {
    static const float zeros[PANEL];
    float padded[PANEL] = {0}, part[ROWS * PANEL];
    if (bias == NULL) {
        bias = zeros;
    } else if (width < PANEL) {
        memcpy(padded, bias, width * sizeof(float));
        bias = padded;
    }
    if (kind != FLOATS && rows > MOST_PASSES * ROWS && room != NULL) {
        expand(kind, w, in, room);
        kind = FLOATS;
        w = (const char *)room;
    }
    size_t blocks = (rows + ROWS - 1) / ROWS, step = blocks < PANEL ? PANEL / blocks : 1;
    for (size_t block = 0; block < blocks; block++) {
        /* Even blocks: where 6 go at a time, 8 rows are 4 and 4, not 6 and 2. */
        size_t start = rows * block / blocks, count = rows * (block + 1) / blocks - start;
        const float *from = x + start * in, *weights = (const float *)w;
        const float *soon = weights + in * PANEL + in * block / blocks * PANEL;
        float *to = width == PANEL ? y + start * stride : part;
        size_t to_stride = width == PANEL ? stride : PANEL;
        if (kind == FLOATS)
            panel((int)count, from, in, weights, bias, to, to_stride, soon, step);
        else
            short_panel(kind, (int)count, from, in, w, bias, to, to_stride);
        for (size_t m = 0; m < count && to == part; m++)
            memcpy(y + (start + m) * stride, part + m * PANEL, width * sizeof(float));
    }
}

/* x [rows, in], w [ceil(out / PANEL)] panels of this kind, bias [out] or NULL -> y [rows, out]. */
void stagemesh_linear(const float *x, int64_t rows, int64_t in, int kind, const char *w,
                      int64_t out, const float *bias, float *y, int threads) {
    int64_t panels = (out + PANEL - 1) / PANEL, panel_bytes = (int64_t)bytes_of_panel(kind, (size_t)in);
    int64_t chunk = CHUNK_BYTES / (int64_t)sizeof(float) / in / ROWS * ROWS;
    if (chunk < ROWS)
        chunk = ROWS;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        /* Without room every few rows make their own floats of the codes, which only takes longer. */
        float *room = NULL;
        if (kind != FLOATS && rows > MOST_PASSES * ROWS)
            room = malloc((size_t)in * PANEL * sizeof(float));
        for (int64_t start = 0; start < rows; start += chunk) {
            int64_t count = rows - start < chunk ? rows - start : chunk;
#pragma omp for schedule(static)
            for (int64_t p = 0; p < panels; p++) {
                int64_t feature = p * PANEL, left = out - feature;
                panel_rows(kind, x + start * in, (size_t)count, (size_t)in, w + p * panel_bytes,
                           bias == NULL ? NULL : bias + feature, y + start * out + feature,
                           (size_t)out, (size_t)(left < PANEL ? left : PANEL), room);
            }
        }
        free(room);
    }
}

int64_t stagemesh_panel_bytes(int kind, int64_t in) { return (int64_t)bytes_of_panel(kind, (size_t)in); }
int64_t stagemesh_panel(void) { return PANEL; }
