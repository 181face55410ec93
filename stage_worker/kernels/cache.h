/* A sequence's keys and values in the paged cache. */
#include "vector.h"

/* Positions at a time: their scores stay in the first-level cache. */
#define SPAN 64

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

typedef struct {
    const float *keys, *values;
    const int64_t *table;
    int64_t length, block_size, kv_heads, dim;
    int group; /* query heads of one KV head */
} sequence;

/* Where keys or values of `count` positions from `start` lie, of all KV heads from this one on. */
static void locate(const sequence *s, const float *cache, int64_t kv_head, int64_t start,
                   int64_t count, const float **to) {
    int64_t width = s->kv_heads * s->dim, block = start / s->block_size, inside = start % s->block_size;
    const float *from = cache + kv_head * s->dim;
    for (int64_t t = 0; t < count; block++, inside = 0) {
        const float *next = from + (s->table[block] * s->block_size + inside) * width;
        for (; inside < s->block_size && t < count; inside++, next += width)
            to[t++] = next;
    }
}

/* Keys and values of positions that follow each other. */
typedef struct {
    const float *keys[SPAN + LANES], *values[SPAN]; /* Room to look a few keys ahead. */
    int64_t start;
    int count;
} span;

static void find(const sequence *s, int64_t kv_head, int64_t start, int64_t end, span *to) {
    to->start = start;
    to->count = (int)smaller(end - start, SPAN);
    locate(s, s->keys, kv_head, start, to->count, to->keys);
    locate(s, s->values, kv_head, start, to->count, to->values);
}
