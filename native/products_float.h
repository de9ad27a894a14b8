/* Products of weights that are numbers, BF16, F16 or F32, as the file has them: row-major. */
#include "inputs.h"

#define TOKENS_AT_ONCE (LANES == 16 ? 4 : 2) /* that share each weight that is loaded, as far as there are registers for their sums */

/* totals[m][k] += the products of a group's columns of weights in row k, each `stride` after the last one, and inputs of token m. */
INLINE void add_columns(const int dtype, const void *weights, size_t first, size_t stride, const void *x, size_t place, size_t cols,
                      const int count, lanes totals[TOKENS_AT_ONCE][4]) {
#ifdef __AVX512BF16__
    if (dtype == LM_BFLOAT16) {
        __m512bh values[4], input;
        for (int k = 0; k < 4; k++) memcpy(&values[k], (const uint16_t *)weights + first + k * stride, sizeof values[k]);
        for (int m = 0; m < count; m++) {
            memcpy(&input, (const uint16_t *)x + place + m * cols, sizeof input);
            for (int k = 0; k < 4; k++) totals[m][k] = (lanes)_mm512_dpbf16_ps((__m512)totals[m][k], values[k], input);
        }
        return;
    }
#endif
    for (int j = 0; j < LM_GROUP; j += PAIR) {
        lanes values[4][2];
        for (int k = 0; k < 4; k++) load_pair(dtype, weights, first + k * stride + j, values[k]);
        for (int half = 0; half < 2; half++)
            for (int m = 0; m < count; m++) {
                const lanes input = load_floats((const float *)x + place + m * cols + j + half * LANES);
                for (int k = 0; k < 4; k++) totals[m][k] += values[k][half] * input;
            }
    }
}

/* out[m] = four rows of weights, `stride` apart, times the inputs (count, cols) of some tokens from `place` of x on. A token's sums are
 * added up in the same order whatever `count` is. Where the rows are the first to be multiplied, the next four are prefetched
 * meanwhile: a row is often a page, in which the processor's own prefetching begins anew. */
INLINE void four_rows(const int dtype, const void *weights, size_t first, size_t stride, size_t cols, const void *x, size_t place,
                      const int count, const int are_first, quad *out) {
    const size_t size = dtype == LM_FLOAT32 ? 4 : 2;
    lanes totals[TOKENS_AT_ONCE][4] = {{{0}}};
    for (size_t i = 0; i < cols; i += LM_GROUP) {
        for (int k = 0; k < 4 && are_first; k++) __builtin_prefetch((const char *)weights + (first + (k + 4) * stride + i) * size);
        add_columns(dtype, weights, first + i, stride, x, place + i, cols, count, totals);
    }
    for (int m = 0; m < count; m++) out[m] = sums_of(totals[m]);
}

/* The same of one token and at most four rows, the last of their matrix. */
INLINE void last_rows(const int dtype, const lm_matrix *w, int row, const void *x, size_t place, quad *out) {
    quad sums = {0}, one;
    for (int k = 0; k < 4 && row + k < w->rows; k++) {
        four_rows(dtype, w->data, (size_t)(row + k) * w->cols, 0, w->cols, x, place, 1, 0, &one);
        sums[k] = one[0];
    }
    *out = sums;
}

/* As `tile_product`, of the tokens whose inputs begin at `place` of x. */
INLINE void float_rows(const int dtype, const lm_matrix *w, int panel, int num_panels, const void *x, size_t place, int num_rows,
                       float *out) {
    const int begin = panel * LM_TILE_ROWS, end = begin + num_panels * LM_TILE_ROWS;
    const size_t cols = w->cols;
    for (int r = begin; r < end; r += 4) {
        float *to = out + (r - begin) / LM_TILE_ROWS * PANEL_STRIDE + (r - begin) % LM_TILE_ROWS;
        for (int m = 0, count; m < num_rows; m += count) {
            quad sums[TOKENS_AT_ONCE];
            count = r + 4 <= w->rows && m + TOKENS_AT_ONCE <= num_rows ? TOKENS_AT_ONCE : 1;
            if (r + 4 > w->rows)
                last_rows(dtype, w, r, x, place + m * cols, sums);
            else if (count > 1)
                four_rows(dtype, w->data, r * cols, cols, cols, x, place + m * cols, TOKENS_AT_ONCE, m == 0, sums);
            else
                four_rows(dtype, w->data, r * cols, cols, cols, x, place + m * cols, 1, m == 0, sums);
            for (int i = 0; i < count; i++) memcpy(to + (m + i) * LM_TILE_ROWS, &sums[i], sizeof sums[i]);
        }
    }
}

/* What a matrix's numbers are. */
static inline int dtype_of(const lm_matrix *w) {
    return w->kind == LM_BF16 ? LM_BFLOAT16 : w->kind == LM_F16 ? LM_FLOAT16 : LM_FLOAT32;
}

static inline int is_float(const lm_matrix *w) { return w->kind == LM_BF16 || w->kind == LM_F16 || w->kind == LM_F32; }

/* As `tile_product`, of rows of tokens from `m` on. */
static void float_product(const lm_matrix *w, int panel, int num_panels, inputs in, int m, int num_rows, float *out) {
    const size_t place = (size_t)m * w->cols;
    if (w->kind == LM_BF16)
        float_rows(LM_BFLOAT16, w, panel, num_panels, in.bf16.at, place, num_rows, out);
    else if (w->kind == LM_F16)
        float_rows(LM_FLOAT16, w, panel, num_panels, in.floats, place, num_rows, out);
    else
        float_rows(LM_FLOAT32, w, panel, num_panels, in.floats, place, num_rows, out);
}
