/* The layout of packed weights: what a tile of each type holds, as structs, and one table of what tells the types apart.
 *
 * A tile is 16 rows by 32 columns of a matrix or, in the K types, by 256. The tiles of 16 rows, a row panel, follow each other in
 * one linear stream, and so do the panels: a product reads its weights in the order in which they lie. 32 columns of 16 rows are
 * a group. In each row a group has a scale, and in some types a minimum.
 *
 * Codes lie in lines of 64 bytes, one register of the widest processors. Columns 4j to 4j + 3 of all 16 rows belong together:
 *
 *   8 bits   line j is columns 4j to 4j + 3
 *   4 bits   line j, j < 4, has columns 4j to 4j + 3 in the low halves of its bytes, and 16 + 4j to 16 + 4j + 3 in the high ones
 *   5 bits   the low four bits so, and one more line, of which bit j is the fifth bit of columns 4j to 4j + 3
 *   6 bits   the low four bits so, and two more lines h, of which bits 2i and 2i + 1 are the high bits of columns 16h + 4i and on
 *
 * What a weight is, with q its code, d and m its row's scale and minimum, s and t the small integers of the K types:
 *
 *   Q8_0         d (q - 128)           a file has q signed, without the 128
 *   Q4_0         d (q - 8)
 *   Q4_1         d q + m
 *   Q5_0         d (q - 16)
 *   IQ4_NL       d codebook[q]         the codebook's entries are stored plus 128
 *   Q4_K, Q5_K   d s q - m t           s and t of 6 bits, one for each group
 *   Q6_K         d s (q - 32)          s of 8 bits with a sign, one for each 16 columns
 *   IQ4_XS       d (s - 32) codebook[q]    s of 6 bits, one for each group
 *
 * The last panel of a matrix whose rows are no multiple of 16 is filled up with zero scales. A tile has no byte more than the
 * GGUF blocks that it is made of, and may begin at any byte. docs/guides/add-a-quantization-type.md adds a type.
 */
#ifndef LLAMARIUM_TILES_H
#define LLAMARIUM_TILES_H

#include <stddef.h>

#include "halves.h"
#include "ops.h"

#define INLINE static inline __attribute__((always_inline))

#define BYTES_AHEAD 320   /* how far ahead of their product weights are prefetched: docs/decisions/0011 */
#define PANELS_AT_ONCE 8 /* a thread takes at most: docs/decisions/0009 */
#define ROWS_IN_CACHE 64  /* rows of tokens whose inputs stay in the cache with a panel: no product takes more at once */
#define PANEL_STRIDE ((ROWS_IN_CACHE + 4) * LM_TILE_ROWS) /* between panels' results: no whole pages, which share cache lines */

#define GROUPS_OF_SUPER (LM_SUPER / LM_GROUP)

/* --- the layout -------------------------------------------------------------------------------------------------- */

/* Four columns of 16 rows. */
typedef struct {
    uint8_t code[LM_TILE_ROWS][4];
} code_line;

typedef struct {
    code_line q[8];
    float16 d[LM_TILE_ROWS];
} tile_q8_0;

typedef struct {
    code_line q[4];
    float16 d[LM_TILE_ROWS];
} tile_q4_0, tile_iq4_nl;

typedef struct {
    code_line q[4];
    float16 d[LM_TILE_ROWS], m[LM_TILE_ROWS];
} tile_q4_1;

typedef struct {
    code_line q[5]; /* four of the low bits, one of the fifth */
    float16 d[LM_TILE_ROWS];
} tile_q5_0;

/* The integers s and t of 8 groups, 6 bits each. Their low four bits lie as codes do: group g, g < 4, in the low halves, group
 * 4 + g in the high ones. A byte of `high` has, from its lowest bit, the high two of s[g], s[4 + g], t[g] and t[4 + g]. */
typedef struct {
    uint8_t s[4][LM_TILE_ROWS], t[4][LM_TILE_ROWS], high[4][LM_TILE_ROWS];
} six_bits;

typedef struct {
    float16 d[LM_TILE_ROWS], m[LM_TILE_ROWS];
    six_bits small;
    struct {
        code_line low[4];
    } groups[GROUPS_OF_SUPER];
} tile_q4_k;

typedef struct {
    float16 d[LM_TILE_ROWS], m[LM_TILE_ROWS];
    six_bits small;
    struct {
        code_line low[4], high[1];
    } groups[GROUPS_OF_SUPER];
} tile_q5_k;

typedef struct {
    float16 d[LM_TILE_ROWS];
    int8_t s[2 * GROUPS_OF_SUPER][LM_TILE_ROWS];
    struct {
        code_line low[4], high[2];
    } groups[GROUPS_OF_SUPER];
} tile_q6_k;

/* The integers s lie as in `six_bits`; byte r of high[0] has the high two bits of s[0] to s[3] of row r, that of high[1] of the others. */
typedef struct {
    float16 d[LM_TILE_ROWS];
    uint8_t s[4][LM_TILE_ROWS], high[2][LM_TILE_ROWS];
    struct {
        code_line low[4];
    } groups[GROUPS_OF_SUPER];
} tile_iq4_xs;

/* Files have this layout: it never changes, but for types that come to it. */
_Static_assert(sizeof(code_line) == 64, "a line of the cache, and AVX-512's register");
_Static_assert(sizeof(tile_q8_0) == 16 * 34 && offsetof(tile_q8_0, d) == 512, "16 blocks of Q8_0");
_Static_assert(sizeof(tile_q4_0) == 16 * 18 && offsetof(tile_q4_0, d) == 256, "16 blocks of Q4_0, or IQ4_NL");
_Static_assert(sizeof(tile_q4_1) == 16 * 20 && offsetof(tile_q4_1, m) == 288, "16 blocks of Q4_1");
_Static_assert(sizeof(tile_q5_0) == 16 * 22 && offsetof(tile_q5_0, d) == 320, "16 blocks of Q5_0");
_Static_assert(sizeof(tile_q4_k) == 16 * 144 && offsetof(tile_q4_k, groups) == 256, "16 blocks of Q4_K");
_Static_assert(sizeof(tile_q5_k) == 16 * 176 && offsetof(tile_q5_k, groups) == 256, "16 blocks of Q5_K");
_Static_assert(sizeof(tile_q6_k) == 16 * 210 && offsetof(tile_q6_k, groups) == 288, "16 blocks of Q6_K");
_Static_assert(sizeof(tile_iq4_xs) == 16 * 136 && offsetof(tile_iq4_xs, groups) == 128, "16 blocks of IQ4_XS");
_Static_assert(offsetof(tile_q4_k, small) == offsetof(tile_q5_k, small), "both are read by the same code");

/* What tells the types apart. Products are compiled for each kind as a constant, so that nothing of this is looked up in them. */
typedef struct {
    int cols;         /* of a tile */
    int code_bits;    /* 4, 5, 6 or 8 */
    int zero;         /* the code that stands for 0, after the codebook where there is one */
    int has_minimum, has_codebook;
    int small_scales; /* integers that multiply d: how many a group has */
    int small_zero;   /* what is taken off them */
    size_t tile_bytes, code_bytes; /* of a tile, and of a group's codes */
    size_t codes_at, d_at, m_at;   /* where they begin */
} tile_format;

#define GROUP_TYPE(TILE, BITS) \
    .cols = LM_GROUP, .code_bits = BITS, .tile_bytes = sizeof(TILE), .code_bytes = sizeof(((TILE *)0)->q), .d_at = offsetof(TILE, d)
#define SUPER_TYPE(TILE, BITS) \
    .cols = LM_SUPER, .code_bits = BITS, .tile_bytes = sizeof(TILE), .code_bytes = sizeof(((TILE *)0)->groups[0]), \
    .codes_at = offsetof(TILE, groups), .d_at = offsetof(TILE, d)

static const tile_format FORMATS[] = {
    [LM_BF16] = {.cols = LM_GROUP}, /* no tiles: rows as the file has them, and so are F16 and F32 */
    [LM_F16] = {.cols = LM_GROUP},
    [LM_F32] = {.cols = LM_GROUP},
    [LM_Q8_0] = {GROUP_TYPE(tile_q8_0, 8), .zero = 128},
    [LM_Q4_0] = {GROUP_TYPE(tile_q4_0, 4), .zero = 8},
    [LM_Q4_1] = {GROUP_TYPE(tile_q4_1, 4), .has_minimum = 1, .m_at = offsetof(tile_q4_1, m)},
    [LM_IQ4_NL] = {GROUP_TYPE(tile_iq4_nl, 4), .has_codebook = 1, .zero = 128},
    [LM_Q5_0] = {GROUP_TYPE(tile_q5_0, 5), .zero = 16},
    [LM_Q4_K] = {SUPER_TYPE(tile_q4_k, 4), .small_scales = 1, .has_minimum = 1, .m_at = offsetof(tile_q4_k, m)},
    [LM_Q5_K] = {SUPER_TYPE(tile_q5_k, 5), .small_scales = 1, .has_minimum = 1, .m_at = offsetof(tile_q5_k, m)},
    [LM_Q6_K] = {SUPER_TYPE(tile_q6_k, 6), .small_scales = 2, .zero = 32},
    [LM_IQ4_XS] = {SUPER_TYPE(tile_iq4_xs, 4), .small_scales = 1, .small_zero = 32, .has_codebook = 1, .zero = 128},
};

/* DO(kind) for every type whose tiles are one group, and for every K type: what is compiled for each. */
#define FOR_GROUP_TYPES(DO) DO(LM_Q8_0) DO(LM_Q4_0) DO(LM_Q4_1) DO(LM_IQ4_NL) DO(LM_Q5_0)
#define FOR_SUPER_TYPES(DO) DO(LM_Q4_K) DO(LM_Q5_K) DO(LM_Q6_K) DO(LM_IQ4_XS)

/* --- parts of a tile --------------------------------------------------------------------------------------------- */

static inline int is_super(int kind) { return FORMATS[kind].cols == LM_SUPER; }

static inline size_t tile_bytes(int kind) { return FORMATS[kind].tile_bytes; }

static inline int tile_cols(int kind) { return FORMATS[kind].cols; }

static inline int tiles_of(const lm_matrix *w) { return w->cols / tile_cols(w->kind); }

static inline const uint8_t *panel_at(const lm_matrix *w, int64_t panel) {
    return (const uint8_t *)w->data + (size_t)panel * (size_t)tiles_of(w) * tile_bytes(w->kind);
}

/* The codes of a group of a tile: the low bits' lines, then those of the high bits. */
static inline const code_line *codes_of(int kind, const uint8_t *tile, int group) {
    return (const code_line *)(tile + FORMATS[kind].codes_at + (size_t)group * FORMATS[kind].code_bytes);
}

static inline const float16 *scales_of(int kind, const uint8_t *tile) { return (const float16 *)(tile + FORMATS[kind].d_at); }

static inline const float16 *minima_of(int kind, const uint8_t *tile) { return (const float16 *)(tile + FORMATS[kind].m_at); }

static inline const six_bits *six_bits_of(const uint8_t *tile) { return &((const tile_q4_k *)tile)->small; }

/* The four columns from 4j on: in which line their high bits lie, and from which bit on. */
static inline int high_line(int kind, int j) { return 4 + j * (FORMATS[kind].code_bits - 4) / 8; }
static inline int high_shift(int kind, int j) { return j * (FORMATS[kind].code_bits - 4) % 8; }

/* A tile, or some, of each of some panels that follow each other, what they are multiplied with, and where the sums are. */
typedef struct {
    const lm_matrix *w;
    const uint8_t *tiles; /* the first one */
    size_t step;          /* bytes from one to the next */
    int count;
    int begins;           /* whether they are the panels' first: then `out` is written, else added to */
    const lm_block *x;    /* the tiles' inputs, (rows, groups) */
    int groups;
    float *out;           /* (count, PANEL_STRIDE), of each panel (rows, 16) */
} tile_column;

/* What a weight is before its scale. */
static inline int code_at(const lm_matrix *w, int kind, const code_line *lines, int row, int col) {
    const tile_format *f = &FORMATS[kind];
    const int j = col / 4, c = col % 4;
    if (f->code_bits == 8) return lines[j].code[row][c] - f->zero;
    const int byte = lines[j % 4].code[row][c];
    int code = j < 4 ? byte & 15 : byte >> 4;
    if (f->has_codebook) code = w->codebook[code];
    if (f->code_bits > 4) {
        const int high = lines[high_line(kind, j)].code[row][c] >> high_shift(kind, j);
        code |= (high & ((1 << (f->code_bits - 4)) - 1)) << 4;
    }
    return code - f->zero;
}

/* The integer that multiplies d for a row and a column of a tile of the K types. */
static inline int scale_at(int kind, const uint8_t *tile, int row, int col) {
    if (FORMATS[kind].small_scales == 2) return ((const tile_q6_k *)tile)->s[col / 16][row];
    const int g = col / LM_GROUP % 4, late = col / LM_GROUP / 4;
    if (kind == LM_IQ4_XS) {
        const tile_iq4_xs *own = (const tile_iq4_xs *)tile;
        return ((own->s[g][row] >> 4 * late & 15) | (own->high[late][row] >> 2 * g & 3) << 4) - FORMATS[kind].small_zero;
    }
    const six_bits *from = six_bits_of(tile);
    return (from->s[g][row] >> 4 * late & 15) | (from->high[g][row] >> 2 * late & 3) << 4;
}

/* The integer that multiplies m for a row and a group. */
static inline int minimum_at(const uint8_t *tile, int row, int group) {
    const six_bits *from = six_bits_of(tile);
    const int g = group % 4, late = group / 4;
    return (from->t[g][row] >> 4 * late & 15) | (from->high[g][row] >> (4 + 2 * late) & 3) << 4;
}

/* All of them in Q4_K and Q5_K, and in IQ4_XS, which has no t. */
typedef struct {
    int8_t s[GROUPS_OF_SUPER][LM_TILE_ROWS];
    uint8_t t[GROUPS_OF_SUPER][LM_TILE_ROWS];
} small_integers;

static inline void unpack_signed(const tile_iq4_xs *tile, small_integers *to) {
    for (int g = 0; g < 4; g++)
        for (int r = 0; r < LM_TILE_ROWS; r++) {
            to->s[g][r] = (int8_t)(((tile->s[g][r] & 15) | (tile->high[0][r] >> 2 * g & 3) << 4) - 32);
            to->s[4 + g][r] = (int8_t)((tile->s[g][r] >> 4 | (tile->high[1][r] >> 2 * g & 3) << 4) - 32);
        }
}

static inline small_integers unpack_integers(const uint8_t *tile, const int kind) {
    const six_bits *from = six_bits_of(tile);
    const uint8_t *s = (const uint8_t *)from->s, *t = (const uint8_t *)from->t, *high = (const uint8_t *)from->high;
    small_integers all;
    if (kind == LM_IQ4_XS) {
        unpack_signed((const tile_iq4_xs *)tile, &all);
        return all;
    }
    uint8_t *to_s = (uint8_t *)all.s, *to_t = (uint8_t *)all.t;
    for (int i = 0; i < 4 * LM_TILE_ROWS; i++) {
        to_s[i] = (uint8_t)((s[i] & 15) | (high[i] << 4 & 48));
        to_s[64 + i] = (uint8_t)(s[i] >> 4 | (high[i] << 2 & 48));
        to_t[i] = (uint8_t)((t[i] & 15) | (high[i] & 48));
        to_t[64 + i] = (uint8_t)(t[i] >> 4 | (high[i] >> 2 & 48));
    }
    return all;
}

/* --- a row as numbers -------------------------------------------------------------------------------------------- */

/* out (cols of a tile): a row of a tile. All products of the K types are exact, so that it matters not how they are fused. */
INLINE void unpack_tile_row(const lm_matrix *w, int kind, const uint8_t *tile, int row, float *out) {
    const int has_minimum = FORMATS[kind].has_minimum;
    const float d = half_at(scales_of(kind, tile), row), m = has_minimum ? half_at(minima_of(kind, tile), row) : 0;
    for (int g = 0; g < tile_cols(kind) / LM_GROUP; g++, out += LM_GROUP) {
        const code_line *lines = codes_of(kind, tile, g);
        const float minimum = is_super(kind) && has_minimum ? -m * (float)minimum_at(tile, row, g) : m;
        for (int c = 0; c < LM_GROUP; c++) {
            const float scale = is_super(kind) ? d * (float)scale_at(kind, tile, row, g * LM_GROUP + c) : d;
            out[c] = scale * (float)code_at(w, kind, lines, row, c) + minimum;
        }
    }
}

INLINE void unpack_row_of_kind(const lm_matrix *w, int kind, const uint8_t *tile, int row, float *out) {
    for (int i = 0; i < w->cols / tile_cols(kind); i++, tile += tile_bytes(kind)) unpack_tile_row(w, kind, tile, row, out + i * tile_cols(kind));
}

/* out (cols): row `row` of a panel of a packed matrix. */
static inline void unpack_row(const lm_matrix *w, int64_t panel, int row, float *out) {
#define CASE(KIND) \
    case KIND: unpack_row_of_kind(w, KIND, panel_at(w, panel), row, out); break;
    switch (w->kind) {
        FOR_GROUP_TYPES(CASE)
        FOR_SUPER_TYPES(CASE)
    }
#undef CASE
}

#endif
