/* Attention over the cache: how keys and values get there, what attention.c is given and gives, and how the results of several
 * KV chunks are merged. */
#ifndef LLAMARIUM_ATTENTION_H
#define LLAMARIUM_ATTENTION_H

#include "cache.h"

/* RoPE: `angles` are head_dim / 2 cosines, then as many sines. */
static inline void rotate(float *head, const float *angles, int half) {
    const float *cosine = angles, *sine = angles + half;
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cosine[i] - b * sine[i];
        head[i + half] = b * cosine[i] + a * sine[i];
    }
}

/* Round a key or value to 8 bits; returns its scale. NaN and infinities make that NaN. Each step is one operation that
 * IEEE rounds, so that `to_codes` in attention/paged.py gives the same codes. */
static inline float to_codes(const float *values, int head_dim, int8_t *codes) {
    float poison;
    const float scale = largest_size(values, head_dim, &poison) / 127 + poison;
    for (int i = 0; i < head_dim; i++) codes[i] = (int8_t)nearest_code(scale > 0 ? values[i] / scale : 0);
    return scale;
}

/* Put one head's key or value into its slot. */
static inline void store(int dtype, void *to, float *scales, size_t slot, const float *values, int head_dim) {
    const size_t place = slot * head_dim;
    if (dtype == LM_FLOAT32) {
        memcpy((float *)to + place, values, (size_t)head_dim * sizeof(float));
    } else if (dtype == LM_INT8) {
        scales[slot] = to_codes(values, head_dim, (int8_t *)to + place);
    } else {
        for (int i = 0; i < head_dim; i++) ((uint16_t *)to)[place + i] = to_bf16(values[i]);
    }
}

/* A softmax over some slots: the largest score, the sum of e^(score - largest), and the values weighted so. */
typedef struct {
    float largest, sum;
    paired mixture[]; /* (head_dim) */
} partial;

static inline partial *partial_at(float *partials, size_t index, int head_dim) {
    return (partial *)(partials + index * (size_t)(head_dim + 2));
}

#define HEADS_AT_ONCE 4 /* that share each key and value that is loaded */

#define ROWS_OF_RUN 32 /* at most */
#define LEAST_RUN (LANES == 16 ? 4 : 8) /* fewer rows take less time one by one */

/* Rows of tokens that follow each other in one sequence. Each sees one slot more than the row before it; with a window, one slot less
 * at the other end. */
typedef struct {
    const paired *q;             /* (head_dim) of the first row's first head, then of the next one */
    size_t stride;               /* to the next row's */
    int count, visible;          /* rows; slots from the chunk's first on that the last row sees, be it more than CHUNK */
    int window;                  /* how many slots a row sees, its own included; NO_WINDOW: all before it */
    partial *(*out)[HEADS_AT_ONCE]; /* of each row and head */
    float *scratch;              /* run_scratch(head_dim) numbers */
} row_run;

#define NO_WINDOW INT32_MAX

/* The first position that a token at `position` sees. */
static inline int first_visible(int position, int window) { return position >= window ? position - window + 1 : 0; }

/* How many slots of a chunk row m sees, counted from the chunk's first one on, and which is the first. */
static inline int end_of_row(const row_run *rows, int m) { return rows->visible - (rows->count - 1 - m); }
static inline int first_of_row(const row_run *rows, int m) { return first_visible(end_of_row(rows, m) - 1, rows->window); }

#define COLUMNS (LANES == 16 ? 32 : LANES) /* slots that a run scores at once: in two registers where there are enough of them */

/* Numbers for the scores of a run and for COLUMNS keys. */
static inline size_t run_scratch(int head_dim) { return ROWS_OF_RUN * CHUNK * 4 + (size_t)head_dim * COLUMNS; }

/* Merge a later chunk's result into that of the earlier ones; always in this order, so that the sum is always the same. */
static inline void merge(partial *known, const partial *next, int head_dim) {
    const float largest = known->largest > next->largest ? known->largest : next->largest;
    const float a = exp_of(known->largest - largest), b = exp_of(next->largest - largest);
    known->sum = known->sum * a + next->sum * b;
    known->largest = largest;
    for (int i = 0; i < head_dim; i++) known->mixture[i].value = known->mixture[i].value * a + next->mixture[i].value * b;
}

#endif
