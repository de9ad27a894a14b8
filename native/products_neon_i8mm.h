/* The tile products with Arm's matrix products of 8-bit integers: `smmla` multiplies 2 rows by 8 columns of weights with 2
 * rows of inputs, twice what `sdot` does.
 *
 * Whole numbers have no rounding, and what follows them is the dotprod set's own code. So both sets have the same results, to
 * the bit, and the dotprod set computes what is left over of 2 rows.
 */
#include "few_rows_neon_dotprod.h"

#define FEW_ROWS_PRODUCTS lm_products_neon_dotprod

/* Rows 4i and 4i + 1 of a tile, columns 8p to 8p + 7, as pairs[2 p]; rows 4i + 2 and 4i + 3 as pairs[2 p + 1]. */
INLINE void make_pairs(const int8x16_t codes[8], int8x16_t pairs[8]) {
    for (int p = 0; p < 4; p++) {
        const int32x4_t left = vreinterpretq_s32_s8(codes[2 * p]), right = vreinterpretq_s32_s8(codes[2 * p + 1]);
        pairs[2 * p] = vreinterpretq_s8_s32(vzip1q_s32(left, right));
        pairs[2 * p + 1] = vreinterpretq_s8_s32(vzip2q_s32(left, right));
    }
}

/* `rows` rows of inputs, an even number, times a panel: 4 of its 16 rows at a time, so that the totals stay in registers. */
INLINE void paired_rows(
    const lm_matrix *w, const uint8_t *tiles, int groups, const lm_block *x, const int kind, const int rows, float *out) {
    const size_t size = tile_bytes(kind);
    const uint8x16_t book = codebook_of(w, kind);
    for (int i = 0; i < 4; i++) {
        float32x4_t total[8];
        for (int m = 0; m < rows; m++) total[m] = vdupq_n_f32(0);
        const uint8_t *tile = tiles;
        for (int g = 0; g < groups; g++, tile += size) {
            int8x16_t codes[8], pairs[8];
            load_codes(codes_of(kind, tile, 0), i, kind, book, codes);
            make_pairs(codes, pairs);
            for (int m = 0; m < rows; m += 2) {
                const lm_block *one = &x[(size_t)m * groups + g], *other = one + groups;
                const int32x2_t starts = {start_of(one, kind), start_of(other, kind)};
                int32x4_t upper = vcombine_s32(starts, starts), lower = upper; /* row by row: one's sum, other's sum */
                for (int p = 0; p < 4; p++) {
                    const int8x16_t both = vcombine_s8(vld1_s8(one->q + 8 * p), vld1_s8(other->q + 8 * p));
                    upper = vmmlaq_s32(upper, pairs[2 * p], both);
                    lower = vmmlaq_s32(lower, pairs[2 * p + 1], both);
                }
                const int32x4_t sum = add_outlier(vuzp1q_s32(upper, lower), codes, one);
                const int32x4_t other_sum = add_outlier(vuzp2q_s32(upper, lower), codes, other);
                total[m] = add_group(total[m], sum, tile, i, one, kind);
                total[m + 1] = add_group(total[m + 1], other_sum, tile, i, other, kind);
            }
        }
        for (int m = 0; m < rows; m++) vst1q_f32(out + m * LM_TILE_ROWS + 4 * i, total[m]);
    }
}

/* The rows up to the last even number; returns how many they are. */
INLINE int many_rows_product(
    const lm_matrix *w, const uint8_t *tiles, const lm_block *x, int num_rows, const int kind, float *out) {
    const int groups = w->cols / LM_GROUP;
    int m = 0;
    for (; m + 8 <= num_rows; m += 8) paired_rows(w, tiles, groups, x + (size_t)m * groups, kind, 8, out + m * LM_TILE_ROWS);
    for (; m + 2 <= num_rows; m += 2) paired_rows(w, tiles, groups, x + (size_t)m * groups, kind, 2, out + m * LM_TILE_ROWS);
    return m;
}

#include "many_rows.h"
