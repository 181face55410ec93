/* Float32 kernels for a CPU: matrix products, and what stands between them in a layer. */
#include "vector.h"

/* ---- y = x W^T + b ------------------------------------------------------------------------ */

/* Inputs of so many bytes stay in the second-level cache while all panels pass by. */
#define CHUNK_BYTES (192 * 1024)

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

int64_t stagemesh_panel(void) { return PANEL; }
int64_t stagemesh_lanes(void) { return LANES; }
