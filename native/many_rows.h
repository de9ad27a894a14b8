/* A `tile_product` made of two functions: `many_rows_product` computes as many rows as it can, and another set's, `FEW_ROWS_PRODUCTS`,
 * the rest. Included at the end of a file that defines both.
 */
extern const tile_products FEW_ROWS_PRODUCTS;

/* As many rows of one panel's product as there can be; returns how many. */
static int many_rows(const lm_matrix *w, int panel, const lm_block *x, int num_rows, float *out) {
    const uint8_t *tiles = panel_at(w, panel);
#define CASE(KIND) \
    case KIND: return many_rows_product(w, tiles, x, num_rows, KIND, out);
    switch (w->kind) {
        FOR_GROUP_TYPES(CASE)
    default: return 0; /* the K types have tiles of another order */
    }
#undef CASE
}

/* As in tile_product.h. */
static void tile_product(const lm_matrix *w, int panel, int num_panels, const uint8_t *coming, const lm_block *x, int num_rows, float *out) {
    int done = 0;
    for (int i = 0; i < num_panels; i++) done = many_rows(w, panel + i, x, num_rows, out + (size_t)i * PANEL_STRIDE);
    x += (size_t)done * (w->cols / LM_GROUP);
    FEW_ROWS_PRODUCTS.product(w, panel, num_panels, coming, x, num_rows - done, out + done * LM_TILE_ROWS);
}
