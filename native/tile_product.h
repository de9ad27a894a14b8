/* A stripe's product, made of a set's own `tile_rows`: included at the end of a file that defines it and ROWS_AT_ONCE. */

#if ROWS_AT_ONCE >= 8
#define EIGHT_ROWS(KIND)                                                                   \
    for (; num_rows >= 8; num_rows -= 8, x += 8 * (size_t)groups, out += 8 * LM_TILE_ROWS) \
        tile_rows(w, tiles, groups, x, KIND, 8, out);
#else
#define EIGHT_ROWS(KIND)
#endif

/* Kind and rows are constants to the compiler, so that the sums stay in registers. */
#define CASES(KIND)                                                                        \
    EIGHT_ROWS(KIND)                                                                       \
    for (; num_rows >= 4; num_rows -= 4, x += 4 * (size_t)groups, out += 4 * LM_TILE_ROWS) \
        tile_rows(w, tiles, groups, x, KIND, 4, out);                                      \
    for (; num_rows >= 1; num_rows -= 1, x += groups, out += LM_TILE_ROWS)                 \
        tile_rows(w, tiles, groups, x, KIND, 1, out);                                      \
    break

/* out (num_rows, 16): 16 rows of the matrix times `num_rows` rows of groups. */
static void tile_product(const lm_matrix *w, int stripe, const lm_block *x, int num_rows, float *out) {
    const int groups = w->cols / LM_GROUP;
    const uint8_t *tiles = (const uint8_t *)w->data + (size_t)stripe * groups * tile_bytes(w->kind);
    switch (w->kind) {
    case LM_Q8: CASES(LM_Q8);
    case LM_Q4: CASES(LM_Q4);
    case LM_Q4_MIN: CASES(LM_Q4_MIN);
    case LM_Q4_CODEBOOK: CASES(LM_Q4_CODEBOOK);
    }
}
