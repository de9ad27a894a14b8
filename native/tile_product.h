/* The product of some panels, made of a set's own `tile_rows` and, for the K types, `super_rows`: included at the end of a
 * file that defines them and ROWS_AT_ONCE. A set that defines no ROWS_AT_ONCE has a `blocked_product` for any number of rows.
 *
 * With a few rows of inputs, a product takes as long as it takes to read its weights. A core has more reads under way where they lie
 * in several pages: eight panels side by side are read a third faster than one after the other. So the panels take turns, tile by
 * tile; with x86's K types, whose tiles are 2 KB, group by group. The sums of a row are added up in the same order in any case.
 */

#ifdef ROWS_AT_ONCE
/* `rows` rows of inputs; these and the kind are constants to the compiler. */
INLINE void some_rows(
    const lm_matrix *w, int panel, int num_panels, const lm_block *x, const int kind, const int rows, float *out) {
    const int num_tiles = w->cols / tile_cols(kind);
    const size_t size = tile_bytes(kind), step = num_tiles * size;
    for (int i = 0; i < num_tiles; i++) {
        const tile_column t = {
            .w = w,
            .tiles = (const uint8_t *)w->data + panel * step + i * size,
            .step = step,
            .count = num_panels,
            .begins = i == 0,
            .x = x + i * (tile_cols(kind) / LM_GROUP),
            .groups = w->cols / LM_GROUP,
            .out = out,
        };
        if (is_super(kind))
            super_rows(&t, kind, rows);
        else
            tile_rows(&t, kind, rows);
    }
}

INLINE void blocked_product(const lm_matrix *w, int panel, int num_panels, const uint8_t *coming, const lm_block *x, int num_rows,
                            const int kind, float *out) {
    (void)coming;
    const size_t groups = w->cols / LM_GROUP;
    int m = 0;
#define ROWS(NUMBER)                      \
    for (; m + NUMBER <= num_rows; m += NUMBER) \
    some_rows(w, panel, num_panels, x + m * groups, kind, NUMBER, out + m * LM_TILE_ROWS)
#if ROWS_AT_ONCE >= 16
    ROWS(16);
#endif
#if ROWS_AT_ONCE >= 4
    ROWS(4);
#endif
    ROWS(2);
    ROWS(1);
#undef ROWS
}
#endif

/* A function for each kind: in one for all, compilers find worse registers. */
#define ALONE(KIND)                                                                                                              \
    static __attribute__((noinline)) void product_##KIND(const lm_matrix *w, int panel, int num_panels, const uint8_t *coming,  \
                                                         const lm_block *x, int num_rows, float *out) {                          \
        blocked_product(w, panel, num_panels, coming, x, num_rows, KIND, out);                                                   \
    }
FOR_GROUP_TYPES(ALONE)
FOR_SUPER_TYPES(ALONE)
#undef ALONE

/* Panel i of `num_panels` from `panel` on: out + i * PANEL_STRIDE (num_rows, 16) = its 16 rows times `num_rows` rows of inputs. `coming`,
 * if it is not NULL, is where as many panels begin that are multiplied next: to be prefetched. */
static void tile_product(const lm_matrix *w, int panel, int num_panels, const uint8_t *coming, const lm_block *x, int num_rows, float *out) {
#define CASE(KIND) \
    case KIND: product_##KIND(w, panel, num_panels, coming, x, num_rows, out); break;
    switch (w->kind) {
        FOR_GROUP_TYPES(CASE)
        FOR_SUPER_TYPES(CASE)
    }
#undef CASE
}
