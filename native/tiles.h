/* Where a tile's parts lie, and numbers in half precision. */
#ifndef LLAMARIUM_TILES_H
#define LLAMARIUM_TILES_H

#include <stddef.h>
#include <string.h>

#include "ops.h"

#define INLINE static inline __attribute__((always_inline))

#define BYTES_AHEAD 1280  /* how far before they are multiplied weights are asked for: docs/decisions/0011 */
#define STRIPES_AT_ONCE 8 /* a thread takes at most: docs/decisions/0009 */
#define ROWS_IN_CACHE 64  /* rows of tokens whose inputs stay in the cache beside a stripe: no product takes more at once */
#define STRIDE ((ROWS_IN_CACHE + 4) * LM_TILE_ROWS) /* from a stripe's results to the next's, not at the same place of a page */

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline float from_bf16(uint16_t bits) { return float_of((uint32_t)bits << 16); }

static inline uint16_t to_bf16(float value) { /* to nearest, ties to even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return (uint16_t)((value != value ? bits | 0x400000 : rounded) >> 16);
}

static inline float from_half(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff, wide;
    float value;
    if (rest < 0x400) { /* subnormal: rest * 2^-24 */
        value = (float)rest * 5.9604644775390625e-8f;
        memcpy(&wide, &value, 4);
    } else {
        wide = (rest << 13) + (rest >= 0x7c00 ? (uint32_t)(255 - 31) << 23 : (uint32_t)(127 - 15) << 23);
    }
    wide |= sign;
    memcpy(&value, &wide, 4);
    return value;
}

/* --- where what lies --------------------------------------------------------------------------------------------- */

static inline int is_super(int kind) { return kind >= LM_Q4_K && kind <= LM_Q6_K; }

/* Bytes of a group's codes. */
static inline size_t code_bytes(int kind) {
    return kind == LM_Q8_0 ? 512 : kind == LM_Q5_K ? 256 + 64 : kind == LM_Q6_K ? 256 + 128 : 256;
}

/* Bytes before the codes of a tile of the K formats. */
static inline size_t head_bytes(int kind) { return kind == LM_Q6_K ? 32 + 256 : 64 + 192; }

static inline size_t tile_bytes(int kind) {
    if (is_super(kind)) return head_bytes(kind) + LM_SUPER / LM_GROUP * code_bytes(kind);
    return code_bytes(kind) + (kind == LM_Q4_1 ? 64 : 32);
}

static inline int tile_cols(int kind) { return is_super(kind) ? LM_SUPER : LM_GROUP; }

static inline int tiles_of(const lm_matrix *w) { return w->cols / tile_cols(w->kind); }

static inline const uint8_t *stripe_at(const lm_matrix *w, int64_t stripe) {
    return (const uint8_t *)w->data + (size_t)stripe * (size_t)tiles_of(w) * tile_bytes(w->kind);
}

/* A tile of each of some stripes that follow each other, what they are multiplied with, and where the sums are. */
typedef struct {
    const lm_matrix *w;
    const uint8_t *tiles; /* the first one */
    size_t step;          /* bytes from one to the next */
    int count;
    int begins;           /* whether they are the stripes' first: then `out` is written, else added to */
    const lm_block *x;    /* the tiles' inputs, (rows, groups) */
    int groups;
    float *out;           /* (count, STRIDE), of each stripe (rows, 16) */
} tile_column;

static inline float half_at(const uint8_t *halves, int row) {
    uint16_t bits;
    memcpy(&bits, halves + 2 * row, 2);
    return from_half(bits);
}

/* What a weight is before its scale, from its group's codes. */
static inline int code_at(const lm_matrix *w, const uint8_t *codes, int row, int col) {
    const int lane = row * 4 + col % 4, line = col / 4;
    if (w->kind == LM_Q8_0) return codes[line * 64 + lane] - 128;
    const int byte = codes[line % 4 * 64 + lane], nibble = line < 4 ? byte & 15 : byte >> 4;
    switch (w->kind) {
    case LM_Q4_0: return nibble - 8;
    case LM_IQ4_NL: return w->codebook[nibble] - 128;
    case LM_Q5_K: return nibble + 16 * (codes[256 + lane] >> line & 1);
    case LM_Q6_K: return nibble + 16 * (codes[256 + line / 4 * 64 + lane] >> 2 * (line % 4) & 3) - 32;
    default: return nibble;
    }
}

/* The small integers of a tile of the K formats: a row's scale for a column, and its minimum for a group. */
static inline int scale_at(int kind, const uint8_t *tile, int row, int col) {
    const int group = col / LM_GROUP, at = group % 4 * 16 + row, late = group / 4;
    if (kind == LM_Q6_K) return (int8_t)tile[32 + col / 16 * 16 + row];
    return (tile[64 + at] >> 4 * late & 15) | (tile[192 + at] >> 2 * late & 3) << 4;
}

static inline int minimum_at(const uint8_t *tile, int row, int group) {
    const int at = group % 4 * 16 + row, late = group / 4;
    return (tile[128 + at] >> 4 * late & 15) | (tile[192 + at] >> (4 + 2 * late) & 3) << 4;
}

/* All of them in Q4_K and Q5_K, (group, row). */
typedef struct {
    uint8_t scale[128], minimum[128];
} small_integers;

static inline small_integers unpack_integers(const uint8_t *tile) {
    const uint8_t *scale = tile + 64, *minimum = tile + 128, *high = tile + 192;
    small_integers all;
    for (int i = 0; i < 64; i++) {
        all.scale[i] = (uint8_t)((scale[i] & 15) | (high[i] << 4 & 48));
        all.scale[64 + i] = (uint8_t)(scale[i] >> 4 | (high[i] << 2 & 48));
        all.minimum[i] = (uint8_t)((minimum[i] & 15) | (high[i] & 48));
        all.minimum[64 + i] = (uint8_t)(minimum[i] >> 4 | (high[i] >> 2 & 48));
    }
    return all;
}

/* --- a row as numbers -------------------------------------------------------------------------------------------- */

/* out (256): a row of a tile of the K formats. All products are exact, so that it matters not how they are fused. */
static inline void unpack_super_row(const lm_matrix *w, const uint8_t *tile, int row, float *out) {
    const float d = half_at(tile, row), dmin = w->kind == LM_Q6_K ? 0 : half_at(tile + 32, row);
    const uint8_t *codes = tile + head_bytes(w->kind);
    for (int g = 0; g < LM_SUPER / LM_GROUP; g++, codes += code_bytes(w->kind), out += LM_GROUP) {
        const float minimum = w->kind == LM_Q6_K ? 0 : dmin * (float)minimum_at(tile, row, g);
        for (int c = 0; c < LM_GROUP; c++)
            out[c] = d * (float)scale_at(w->kind, tile, row, g * LM_GROUP + c) * (float)code_at(w, codes, row, c) - minimum;
    }
}

/* out (cols): row `row` of a stripe of a packed matrix. */
static inline void unpack_row(const lm_matrix *w, int64_t stripe, int row, float *out) {
    const uint8_t *tile = stripe_at(w, stripe);
    for (int i = 0; i < tiles_of(w); i++, tile += tile_bytes(w->kind)) {
        if (is_super(w->kind)) {
            unpack_super_row(w, tile, row, out + i * LM_SUPER);
            continue;
        }
        const uint8_t *halves = tile + code_bytes(w->kind);
        const float scale = half_at(halves, row), minimum = w->kind == LM_Q4_1 ? half_at(halves + 32, row) : 0;
        for (int c = 0; c < LM_GROUP; c++) out[i * LM_GROUP + c] = (float)code_at(w, tile, row, c) * scale + minimum;
    }
}

#endif
