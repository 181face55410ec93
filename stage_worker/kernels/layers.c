/* Float32 kernels for what stands between the matrix products of a layer. */
#include "kernels.h"
#include "vector.h"

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

int64_t stagemesh_lanes(void) { return LANES; }
