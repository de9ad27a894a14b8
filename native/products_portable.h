/* The tile products in plain C: the definition that the others are held to. */
#include "tiles.h"

#define NAME "portable"

/* out (num_rows, 16): 16 rows of the matrix times `num_rows` rows of groups. */
static void tile_product(const lm_matrix *w, int stripe, const lm_block *x, int num_rows, float *out) {
    const int groups = w->cols / LM_GROUP;
    const size_t size = tile_bytes(w->kind);
    const uint8_t *tiles = (const uint8_t *)w->data + (size_t)stripe * groups * size;
    for (int m = 0; m < num_rows; m++) {
        for (int r = 0; r < LM_TILE_ROWS; r++) {
            float total = 0;
            for (int g = 0; g < groups; g++) {
                const lm_block *block = &x[(size_t)m * groups + g];
                const uint8_t *tile = tiles + g * size;
                const uint8_t *scales = tile + (w->kind == LM_Q8 ? 512 : 256);
                uint16_t bits;
                int32_t sum = 0;
                for (int c = 0; c < LM_GROUP; c++) sum += code_at(w, tile, r, c) * block->q[c];
                memcpy(&bits, scales + 2 * r, 2);
                total += (float)sum * (from_half(bits) * block->scale);
                if (w->kind == LM_Q4_MIN) {
                    memcpy(&bits, scales + 32 + 2 * r, 2);
                    total += from_half(bits) * ((float)block->sum * block->scale);
                }
            }
            out[m * LM_TILE_ROWS + r] = total;
        }
    }
}
