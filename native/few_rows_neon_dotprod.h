/* The tile products with Arm's dot products: `sdot` multiplies 4 rows by 4 columns and adds them up, in one instruction.
 *
 * It takes signed weights and signed inputs, and the 4 inputs of any quarter of a register: two registers hold a
 * group's 32 inputs. Codes of 4 to 6 bits are signed as they are, and their zero point is folded into where the sum
 * starts; that of 8 bits and of a codebook is taken off the codes, which costs an exclusive or.
 */
#include <arm_neon.h>

#include "tiles.h"

#define ROWS_AT_ONCE 4

INLINE float32x4_t four_halves(const float16 *from) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8((const uint8_t *)from))); }

/* Two scales for a group: one for each half of its columns, as Q6_K has them. */
INLINE int has_two_scales(const int kind) { return FORMATS[kind].small_scales == 2; }

INLINE uint8x16_t codebook_of(const lm_matrix *w, const int kind) {
    const uint8x16_t middle = vdupq_n_u8(128);
    return FORMATS[kind].has_codebook ? veorq_u8(middle, vld1q_u8(w->codebook)) : middle;
}

/* codes[j] holds columns 4j to 4j + 3 of rows 4i to 4i + 3 of a group, in 8 bits each. */
INLINE void load_codes(const code_line *lines, int i, const int kind, uint8x16_t book, int8x16_t codes[8]) {
    const int bits = FORMATS[kind].code_bits;
    const uint8x16_t nibble = vdupq_n_u8(15), middle = vdupq_n_u8(128);
    const uint8x16_t high_mask = vdupq_n_u8((uint8_t)(((1 << (bits - 4)) - 1) << 4));
    for (int j = 0; j < (bits == 8 ? 8 : 4); j++) {
        const uint8x16_t bytes = vld1q_u8(lines[j].code[4 * i]);
        if (bits == 8) {
            codes[j] = vreinterpretq_s8_u8(veorq_u8(bytes, middle));
            continue;
        }
        uint8x16_t low = vandq_u8(bytes, nibble), high = vshrq_n_u8(bytes, 4);
        if (FORMATS[kind].has_codebook) {
            low = vqtbl1q_u8(book, low);
            high = vqtbl1q_u8(book, high);
        }
        codes[j] = vreinterpretq_s8_u8(low);
        codes[j + 4] = vreinterpretq_s8_u8(high);
    }
    for (int j = 0; j < 8 && bits != 4 && bits != 8; j++) {
        const uint8x16_t bytes = vld1q_u8(lines[high_line(kind, j)].code[4 * i]);
        const uint8x16_t placed = vshlq_u8(bytes, vdupq_n_s8((int8_t)(4 - high_shift(kind, j)))); /* to bit 4 of the code */
        codes[j] = vorrq_s8(codes[j], vreinterpretq_s8_u8(vandq_u8(placed, high_mask)));
    }
}

/* sum + the products of half a group's codes and inputs. */
INLINE int32x4_t half_group(int32x4_t sum, const int8x16_t *codes, const int8_t *q) {
    const int8x16_t inputs = vld1q_s8(q);
    sum = vdotq_laneq_s32(sum, codes[0], inputs, 0);
    sum = vdotq_laneq_s32(sum, codes[1], inputs, 1);
    sum = vdotq_laneq_s32(sum, codes[2], inputs, 2);
    return vdotq_laneq_s32(sum, codes[3], inputs, 3);
}

/* sum + what the upper bits of the outlier's codes add to it. */
INLINE int32x4_t add_outlier(int32x4_t sum, const int8x16_t codes[8], const lm_block *block) {
    int32_t bits;
    memcpy(&bits, block->high, 4);
    const int32x4_t high = vdotq_s32(vdupq_n_s32(0), codes[block->outlier], vreinterpretq_s8_s32(vdupq_n_s32(bits)));
    return vaddq_s32(sum, vshlq_n_s32(high, 8));
}

/* Where the sum of the codes' products starts. */
INLINE int32_t start_of(const lm_block *block, const int kind) {
    return FORMATS[kind].zero == 128 ? 0 : FORMATS[kind].zero * block->negated_sum; /* 128 is off the codes */
}

/* The total of rows 4i to 4i + 3 and that of one more group, whose codes' products add up to `sum`. */
INLINE float32x4_t add_group(float32x4_t total, int32x4_t sum, const uint8_t *tile, int i, const lm_block *block, const int kind) {
    total = vfmaq_f32(total, vcvtq_f32_s32(sum), vmulq_n_f32(four_halves(scales_of(kind, tile) + 4 * i), block->scale));
    if (FORMATS[kind].has_minimum) total = vfmaq_n_f32(total, four_halves(minima_of(kind, tile) + 4 * i), block->total);
    return total;
}

INLINE float32x4_t sums_at(const tile_column *t, const float *out) { return t->begins ? vdupq_n_f32(0) : vld1q_f32(out); }

INLINE void tile_rows(const tile_column *t, const int kind, const int rows) {
    const uint8_t *tile = t->tiles;
    const uint8x16_t book = codebook_of(t->w, kind);
    for (int k = 0; k < t->count; k++, tile += t->step)
        for (int i = 0; i < 4; i++) {
            int8x16_t codes[8];
            load_codes(codes_of(kind, tile, 0), i, kind, book, codes);
            for (int m = 0; m < rows; m++) {
                const lm_block *block = &t->x[(size_t)m * t->groups];
                float *out = t->out + k * PANEL_STRIDE + m * LM_TILE_ROWS + 4 * i;
                const int32x4_t start = add_outlier(vdupq_n_s32(start_of(block, kind)), codes, block);
                const int32x4_t left = half_group(start, codes, block->q);
                vst1q_f32(out, add_group(sums_at(t, out), half_group(left, codes + 4, block->q + 16), tile, i, block, kind));
            }
        }
}

/* A group's product before the float16 scale and the inputs'. */
INLINE float32x4_t super_value(
    const int8x16_t codes[8], const lm_block *block, const int kind, float32x4_t scale, float32x4_t right_scale) {
    const int zero = FORMATS[kind].zero == 128 ? 0 : FORMATS[kind].zero; /* 128 is off the codes */
    int32x4_t left = vdupq_n_s32(zero * block->negated_halves[0]), right = vdupq_n_s32(zero * block->negated_halves[1]);
    if (block->outlier < 4)
        left = add_outlier(left, codes, block);
    else
        right = add_outlier(right, codes, block);
    left = half_group(left, codes, block->q);
    right = half_group(right, codes + 4, block->q + 16);
    if (!has_two_scales(kind)) return vmulq_f32(vcvtq_f32_s32(vaddq_s32(left, right)), scale);
    return vfmaq_f32(vmulq_f32(vcvtq_f32_s32(right), right_scale), vcvtq_f32_s32(left), scale);
}

INLINE float32x4_t bytes_at(const uint8_t *from) {
    uint32_t bits;
    memcpy(&bits, from, 4);
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bits)))));
}

INLINE float32x4_t signed_bytes_at(const int8_t *from) {
    uint32_t bits;
    memcpy(&bits, from, 4);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(bits)))));
}

/* As `tile_rows`, rows 4i to 4i + 3 of one tile of the K types. */
INLINE void quarter_super_rows(const tile_column *t, const uint8_t *tile, const small_integers *small, int i, float *out,
                               const int kind, const int rows) {
    const tile_q6_k *own = (const tile_q6_k *)tile; /* of two scales a group */
    const uint8x16_t book = codebook_of(t->w, kind);
    float32x4_t part[ROWS_AT_ONCE];
    for (int m = 0; m < rows; m++) part[m] = vdupq_n_f32(0);
    for (int g = 0; g < 8; g++) {
        int8x16_t codes[8];
        load_codes(codes_of(kind, tile, g), i, kind, book, codes);
        const float32x4_t scale = has_two_scales(kind) ? signed_bytes_at(&own->s[2 * g][4 * i]) : signed_bytes_at(&small->s[g][4 * i]);
        const float32x4_t right_scale = has_two_scales(kind) ? signed_bytes_at(&own->s[2 * g + 1][4 * i]) : scale;
        for (int m = 0; m < rows; m++) {
            const lm_block *block = &t->x[(size_t)m * t->groups + g];
            part[m] = vfmaq_n_f32(part[m], super_value(codes, block, kind, scale, right_scale), block->scale);
        }
    }
    for (int m = 0; m < rows; m++, out += LM_TILE_ROWS) {
        float32x4_t total = vfmaq_f32(sums_at(t, out), four_halves(scales_of(kind, tile) + 4 * i), part[m]), offset = vdupq_n_f32(0);
        const lm_block *x = &t->x[(size_t)m * t->groups];
        for (int g = 0; g < 8 && FORMATS[kind].has_minimum; g++)
            offset = vfmaq_n_f32(offset, bytes_at(&small->t[g][4 * i]), x[g].total);
        if (FORMATS[kind].has_minimum) total = vfmsq_f32(total, four_halves(minima_of(kind, tile) + 4 * i), offset);
        vst1q_f32(out, total);
    }
}

/* As `tile_rows`, for the K types. */
INLINE void super_rows(const tile_column *t, const int kind, const int rows) {
    const uint8_t *tile = t->tiles;
    for (int k = 0; k < t->count; k++, tile += t->step) {
        const small_integers small = unpack_integers(tile, kind); /* with two scales a group, these are left alone */
        for (int i = 0; i < 4; i++) quarter_super_rows(t, tile, &small, i, t->out + k * PANEL_STRIDE + 4 * i, kind, rows);
    }
}
