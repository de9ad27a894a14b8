/* The tile products with Arm's dot products: `sdot` multiplies 4 rows by 4 columns and adds them up, in one instruction.
 *
 * It wants signed weights and signed inputs, and takes the 4 inputs from any quarter of a register: two registers hold a
 * group's 32 inputs. 4-bit codes are signed as they are; Q4_0's zero point is folded into where the sum starts, the others'
 * is taken off the codes, which costs an exclusive or.
 */
#include <arm_neon.h>

#include "tiles.h"

#define NAME "neon_dotprod"
#define ROWS_AT_ONCE 4

INLINE float32x4_t four_halves(const uint8_t *halves) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(halves))); }

INLINE uint8x16_t codebook_of(const lm_matrix *w, const int kind) {
    const uint8x16_t middle = vdupq_n_u8(128);
    return kind == LM_IQ4_NL ? veorq_u8(middle, vld1q_u8(w->codebook)) : middle;
}

/* codes[j] holds columns 4j to 4j + 3 of rows 4i to 4i + 3 of a tile, in 8 bits each. */
INLINE void load_codes(const uint8_t *tile, int i, const int kind, uint8x16_t book, int8x16_t codes[8]) {
    const uint8x16_t nibble = vdupq_n_u8(15), middle = vdupq_n_u8(128);
    for (int j = 0; j < (kind == LM_Q8_0 ? 8 : 4); j++) {
        const uint8x16_t bytes = vld1q_u8(tile + 64 * j + 16 * i);
        if (kind == LM_Q8_0) {
            codes[j] = vreinterpretq_s8_u8(veorq_u8(bytes, middle));
            continue;
        }
        uint8x16_t low = vandq_u8(bytes, nibble), high = vshrq_n_u8(bytes, 4);
        if (kind == LM_IQ4_NL) {
            low = vqtbl1q_u8(book, low);
            high = vqtbl1q_u8(book, high);
        }
        codes[j] = vreinterpretq_s8_u8(low);
        codes[j + 4] = vreinterpretq_s8_u8(high);
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

/* Where the sum of the codes' products starts. */
INLINE int32_t start_of(const lm_block *block, const int kind) { return kind == LM_Q4_0 ? -8 * block->sum : 0; }

/* The total of rows 4i to 4i + 3 and that of one more group, whose codes' products add up to `sum`. */
INLINE float32x4_t add_group(float32x4_t total, int32x4_t sum, const uint8_t *tile, int i, const lm_block *block, const int kind) {
    const uint8_t *halves = tile + (kind == LM_Q8_0 ? 512 : 256) + 8 * i;
    total = vfmaq_f32(total, vcvtq_f32_s32(sum), vmulq_n_f32(four_halves(halves), block->scale));
    if (kind == LM_Q4_1) total = vfmaq_n_f32(total, four_halves(halves + 32), block->total);
    return total;
}

INLINE float32x4_t sums_at(const tile_column *t, const float *out) { return t->begins ? vdupq_n_f32(0) : vld1q_f32(out); }

INLINE void tile_rows(const tile_column *t, const int kind, const int rows) {
    const uint8_t *tile = t->tiles;
    const uint8x16_t book = codebook_of(t->w, kind);
    for (int k = 0; k < t->count; k++, tile += t->step)
        for (int i = 0; i < 4; i++) {
            int8x16_t codes[8];
            load_codes(tile, i, kind, book, codes);
            for (int m = 0; m < rows; m++) {
                const lm_block *block = &t->x[(size_t)m * t->groups];
                float *out = t->out + k * STRIDE + m * LM_TILE_ROWS + 4 * i;
                const int32x4_t left = half_group(vdupq_n_s32(start_of(block, kind)), codes, block->q);
                vst1q_f32(out, add_group(sums_at(t, out), half_group(left, codes + 4, block->q + 16), tile, i, block, kind));
            }
        }
}

/* codes[j], j < 8: columns 4j to 4j + 3 of rows 4i to 4i + 3 of a group of the K formats. */
INLINE void super_codes(const uint8_t *from, int i, const int kind, int8x16_t codes[8]) {
    const uint8x16_t high = vdupq_n_u8(kind == LM_Q6_K ? 48 : 16);
    load_codes(from, i, LM_Q4_0, high, codes); /* the low four bits */
    if (kind == LM_Q4_K) return;
    for (int j = 0; j < 8; j++) {
        const uint8x16_t bytes = vld1q_u8(from + 256 + (kind == LM_Q6_K ? j / 4 * 64 : 0) + 16 * i);
        const int shift = kind == LM_Q6_K ? 2 * (j % 4) : j; /* where bit 4 of the code lies */
        const uint8x16_t placed = vshlq_u8(bytes, vdupq_n_s8((int8_t)(4 - shift)));
        codes[j] = vorrq_s8(codes[j], vreinterpretq_s8_u8(vandq_u8(placed, high)));
    }
}

/* A group's product before the float16 scale and the inputs': a whole number below 2^24, as floats hold them. */
INLINE float32x4_t super_value(
    const int8x16_t codes[8], const lm_block *block, const int kind, float32x4_t scale, float32x4_t right_scale) {
    const int zero = kind == LM_Q6_K ? 32 : 0;
    int32x4_t left = half_group(vdupq_n_s32(-zero * block->first), codes, block->q);
    if (kind != LM_Q6_K) return vmulq_f32(vcvtq_f32_s32(half_group(left, codes + 4, block->q + 16)), scale);
    const int32x4_t right = half_group(vdupq_n_s32(-zero * (block->sum - block->first)), codes + 4, block->q + 16);
    return vfmaq_f32(vmulq_f32(vcvtq_f32_s32(right), right_scale), vcvtq_f32_s32(left), scale);
}

INLINE float32x4_t small_floats(const uint8_t *from, const int kind) {
    uint32_t bits;
    memcpy(&bits, from, 4);
    const uint8x8_t bytes = vcreate_u8(bits);
    return kind == LM_Q6_K ? vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(bytes)))))
                           : vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
}

/* As `tile_rows`, rows 4i to 4i + 3 of one tile of the K formats. */
INLINE void quarter_super_rows(const tile_column *t, const uint8_t *tile, const small_integers *small, int i, float *out,
                               const int kind, const int rows) {
    const uint8_t *from = tile + head_bytes(kind), *scales = (kind == LM_Q6_K ? tile + 32 : small->scale) + 4 * i;
    float32x4_t part[ROWS_AT_ONCE];
    for (int m = 0; m < rows; m++) part[m] = vdupq_n_f32(0);
    for (int g = 0; g < 8; g++, from += code_bytes(kind), scales += kind == LM_Q6_K ? 32 : 16) {
        int8x16_t codes[8];
        super_codes(from, i, kind, codes);
        const float32x4_t scale = small_floats(scales, kind);
        const float32x4_t right_scale = kind == LM_Q6_K ? small_floats(scales + 16, kind) : scale;
        for (int m = 0; m < rows; m++) {
            const lm_block *block = &t->x[(size_t)m * t->groups + g];
            part[m] = vfmaq_n_f32(part[m], super_value(codes, block, kind, scale, right_scale), block->scale);
        }
    }
    for (int m = 0; m < rows; m++, out += LM_TILE_ROWS) {
        float32x4_t total = vfmaq_f32(sums_at(t, out), four_halves(tile + 8 * i), part[m]), offset = vdupq_n_f32(0);
        const lm_block *x = &t->x[(size_t)m * t->groups];
        for (int g = 0; g < 8 && kind != LM_Q6_K; g++)
            offset = vfmaq_n_f32(offset, small_floats(small->minimum + 16 * g + 4 * i, kind), x[g].total);
        if (kind != LM_Q6_K) total = vfmsq_f32(total, four_halves(tile + 32 + 8 * i), offset);
        vst1q_f32(out, total);
    }
}

/* As `tile_rows`, for the K formats. */
INLINE void super_rows(const tile_column *t, const int kind, const int rows) {
    const uint8_t *tile = t->tiles;
    for (int k = 0; k < t->count; k++, tile += t->step) {
        const small_integers small = unpack_integers(tile); /* Q6_K has others, and leaves these alone */
        for (int i = 0; i < 4; i++) quarter_super_rows(t, tile, &small, i, t->out + k * STRIDE + 4 * i, kind, rows);
    }
}

#include "tile_product.h"
