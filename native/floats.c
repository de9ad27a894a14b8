/* A part of a set: products of weights that are numbers, BF16, F16 or F32, as the file has them: row-major.
 *
 * Each sum is added up in one order, whatever it is computed with: LANES totals, each of every LANES-th column, one column after the
 * other, and at the end those totals, by `sums_of`. Four rows of weights and TOKENS of inputs have their totals in registers at a time.
 *
 * A few tokens' totals stay in registers through all columns. Many tokens take a block of columns at a time, which their inputs and a panel of
 * 16 rows share the nearest caches for; their totals wait in memory for the next block. Weights that are no floats are made so once a block.
 */
#include "parts.h"

#define TOKENS_FOR_BLOCKS 12  /* from so many on, columns are multiplied in blocks */
#define BYTES_OF_A_BLOCK 4096 /* of a row of weights */
#define FLOAT_ROWS_IN_CACHE (ROWS_IN_CACHE / TOKENS * TOKENS)
#define QUADS_OF_A_PANEL (LM_TILE_ROWS / 4)

/* What weights of a dtype are multiplied as, once they are copied: bfloat16 where the processor multiplies that, else floats. */
#ifdef __AVX512BF16__
#define MULTIPLIED_AS(DTYPE) ((DTYPE) == LM_BFLOAT16 ? LM_BFLOAT16 : LM_FLOAT32)
#else
#define MULTIPLIED_AS(DTYPE) ((void)(DTYPE), LM_FLOAT32)
#endif
#define SIZE_OF(DTYPE) ((DTYPE) == LM_FLOAT32 ? sizeof(float) : sizeof(uint16_t))
#define MOST_REGISTERS (LM_GROUP / 4) /* of a group: registers of four floats */
#define REGISTERS_OF_A_GROUP(DTYPE) ((int)(LM_GROUP * SIZE_OF(MULTIPLIED_AS(DTYPE)) / sizeof(lanes)))

/* Register r of a group of weights, in the order in which they are multiplied: that of `load_pair` for bfloat16 made floats. */
INLINE lanes load_weights(const int dtype, const void *from, size_t place, const int r) {
    if (dtype == LM_FLOAT32) return load_floats((const float *)from + place + r * LANES);
    if (dtype == LM_FLOAT16) return load_halves((const uint16_t *)from + place + r * LANES);
    if (MULTIPLIED_AS(dtype) == LM_BFLOAT16) return load_floats((const float *)((const uint16_t *)from + place));
    lane_bits words;
    memcpy(&words, (const uint16_t *)from + place + r / 2 * PAIR, sizeof words);
    return (lanes)(r % 2 == 0 ? words << 16 : words & 0xffff0000);
}

/* total + weights * inputs, or of bfloat16 both products of each lane. */
INLINE lanes multiply_add(const int dtype, lanes total, lanes weights, lanes inputs) {
#ifdef __AVX512BF16__
    if (dtype == LM_BFLOAT16) return (lanes)_mm512_dpbf16_ps((__m512)total, (__m512bh)weights, (__m512bh)inputs);
#endif
    (void)dtype;
    return fused_lanes(total, weights, inputs);
}

/* Four rows of weights: numbers from one row to the next, and from a group to the next one. */
typedef struct {
    const char *at;
    size_t row_step, group_step;
} quad_of_rows;

/* totals[m][k] += row k of some groups of weights times the inputs x (groups, width, 32) of token m, of which there are `count`. */
INLINE void add_groups(const int dtype, quad_of_rows w, size_t place, const char *x, int groups, const int count, int width,
                       const int prefetches, lanes totals[TOKENS][4]) {
    enum { KEPT = 4 };
    for (int g = 0; g < groups; g++, place += w.group_step, x += (size_t)width * LM_GROUP * SIZE_OF(MULTIPLIED_AS(dtype))) {
        for (int k = 0; k < KEPT && prefetches; k++)
            __builtin_prefetch(w.at + (place + (KEPT + k) * w.row_step) * SIZE_OF(dtype));
        UNROLLED for (int r = 0; r < MOST_REGISTERS; r++) {
            if (r >= REGISTERS_OF_A_GROUP(dtype)) continue;
            lanes inputs[TOKENS];
            UNROLLED for (int m = 0; m < count; m++) {
                memcpy(&inputs[m], x + m * LM_GROUP * SIZE_OF(MULTIPLIED_AS(dtype)) + r * sizeof(lanes), sizeof(lanes));
                IN_REGISTER(inputs[m]);
            }
            UNROLLED for (int k = 0; k < 4; k++) {
                lanes weights = load_weights(dtype, w.at, place + k * w.row_step, r);
                IN_REGISTER(weights);
                UNROLLED for (int m = 0; m < count; m++) totals[m][k] = multiply_add(MULTIPLIED_AS(dtype), totals[m][k], weights, inputs[m]);
            }
        }
    }
}

/* DO(count) for the number of tokens that are multiplied together, as a constant. */
#define CASE_OF_TOKENS(COUNT) \
    case COUNT: DO(COUNT); break;
#if TOKENS > 3
#define MORE_TOKENS CASE_OF_TOKENS(4) CASE_OF_TOKENS(5) CASE_OF_TOKENS(6)
#else
#define MORE_TOKENS
#endif
#define FOR_TOKENS(COUNT) \
    switch (COUNT) { CASE_OF_TOKENS(1) CASE_OF_TOKENS(2) CASE_OF_TOKENS(3) MORE_TOKENS }

/* --- a few tokens ------------------------------------------------------------------------------------------------ */

/* The last columns of four rows, fewer than a group, filled up with zeros. */
typedef struct {
    char at[4 * LM_GROUP * sizeof(float)];
} last_group;

INLINE last_group rest_of(const int dtype, quad_of_rows w, size_t place, int cols) {
    const size_t size = SIZE_OF(dtype);
    last_group rest = {{0}};
    for (int k = 0; k < 4; k++) memcpy(rest.at + k * LM_GROUP * size, w.at + (place + k * w.row_step) * size, cols * size);
    return rest;
}

/* out[m] = four rows of weights times `count` tokens' inputs, which lie in a panel of `width` tokens. */
INLINE void multiply_quad(const int dtype, quad_of_rows w, int cols, const char *x, const int count, int width, const int prefetches,
                          quad *out) {
    const int groups = cols / LM_GROUP;
    lanes totals[TOKENS][4] = {{{0}}};
    add_groups(dtype, w, 0, x, groups, count, width, prefetches, totals);
    if (cols % LM_GROUP != 0) {
        const last_group rest = rest_of(dtype, w, groups * LM_GROUP, cols % LM_GROUP);
        x += (size_t)groups * width * LM_GROUP * SIZE_OF(MULTIPLIED_AS(dtype));
        add_groups(dtype, (quad_of_rows){rest.at, LM_GROUP, 0}, 0, x, 1, count, width, 0, totals);
    }
    for (int m = 0; m < count; m++) out[m] = sums_of(totals[m]);
}

/* The same of at most four rows from `row` on, the last of their matrix, one by one. */
static __attribute__((noinline)) void multiply_last(const int dtype, const lm_matrix *w, int row, const char *x, int count, quad *out) {
    memset(out, 0, count * sizeof *out);
    for (int k = 0; k < 4 && row + k < w->rows; k++) {
        const quad_of_rows one = {(const char *)w->data + (size_t)(row + k) * w->cols * SIZE_OF(dtype), 0, LM_GROUP};
        for (int m = 0; m < count; m++) {
            quad sums;
            multiply_quad(dtype, one, w->cols, x + m * LM_GROUP * SIZE_OF(MULTIPLIED_AS(dtype)), 1, count, 0, &sums);
            out[m][k] = sums[0];
        }
    }
}

/* As `tile_product`, of tokens whose inputs begin at x. Where rows are the first to be multiplied, the next four are prefetched
 * meanwhile: a row is often a page, in which the processor's own prefetching begins anew. */
INLINE void few_tokens(const int dtype, const lm_matrix *w, int panel, int num_panels, const char *x, int num_tokens, float *out) {
    const size_t cols = w->cols, token_bytes = groups_of(w->cols) * LM_GROUP * SIZE_OF(MULTIPLIED_AS(dtype));
    const int begin = panel * LM_TILE_ROWS, end = begin + num_panels * LM_TILE_ROWS;
    for (int row = begin; row < end; row += 4) {
        const quad_of_rows rows = {(const char *)w->data + row * cols * SIZE_OF(dtype), cols, LM_GROUP};
        float *to = out + (row - begin) / LM_TILE_ROWS * PANEL_STRIDE + (row - begin) % LM_TILE_ROWS;
        for (int m = 0, count; m < num_tokens; m += count) {
            quad sums[TOKENS];
            count = min_int(TOKENS, num_tokens - m);
#define DO(COUNT) multiply_quad(dtype, rows, (int)cols, x + m * token_bytes, COUNT, COUNT, m == 0, sums)
            if (row + 4 > w->rows)
                multiply_last(dtype, w, row, x + m * token_bytes, count, sums);
            else
                FOR_TOKENS(count)
#undef DO
            for (int i = 0; i < count; i++) memcpy(to + (m + i) * LM_TILE_ROWS, &sums[i], sizeof sums[i]);
        }
    }
}

/* --- many tokens ------------------------------------------------------------------------------------------------- */

/* Some tokens' totals for a panel, between two blocks of columns. */
typedef struct {
    lanes of[FLOAT_ROWS_IN_CACHE / TOKENS][QUADS_OF_A_PANEL][TOKENS][4];
} panel_totals;

/* Copy groups from `first` on of a panel's rows, as they are multiplied: (4 quads, groups, 4 rows, 32). What lies beyond the matrix is 0. */
INLINE void copy_block(const int dtype, const lm_matrix *w, int panel, int first, int groups, char *to) {
    const size_t size = SIZE_OF(dtype);
    for (int q = 0; q < QUADS_OF_A_PANEL; q++)
        for (int k = 0; k < 4; k++) {
            const int row = panel * LM_TILE_ROWS + 4 * q + k;
            const char *from = (const char *)w->data + (size_t)row * w->cols * size;
            for (int g = 0; g < groups; g++) {
                const int col = (first + g) * LM_GROUP, left = row < w->rows ? w->cols - col : 0;
                char *place = to + (((size_t)q * groups + g) * 4 + k) * REGISTERS_OF_A_GROUP(dtype) * sizeof(lanes);
                char rest[LM_GROUP * sizeof(float)] = {0};
                const char *given = from + col * size;
                if (left < LM_GROUP) given = memcpy(rest, given, left * size);
                for (int r = 0; r < REGISTERS_OF_A_GROUP(dtype); r++) {
                    const lanes values = load_weights(dtype, given, 0, r);
                    memcpy(place + r * sizeof values, &values, sizeof values);
                }
            }
        }
}

/* Where a block of a panel's rows is multiplied: copied, or in the matrix where it lies as it is multiplied. With small registers, which
 * read it more often, it is always copied: rows that are 4 KB apart take each other's place in the nearest cache. */
typedef struct {
    quad_of_rows first; /* of its quads */
    size_t step;        /* bytes from one quad to the next */
} block_of_rows;

INLINE block_of_rows block_at(const int dtype, const lm_matrix *w, int panel, int first, int groups, char *copied) {
    const size_t size = SIZE_OF(dtype), cols = w->cols;
    if (LANES == 16 && MULTIPLIED_AS(dtype) == dtype && cols % LM_GROUP == 0 && (panel + 1) * LM_TILE_ROWS <= w->rows) {
        const char *at = (const char *)w->data + ((size_t)panel * LM_TILE_ROWS * cols + (size_t)first * LM_GROUP) * size;
        return (block_of_rows){{at, cols, LM_GROUP}, 4 * cols * size};
    }
    copy_block(dtype, w, panel, first, groups, copied);
    return (block_of_rows){{copied, LM_GROUP, 4 * LM_GROUP}, groups * 4 * REGISTERS_OF_A_GROUP(dtype) * sizeof(lanes)};
}

/* totals += four rows of a block times `count` tokens' inputs; where the block is the first one, they begin at 0. */
INLINE void add_block(const int as, quad_of_rows rows, const char *x, int groups, const int count, int begins, lanes kept[TOKENS][4]) {
    lanes totals[TOKENS][4];
    for (int m = 0; m < count; m++)
        for (int k = 0; k < 4; k++) totals[m][k] = begins ? (lanes){0} : kept[m][k];
    add_groups(as, rows, 0, x, groups, count, count, 0, totals);
    for (int m = 0; m < count; m++)
        for (int k = 0; k < 4; k++) kept[m][k] = totals[m][k];
}

/* out (num_tokens, 16) = a panel's sums, of which `width` are of rows that there are. */
static void put_panel(const panel_totals *totals, int num_tokens, int width, float *out) {
    for (int m = 0; m < num_tokens; m++, out += LM_TILE_ROWS)
        for (int q = 0; q < QUADS_OF_A_PANEL; q++) {
            const quad sums = sums_of(totals->of[m / TOKENS][q][m % TOKENS]);
            for (int k = 0; k < 4; k++) out[4 * q + k] = 4 * q + k < width ? sums[k] : 0;
        }
}

/* Prefetch a share of what is multiplied next into the L2 cache: groups from `first` on of a panel's rows. */
INLINE void prefetch_block(const int dtype, const lm_matrix *w, int panel, int first, int groups, int share, int num_shares) {
    const size_t size = SIZE_OF(dtype);
    const int lines = (int)((groups * LM_GROUP * size + 63) / 64), all = LM_TILE_ROWS * lines;
    for (int i = all * share / num_shares; i < all * (share + 1) / num_shares; i++) {
        const size_t row = (size_t)panel * LM_TILE_ROWS + i / lines;
        __builtin_prefetch((const char *)w->data + (row * w->cols + (size_t)first * LM_GROUP) * size + (size_t)(i % lines) * 64, 0, 2);
    }
}

INLINE void many_tokens(const int dtype, const lm_matrix *w, int panel, int num_panels, const char *x, int num_tokens, float *out) {
    const int as = MULTIPLIED_AS(dtype), all = groups_of(w->cols), at_once = BYTES_OF_A_BLOCK / (LM_GROUP * SIZE_OF(as));
    const int shares = (num_tokens + TOKENS - 1) / TOKENS * QUADS_OF_A_PANEL;
    _Alignas(64) char copied[LM_TILE_ROWS * BYTES_OF_A_BLOCK];
    panel_totals totals;
    for (int i = 0; i < num_panels; i++, panel++, out += PANEL_STRIDE) {
        for (int first = 0, groups; first < all; first += groups) {
            groups = min_int(at_once, all - first);
            const block_of_rows block = block_at(dtype, w, panel, first, groups, copied);
            const int is_last = first + groups == all, next = is_last ? 0 : first + groups, coming = min_int(at_once, all - next);
            for (int m = 0, count, share = 0; m < num_tokens; m += count) {
                count = min_int(TOKENS, num_tokens - m);
                const char *inputs = x + ((size_t)m * all + (size_t)first * count) * LM_GROUP * SIZE_OF(as);
                for (int q = 0; q < QUADS_OF_A_PANEL; q++) {
                    quad_of_rows rows = block.first;
                    rows.at += q * block.step;
                    prefetch_block(dtype, w, panel + is_last, next, coming, share++, shares);
#define DO(COUNT) add_block(as, rows, inputs, groups, COUNT, first == 0, totals.of[m / TOKENS][q])
                    FOR_TOKENS(count)
#undef DO
                }
            }
        }
        put_panel(&totals, num_tokens, w->rows - panel * LM_TILE_ROWS, out);
    }
}

/* --- either ------------------------------------------------------------------------------------------------------ */

INLINE void product_of_dtype(const int dtype, const lm_matrix *w, int panel, int num_panels, const void *inputs, int m, int num_tokens,
                             float *out) {
    const char *x = (const char *)inputs + (size_t)m * groups_of(w->cols) * LM_GROUP * SIZE_OF(MULTIPLIED_AS(dtype));
    if (num_tokens < TOKENS_FOR_BLOCKS)
        few_tokens(dtype, w, panel, num_panels, x, num_tokens, out);
    else
        many_tokens(dtype, w, panel, num_panels, x, num_tokens, out);
}

void float_product(const lm_matrix *w, int panel, int num_panels, inputs in, int m, int num_tokens, float *out) {
    switch (w->kind) {
    case LM_BF16: product_of_dtype(LM_BFLOAT16, w, panel, num_panels, in.bf16.at, m, num_tokens, out); break;
    case LM_F16: product_of_dtype(LM_FLOAT16, w, panel, num_panels, in.floats, m, num_tokens, out); break;
    default: product_of_dtype(LM_FLOAT32, w, panel, num_panels, in.floats, m, num_tokens, out);
    }
}
