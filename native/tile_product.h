/* A stripe's product, made of a set's own `tile_rows` and, for the K formats, `super_rows`: included at the end of a file
 * that defines them and ROWS_AT_ONCE. */

#if ROWS_AT_ONCE >= 8
#define EIGHT_ROWS(SOME_ROWS, KIND)                                                        \
    for (; num_rows >= 8; num_rows -= 8, x += 8 * (size_t)groups, out += 8 * LM_TILE_ROWS) \
        SOME_ROWS(w, tiles, groups, x, KIND, 8, out);
#else
#define EIGHT_ROWS(SOME_ROWS, KIND)
#endif

/* Kind and rows are constants to the compiler, so that the sums stay in registers. */
#define CASES(SOME_ROWS, KIND)                                                             \
    EIGHT_ROWS(SOME_ROWS, KIND)                                                            \
    for (; num_rows >= 4; num_rows -= 4, x += 4 * (size_t)groups, out += 4 * LM_TILE_ROWS) \
        SOME_ROWS(w, tiles, groups, x, KIND, 4, out);                                      \
    for (; num_rows >= 1; num_rows -= 1, x += groups, out += LM_TILE_ROWS)                 \
        SOME_ROWS(w, tiles, groups, x, KIND, 1, out);                                      \
    break

/* out (num_rows, 16): 16 rows of the matrix times `num_rows` rows of groups. */
static void tile_product(const lm_matrix *w, int stripe, const lm_block *x, int num_rows, float *out) {
    const int groups = w->cols / LM_GROUP;
    const uint8_t *tiles = stripe_at(w, stripe);
    switch (w->kind) {
    case LM_Q8: CASES(tile_rows, LM_Q8);
    case LM_Q4: CASES(tile_rows, LM_Q4);
    case LM_Q4_MIN: CASES(tile_rows, LM_Q4_MIN);
    case LM_Q4_CODEBOOK: CASES(tile_rows, LM_Q4_CODEBOOK);
    case LM_Q4_K: CASES(super_rows, LM_Q4_K);
    case LM_Q5_K: CASES(super_rows, LM_Q5_K);
    case LM_Q6_K: CASES(super_rows, LM_Q6_K);
    }
}
