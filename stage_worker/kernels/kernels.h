/* The kernels that other files of the library call. Each says at its definition what it does. */
#include <stdint.h>

/* Blocks of the paged cache that are attended soon. Products have time to fetch them: they wait for
 * arithmetic, and attention for memory. */
typedef struct {
    const char *keys, *values; /* of the layer */
    const int64_t *blocks;     /* [num_blocks], in the order in which they are attended */
    int64_t num_blocks, block_bytes;
    int64_t next; /* the first that is not fetched, a block's keys and its values counted apart */
} to_come;

void stagemesh_linear_beside(const float *x, int64_t rows, int64_t in, int kind, const char *w,
                             int64_t out, const float *bias, float *y, int threads,
                             to_come *cache);
void stagemesh_linear(const float *x, int64_t rows, int64_t in, int kind, const char *w,
                      int64_t out, const float *bias, float *y, int threads);
void stagemesh_silu_mul(const float *gate_up, int64_t rows, int64_t width, float *y);
void stagemesh_rms_norm(const float *x, int64_t rows, int64_t width, const float *weight, float eps,
                        float *y);
void stagemesh_rotate_and_store(float *qkv, int64_t rows, int64_t heads, int64_t kv_heads,
                                int64_t dim, const float *cosines, const float *sines,
                                const int64_t *slots, float *keys, float *values);
void stagemesh_decode_attention(const float *qkv, int64_t width, const int64_t *indices,
                                int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim,
                                const float *keys, const float *values, int64_t block_size,
                                const int64_t *tables, int64_t blocks, const int64_t *lengths,
                                float scale, float *y, int threads);
int stagemesh_prompt_attention(const float *qkv, int64_t width, int64_t count, int64_t first,
                               int64_t heads, int64_t kv_heads, int64_t dim, const float *keys,
                               const float *values, int64_t block_size, const int64_t *table,
                               float scale, float *y, int threads);
