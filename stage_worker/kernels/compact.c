/* Finds the codes behind float32 weights that were made from a quantized file.
 *
 * A block of GGUF is code * scale - minus with codes of 4 to 8 bits, a scale of few bits (a half's
 * 11, or 17 as the product of one with a block's 6) and a minus of as many. Whoever wrote float32
 * has rounded that once. So scale and minus can be found again, and what is found is kept only
 * where it gives every weight of the matrix exactly. */
#include "weights.h"

#define MOST_STEPS 16     /* between two codes that follow each other in a block */
#define MOST_MINUS 32     /* code of the least weight, where there is a minus */
#define MOST_CODE 127
#define SHORT_BITS 11     /* of a half */
#define LONG_BITS 17      /* of a half times a number of 6 bits; times a code 24, which a float has */

static inline double whole(double x) {
    const double magic = 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to a whole number */
    return (x + magic) - magic;
}

/* To the nearest number of so many bits. */
static inline double to_bits(double x, int bits) {
    uint64_t word;
    memcpy(&word, &x, sizeof word);
    word += UINT64_C(1) << (52 - bits);
    word &= ~((UINT64_C(1) << (53 - bits)) - 1);
    memcpy(&x, &word, sizeof x);
    return x;
}

static int encode(const float *w, double scale, double minus, int8_t *codes) {
    double inverse = 1.0 / scale;
    for (int i = 0; i < CODE_BLOCK; i++) {
        double code = whole((w[i] + minus) * inverse);
        if (code > MOST_CODE || code < -MOST_CODE || (float)(code * scale - minus) != w[i])
            return 0;
        codes[i] = (int8_t)code;
    }
    return 1;
}

/* The distinct weights of a block in order; returns how many. */
static int levels_of(const float *w, float *levels) {
    int count = 0;
    for (int i = 0; i < CODE_BLOCK; i++) {
        int at = count;
        while (at > 0 && levels[at - 1] > w[i])
            at--;
        if (at > 0 && levels[at - 1] == w[i])
            continue;
        memmove(levels + at + 1, levels + at, (size_t)(count - at) * sizeof(float));
        levels[at] = w[i];
        count++;
    }
    return count;
}

/* Whether all levels are whole steps from the first, as far as float32 can tell. */
static int evenly_spaced(const float *levels, int count, double step) {
    double first = levels[0], last = levels[count - 1];
    double error = 2.5e-7 * (last > -first ? last : -first);
    for (int i = 1; i < count; i++) {
        double from = levels[i] - first, off = from - whole(from / step) * step;
        if (off > error || off < -error)
            return 0;
    }
    return 1;
}

/* Codes of one block w [CODE_BLOCK]; returns whether there are any. */
static int solve(const float *w, float *scale, float *minus, int8_t *codes) {
    float levels[CODE_BLOCK];
    int count = levels_of(w, levels);
    double least = levels[0], most = levels[count - 1], step = most - least, farthest;
    *minus = 0.0f;
    if (!(step < 1e30)) /* infinite, or not a number */
        return 0;
    if (count == 1) {
        *scale = levels[0];
        memset(codes, 1, CODE_BLOCK);
        return 1;
    }
    for (int i = 1; i < count; i++)
        if ((double)levels[i] - levels[i - 1] < step)
            step = (double)levels[i] - levels[i - 1];
    farthest = most > -least ? most : least;
    for (int steps = 1; steps <= MOST_STEPS; steps++) {
        /* The widest distance says most exactly what a step is. */
        double distance = whole((most - least) / step * steps), each = (most - least) / distance;
        if (distance > 2 * MOST_CODE)
            return 0;
        if (!evenly_spaced(levels, count, each))
            continue;
        double code = whole(farthest / each), s = to_bits(farthest / code, SHORT_BITS);
        if (code != 0.0 && encode(w, s, 0.0, codes)) {
            *scale = (float)s;
            return 1;
        }
        s = to_bits(each, LONG_BITS);
        for (int first = 0; first < MOST_MINUS; first++) {
            double m = to_bits(s * first - least, LONG_BITS);
            if (encode(w, s, m, codes)) {
                *scale = (float)s;
                *minus = (float)m;
                return 1;
            }
        }
    }
    return 0;
}

/* w [out, in] -> panels of codes; in is a multiple of CODE_BLOCK. Returns 0, or -1 where some block
 * is no codes; panels are not to be used then. */
int stagemesh_find_codes(const float *w, int64_t out, int64_t in, char *panels) {
    size_t panel_bytes = bytes_of_panel(CODES, (size_t)in);
    memset(panels, 0, (size_t)((out + PANEL - 1) / PANEL) * panel_bytes);
    for (int64_t feature = 0; feature < out; feature++) {
        code_block *to = (code_block *)(panels + (size_t)(feature / PANEL) * panel_bytes);
        int lane = (int)(feature % PANEL);
        for (const float *from = w + feature * in, *end = from + in; from < end;
             from += CODE_BLOCK, to++) {
            int8_t codes[CODE_BLOCK];
            if (!solve(from, to->scale + lane, to->minus + lane, codes))
                return -1;
            for (int j = 0; j < CODE_BLOCK; j++)
                to->codes[j][lane] = codes[j];
        }
    }
    return 0;
}

/* Panels of codes -> panels of float32. */
void stagemesh_expand_codes(const char *panels, int64_t count, int64_t in, float *to) {
    for (int64_t p = 0; p < count; p++)
        expand_codes((const code_block *)(panels + (size_t)p * bytes_of_panel(CODES, (size_t)in)),
                     (size_t)in, to + p * in * PANEL);
}

int64_t stagemesh_code_block(void) { return CODE_BLOCK; }
