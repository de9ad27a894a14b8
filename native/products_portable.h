/* The tile products in plain C: the definition that the others are held to. */
#include "tiles.h"

static int32_t input_code(const lm_block *x, int col) {
    return x->q[col] + ((uint32_t)col / 4 == x->outlier ? 256 * x->high[col % 4] : 0);
}

/* A row of a tile times a group of inputs. */
static float group_product(const lm_matrix *w, const uint8_t *tile, int row, const lm_block *x) {
    const code_line *lines = codes_of(w->kind, tile, 0);
    int32_t sum = 0;
    for (int c = 0; c < LM_GROUP; c++) sum += code_at(w, w->kind, lines, row, c) * input_code(x, c);
    const float product = (float)sum * (half_at(scales_of(w->kind, tile), row) * x->scale);
    return FORMATS[w->kind].has_minimum ? product + half_at(minima_of(w->kind, tile), row) * x->total : product;
}

/* A row of a tile of the K types times eight groups of inputs; the whole numbers stay below 2^30. */
static float super_product(const lm_matrix *w, const uint8_t *tile, int row, const lm_block *x) {
    const int has_minimum = FORMATS[w->kind].has_minimum;
    float product = 0, offset = 0;
    for (int g = 0; g < GROUPS_OF_SUPER; g++, x++) {
        const code_line *lines = codes_of(w->kind, tile, g);
        int32_t sum = 0;
        for (int c = 0; c < LM_GROUP; c++)
            sum += scale_at(w->kind, tile, row, g * LM_GROUP + c) * code_at(w, w->kind, lines, row, c) * input_code(x, c);
        product += (float)sum * x->scale;
        if (has_minimum) offset -= (float)(minimum_at(tile, row, g) * x->negated_sum) * x->scale;
    }
    product *= half_at(scales_of(w->kind, tile), row);
    return has_minimum ? product - half_at(minima_of(w->kind, tile), row) * offset : product;
}

/* Panel i of `num_panels` from `panel` on: out + i * PANEL_STRIDE (num_rows, 16) = its 16 rows times `num_rows` rows of inputs. */
static void tile_product(const lm_matrix *w, int panel, int num_panels, const uint8_t *coming, const lm_block *x, int num_rows, float *out) {
    (void)coming; /* as in tile_product.h */
    const int groups = w->cols / LM_GROUP, num_tiles = tiles_of(w);
    for (int i = 0; i < num_panels; i++)
        for (int m = 0; m < num_rows; m++)
            for (int r = 0; r < LM_TILE_ROWS; r++) {
                const uint8_t *tile = panel_at(w, panel + i);
                const lm_block *row = x + (size_t)m * groups;
                float total = 0;
                for (int t = 0; t < num_tiles; t++, tile += tile_bytes(w->kind))
                    total += is_super(w->kind) ? super_product(w, tile, r, row + 8 * t) : group_product(w, tile, r, row + t);
                out[i * PANEL_STRIDE + m * LM_TILE_ROWS + r] = total;
            }
}
