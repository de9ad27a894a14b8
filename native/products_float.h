/* Products of weights that are numbers, BF16 or F32, as the file has them: row-major. */
#include "inputs.h"

#define TOKENS_AT_ONCE (LANES == 16 ? 4 : 2) /* that share each weight that is loaded, as far as there are registers for their sums */

/* out[m] = four rows of weights, `stride` apart, times the inputs x (count, cols) of some tokens, in the order in which `load_pair` has
 * weights of `dtype`. A token's sums are added up in the same order whatever `count` is. Where the rows are the first to be multiplied,
 * the next four are prefetched meanwhile: a row is often a page, in which the processor's own prefetching begins anew. */
INLINE void four_rows(const int dtype, const void *weights, size_t first, size_t stride, int cols, const float *x, const int count,
                      const int are_first, quad *out) {
    const size_t size = dtype == LM_FLOAT32 ? 4 : 2;
    lanes totals[TOKENS_AT_ONCE][4] = {{{0}}};
    for (int i = 0; i < cols; i += LM_GROUP) {
        for (int k = 0; k < 4 && are_first; k++) __builtin_prefetch((const char *)weights + (first + (k + 4) * stride + i) * size);
        for (int j = i; j < i + LM_GROUP; j += PAIR) {
            lanes values[4][2];
            for (int k = 0; k < 4; k++) load_pair(dtype, weights, first + k * stride + j, values[k]);
            for (int half = 0; half < 2; half++)
                for (int m = 0; m < count; m++) {
                    const lanes input = load_floats(x + (size_t)m * cols + j + half * LANES);
                    for (int k = 0; k < 4; k++) totals[m][k] += values[k][half] * input;
                }
        }
    }
    for (int m = 0; m < count; m++) out[m] = sums_of(totals[m]);
}

/* The same of at most four rows that are the last of their matrix. */
INLINE void last_rows(const int dtype, const lm_matrix *w, int row, const float *x, quad *out) {
    quad sums = {0}, one;
    for (int k = 0; k < 4 && row + k < w->rows; k++) {
        four_rows(dtype, w->data, (size_t)(row + k) * w->cols, 0, w->cols, x, 1, 0, &one);
        sums[k] = one[0];
    }
    *out = sums;
}

/* As `tile_product`; `cols` apart lie the inputs x of each token. */
INLINE void float_rows(const int dtype, const lm_matrix *w, int panel, int num_panels, const float *x, int num_rows, float *out) {
    const int begin = panel * LM_TILE_ROWS, end = begin + num_panels * LM_TILE_ROWS;
    const size_t cols = w->cols;
    for (int r = begin; r < end; r += 4) {
        float *to = out + (r - begin) / LM_TILE_ROWS * PANEL_STRIDE + (r - begin) % LM_TILE_ROWS;
        for (int m = 0, count; m < num_rows; m += count) {
            quad sums[TOKENS_AT_ONCE];
            const float *own = x + m * cols;
            count = r + 4 <= w->rows && m + TOKENS_AT_ONCE <= num_rows ? TOKENS_AT_ONCE : 1;
            if (r + 4 > w->rows)
                last_rows(dtype, w, r, own, sums);
            else if (count > 1)
                four_rows(dtype, w->data, r * cols, cols, w->cols, own, TOKENS_AT_ONCE, m == 0, sums);
            else
                four_rows(dtype, w->data, r * cols, cols, w->cols, own, 1, m == 0, sums);
            for (int i = 0; i < count; i++) memcpy(to + (m + i) * LM_TILE_ROWS, &sums[i], sizeof sums[i]);
        }
    }
}

static inline int is_float(const lm_matrix *w) { return w->kind == LM_BF16 || w->kind == LM_F32; }

/* As `tile_product`, of rows of tokens from `m` on. */
static void float_product(const lm_matrix *w, int panel, int num_panels, inputs in, int m, int num_rows, float *out) {
    const size_t first = (size_t)m * w->cols;
    if (w->kind == LM_BF16)
        float_rows(LM_BFLOAT16, w, panel, num_panels, in.pairs.at + first, num_rows, out);
    else
        float_rows(LM_FLOAT32, w, panel, num_panels, in.floats + first, num_rows, out);
}
