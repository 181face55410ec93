/* Pre-norm transformer blocks, one after the other in one call.
 *
 * What is between two kernels stays in memory that the caller keeps from step to step, so that it
 * lies in a cache and nothing is asked of the system. The structures are those of
 * `kernels/native_blocks.py`. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    const float *weight;
    float eps;
} norm;

typedef struct {
    int kind;
    const char *panels;
    int64_t in, out;
    const float *bias; /* or NULL */
} product;

typedef struct {
    norm input_norm;
    product qkv, output;
    norm mlp_norm;
    product gate_up, down;
    float *keys, *values; /* the paged cache */
} block;

/* What all blocks of a stage share. */
typedef struct {
    int64_t hidden, heads, kv_heads, dim, mlp_width, block_size;
    float scale;
} sizes;

/* Rows `indices` [rows] of the step, each the last token of its sequence. */
typedef struct {
    int64_t rows;
    const int64_t *indices, *tables, *lengths;
    int64_t blocks; /* of each row in `tables` */
} decode_group;

/* Rows start to start + count of the step, at positions `first` and on of one sequence. */
typedef struct {
    int64_t start, count, first;
    const int64_t *table;
} prompt_chunk;

typedef struct {
    int64_t rows;
    const float *cosines, *sines; /* [rows, dim] */
    const int64_t *slots;         /* [rows] */
    int64_t num_groups, num_chunks;
    const decode_group *groups;
    const prompt_chunk *chunks;
} step;

static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static inline int64_t qkv_width(const sizes *s) { return (s->heads + 2 * s->kv_heads) * s->dim; }

static void multiply(const product *p, const float *x, int64_t rows, float *y, int threads,
                     to_come *cache) {
    stagemesh_linear_beside(x, rows, p->in, p->kind, p->panels, p->out, p->bias, y, threads, cache);
}

/* Writes which blocks decodes attend, in their order, to `blocks`, unless it is NULL; returns how
 * many. A prompt's are fetched beside its own arithmetic: here they would displace others. */
static int64_t attended_blocks(const sizes *s, const step *step, int64_t *blocks) {
    int64_t count = 0;
    for (const decode_group *g = step->groups; g < step->groups + step->num_groups; g++)
        for (int64_t row = 0; row < g->rows; row++) {
            int64_t used = (g->lengths[row] + s->block_size - 1) / s->block_size;
            if (blocks != NULL)
                memcpy(blocks + count, g->tables + row * g->blocks, (size_t)used * sizeof *blocks);
            count += used;
        }
    return count;
}

static to_come cache_of(const sizes *s, const block *b, const int64_t *blocks, int64_t count) {
    int64_t bytes = s->block_size * s->kv_heads * s->dim * (int64_t)sizeof(float);
    return (to_come){(const char *)b->keys, (const char *)b->values, blocks, count, bytes, 0};
}

static void normalize(const norm *n, const float *x, int64_t rows, int64_t width, float *y) {
    stagemesh_rms_norm(x, rows, width, n->weight, n->eps, y);
}

static void add(float *to, const float *y, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        to[i] += y[i];
}

/* qkv [rows, heads + 2 * kv_heads, dim] -> y [rows, heads, dim]. */
static int attention(const sizes *s, const block *b, const step *step, float *qkv, float *y,
                     int threads) {
    int64_t width = qkv_width(s), attended = s->heads * s->dim;
    stagemesh_rotate_and_store(qkv, step->rows, s->heads, s->kv_heads, s->dim, step->cosines,
                               step->sines, step->slots, b->keys, b->values);
    for (int64_t i = 0; i < step->num_groups; i++) {
        const decode_group *g = step->groups + i;
        stagemesh_decode_attention(qkv, width, g->indices, g->rows, s->heads, s->kv_heads, s->dim,
                                   b->keys, b->values, s->block_size, g->tables, g->blocks,
                                   g->lengths, s->scale, y, threads);
    }
    int failed = 0;
    for (int64_t i = 0; i < step->num_chunks && !failed; i++) {
        const prompt_chunk *c = step->chunks + i;
        failed = stagemesh_prompt_attention(qkv + c->start * width, width, c->count, c->first,
                                            s->heads, s->kv_heads, s->dim, b->keys, b->values,
                                            s->block_size, c->table, s->scale,
                                            y + c->start * attended, threads);
    }
    return failed;
}

/* Floats that a row needs of the narrower things between two kernels, and of the wider ones. */
static inline int64_t narrow(const sizes *s) { return larger(s->hidden, s->heads * s->dim); }
static inline int64_t wide(const sizes *s) {
    return larger(s->hidden, larger(qkv_width(s), 2 * s->mlp_width));
}

int64_t stagemesh_room_for_a_row(const sizes *s) { return narrow(s) + wide(s); }

/* hidden [rows, hidden] through `count` blocks, in place. `room` is for `rows` rows. Returns 0, or -1
 * where there is no memory for the attention of a prompt. */
int stagemesh_blocks(const sizes *s, const block *blocks, int64_t count, const step *step,
                     float *hidden, float *room, int threads) {
    int64_t rows = step->rows, numbers = rows * s->hidden;
    float *a = room, *b = room + rows * narrow(s);
    int64_t num_attended = attended_blocks(s, step, NULL);
    /* Without memory for it nothing is fetched ahead. */
    int64_t *attended = malloc((size_t)num_attended * sizeof *attended);
    if (attended == NULL)
        num_attended = 0;
    else
        attended_blocks(s, step, attended);
    int failed = 0;
    to_come cache = cache_of(s, blocks, attended, num_attended);
    for (const block *one = blocks; one < blocks + count && !failed; one++) {
        normalize(&one->input_norm, hidden, rows, s->hidden, a);
        multiply(&one->qkv, a, rows, b, threads, &cache);
        failed = attention(s, one, step, b, a, threads);
        const block *next = one + 1 < blocks + count ? one + 1 : one;
        cache = cache_of(s, next, attended, next == one ? 0 : num_attended);
        multiply(&one->output, a, rows, b, threads, &cache);
        add(hidden, b, numbers);
        normalize(&one->mlp_norm, hidden, rows, s->hidden, a);
        multiply(&one->gate_up, a, rows, b, threads, &cache);
        /* In place: a row's result never lies behind what is still to be read. */
        stagemesh_silu_mul(b, rows, s->mlp_width, b);
        multiply(&one->down, b, rows, a, threads, &cache);
        add(hidden, a, numbers);
    }
    free(attended);
    return failed;
}
