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
        head[i] = fused(-(b * sine[i]), a, cosine[i]);
        head[i + half] = fused(a * sine[i], b, cosine[i]);
    }
}

/* --- codes -------------------------------------------------------------------------------------------------------- */

/* Multiply a vector by the Hadamard matrix of its size over the root of that: an outlier is spread over all numbers, and no product of
 * two vectors that are spread alike changes. Sizes that are no power of two stay as they are. Sums are in the order of `hadamard` in
 * kv_codes.py, and so have the same bits. */
static __attribute__((noinline)) void spread(float *values, int size) {
    if (size < 4 || (size & (size - 1)) != 0) return;
    const quad_ints odd = {0, INT32_MIN, 0, INT32_MIN}, upper = {0, 0, INT32_MIN, INT32_MIN}; /* whose signs are turned */
    const float factor = (float)(1 / sqrt((double)size));
    for (int i = 0; i < size; i += 4) {
        quad x;
        memcpy(&x, values + i, sizeof x);
        x = SHUFFLE(x, x, 0, 0, 2, 2) + (quad)((quad_ints)SHUFFLE(x, x, 1, 1, 3, 3) ^ odd);
        x = SHUFFLE(x, x, 0, 1, 0, 1) + (quad)((quad_ints)SHUFFLE(x, x, 2, 3, 2, 3) ^ upper);
        memcpy(values + i, &x, sizeof x);
    }
    for (int half = 4; half < size; half *= 2)
        for (int start = 0; start < size; start += 2 * half)
            for (int i = start; i < start + half; i += 4) {
                quad a, b;
                memcpy(&a, values + i, sizeof a);
                memcpy(&b, values + i + half, sizeof b);
                const quad sum = a + b, difference = a - b;
                memcpy(values + i, &sum, sizeof sum);
                memcpy(values + i + half, &difference, sizeof difference);
            }
    for (int i = 0; i < size; i++) values[i] *= factor;
}

/* What stands in place of a query, for keys that are codes: its own codes of 16 bits (head_dim), then its scale. */
static inline const int16_t *codes_of_query(const paired *q) { return (const int16_t *)q; }

static inline float scale_of_query(const paired *q, int head_dim) {
    float scale;
    memcpy(&scale, codes_of_query(q) + head_dim, sizeof scale);
    return scale;
}

/* The largest code of a query: the sum of its products with a key's fits into 32 bits. */
static inline float most_of_query(int head_dim) { return (float)min_int(INT16_MAX, INT32_MAX / 127 / head_dim); }

/* Spread a query, scaled, and round it to codes, where it lies. NaN and infinities make the scale NaN, and with it all scores. */
static inline void into_codes(float *values, int head_dim) {
    spread(values, head_dim);
    float poison;
    const float scale = largest_size(values, head_dim, &poison) / most_of_query(head_dim) + poison;
    const float inverse = scale > 1e-30f ? 1 / scale : 0; /* less is nothing, and has no inverse */
    int16_t *codes = (int16_t *)values;
    int i = 0;
    for (; i + LANES <= head_dim; i += LANES) {
        const lane_ints own = nearest_ints(load_floats(values + i) * inverse);
        const lane_shorts half = __builtin_convertvector(own, lane_shorts);
        memcpy(codes + i, &half, sizeof half); /* over what has been read */
    }
    for (; i < head_dim; i++) {
        float value;
        memcpy(&value, values + i, sizeof value);
        const int16_t code = (int16_t)nearest_four((quad){value * inverse})[0];
        memcpy(codes + i, &code, sizeof code);
    }
    memcpy(codes + head_dim, &scale, sizeof scale);
}

/* Where codes of a key or value in 8 bits lie: neighbours of a pair, and pairs, that many bytes apart. */
typedef struct {
    int codes, pairs;
} bytes_apart;

/* Round a key or value to 8 bits; returns its scale. NaN and infinities make that NaN. Each step is one operation that IEEE rounds, so
 * that `to_bytes` in attention/codes.py gives the same codes. */
static inline float to_codes(const float *values, int head_dim, int8_t *codes, bytes_apart apart) {
    float poison;
    const float scale = largest_size(values, head_dim, &poison) / 127 + poison;
    for (int i = 0; i < head_dim; i++)
        codes[i / 2 * apart.pairs + i % 2 * apart.codes] = (int8_t)nearest_code(scale > 0 ? values[i] / scale : 0);
    return scale;
}

/* Round a group to 4 bits: the number of the largest size, the first of equals, becomes -8 before its scale is rounded. Returns the
 * scale's bits; codes are plus 8, which stands for what a group lacks. As `to_nibbles` in attention/codes.py. */
static inline uint16_t to_nibbles(const float *values, int count, uint8_t codes[NIBBLE_GROUP]) {
    float poison, most = 0;
    const float size = largest_size(values, count, &poison);
    for (int i = count - 1; i >= 0; i--)
        if (fabsf(values[i]) == size) most = values[i];
    const uint16_t bits = to_bf16(most / -8 + poison);
    const float scale = from_bf16(bits);
    memset(codes, 8, NIBBLE_GROUP);
    for (int i = 0; i < count && scale != 0 && scale == scale; i++) {
        float code = nearest_code(values[i] / scale);
        code = code > 7 ? 7 : code < -8 ? -8 : code;
        codes[i] = (uint8_t)(code + 8);
    }
    return bits;
}

/* The codes of a group of 4 bits to where a key's lie: four words, between which lie those of a strip's other slots. */
static inline void put_key_nibbles(const uint8_t *codes, uint32_t *to) {
    for (int w = 0; w < 4; w++) {
        uint32_t word = 0;
        for (int i = 0; i < 8; i++) word |= (uint32_t)codes[8 * w + i] << (4 * (i / 2) + 16 * (i % 2));
        to[w * STRIP] = word;
    }
}

/* The same of a value's, in the 32 bytes that two slots have together. */
static inline void put_value_nibbles(const uint8_t *codes, uint16_t *to, int is_second) {
    for (int j = 0; j < 8; j++)
        to[2 * j + is_second] = (uint16_t)(codes[j] | codes[8 + j] << 4 | codes[16 + j] << 8 | codes[24 + j] << 12);
}

/* Put one head's key or value into its slot as codes; it is spread first, where it lies. */
static inline void store_codes(int dtype, int is_value, char *to, void *scales, size_t slot, float *values, int head_dim) {
    const int groups = nibble_groups(head_dim), nth = slot % (is_value ? 2 : STRIP); /* of those that lie together */
    char *place = to + (slot - nth) * vector_bytes(dtype, head_dim);
    spread(values, head_dim);
    if (dtype == LM_INT8) {
        const bytes_apart apart = is_value ? (bytes_apart){2, 4} : (bytes_apart){1, 2 * STRIP};
        ((float *)scales)[slot] = to_codes(values, head_dim, (int8_t *)place + nth * (is_value ? 1 : 2), apart);
        return;
    }
    uint16_t *own = (uint16_t *)scales + slot / STRIP * STRIP * groups + slot % STRIP;
    for (int g = 0; g < groups; g++) {
        uint8_t codes[NIBBLE_GROUP];
        own[g * STRIP] = to_nibbles(values + g * NIBBLE_GROUP, size_of_group(head_dim, g), codes);
        if (is_value)
            put_value_nibbles(codes, (uint16_t *)(place + g * NIBBLE_GROUP), nth);
        else
            put_key_nibbles(codes, (uint32_t *)place + g * 4 * STRIP + nth);
    }
}

/* Put one head's key or value into its slot. */
static inline void store(int dtype, int is_value, void *to, void *scales, size_t slot, float *values, int head_dim) {
    char *place = (char *)to + slot * vector_bytes(dtype, head_dim);
    switch (dtype) {
    case LM_FLOAT32: memcpy(place, values, (size_t)head_dim * sizeof(float)); break;
    case LM_INT4:
    case LM_INT8: store_codes(dtype, is_value, to, scales, slot, values, head_dim); break;
    default:
        for (int i = 0; i < head_dim; i++) ((uint16_t *)place)[i] = to_bf16(values[i]);
    }
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

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
    known->sum = fused(next->sum * b, known->sum, a);
    known->largest = largest;
    for (int i = 0; i < head_dim; i++) known->mixture[i].value = fused(next->mixture[i].value * b, known->mixture[i].value, a);
}

#endif
