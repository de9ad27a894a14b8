/* The tile products with WebAssembly's SIMD128: pairs of 16 bits, of which `i32x4.dot_i16x8_s` multiplies eight and adds two by two.
 *
 * A line has four columns of a row in four bytes, two words of 16 bits. A word's low byte is a column, its high byte the next one: a mask
 * and a shift make 16-bit codes of them, already in the order in which rows lie in the lanes of a sum. Inputs are put into that order
 * once for all panels, outliers with all of their 16 bits, so that nothing is left to add for these. Codes stay without their sign; the
 * zero point is taken off the sums.
 *
 * Whole numbers have no rounding, and what follows them is in the order of products_portable.h: the same bits. Relaxed SIMD would have
 * dot products of bytes and fused additions, whose results differ from processor to processor (docs/decisions/0063).
 */
#include <wasm_simd128.h>

#include "numbers.h"

#define ROWS_AT_ONCE 4

/* Two scales for a group: one for each half of its columns, as Q6_K has them. */
INLINE int has_two_scales(const int kind) { return FORMATS[kind].small_scales == 2; }

/* A row's inputs of a group. `pairs[j]` are columns 4j and 4j + 2, then 4j + 1 and 4j + 3, four times each. `zeros` is what zero points
 * add to each half of a group, or the first one to all of it. */
typedef struct {
    v128_t pairs[8][2];
    int32_t zeros[2];
    float scale, total;
} wide_block;

INLINE v128_t repeated_pair(int first, int second) {
    return wasm_i32x4_splat((int32_t)((uint32_t)(first & 0xffff) | (uint32_t)second << 16));
}

INLINE void widen(const lm_block *block, wide_block *to, const int kind) {
    const int zero = FORMATS[kind].zero, has_two = has_two_scales(kind);
    int16_t q[LM_GROUP];
    for (int c = 0; c < LM_GROUP; c++) q[c] = block->q[c];
    for (int c = 0; c < 4; c++) q[4 * block->outlier + c] = (int16_t)(q[4 * block->outlier + c] + 256 * block->high[c]);
    for (int j = 0; j < 8; j++) {
        to->pairs[j][0] = repeated_pair(q[4 * j], q[4 * j + 2]);
        to->pairs[j][1] = repeated_pair(q[4 * j + 1], q[4 * j + 3]);
    }
    to->zeros[0] = zero * (has_two ? block->negated_halves[0] : block->negated_sum);
    to->zeros[1] = zero * block->negated_halves[1];
    to->scale = block->scale;
    to->total = block->total;
}

/* --- codes -------------------------------------------------------------------------------------------------------- */

/* Bytes as pairs of 16 bits: those at even places, and those at odd ones. */
INLINE void split_bytes(v128_t bytes, v128_t pairs[2]) {
    pairs[0] = wasm_v128_and(bytes, wasm_i16x8_splat(0x00ff));
    pairs[1] = wasm_u16x8_shr(bytes, 8);
}

/* The high bits of four columns, at bit 4 of each byte. */
INLINE v128_t high_bits(const code_line *lines, int quarter, const int kind, const int j) {
    const int bits = FORMATS[kind].code_bits - 4, shift = high_shift(kind, j);
    const v128_t bytes = wasm_v128_load(lines[high_line(kind, j)].code[4 * quarter]);
    const v128_t placed = shift < 4 ? wasm_i16x8_shl(bytes, 4 - shift) : wasm_u16x8_shr(bytes, shift - 4);
    return wasm_v128_and(placed, wasm_i8x16_splat((int8_t)(((1 << bits) - 1) << 4)));
}

/* Columns 4j to 4j + 3 of rows 4 * quarter to 4 * quarter + 3 in codes[0], and columns 16 + 4j to 16 + 4j + 3 in codes[1]. */
INLINE void load_codes(const code_line *lines, int quarter, v128_t book, const int kind, const int j, v128_t codes[2][2]) {
    const v128_t nibbles = wasm_i16x8_splat(0x000f), bytes = wasm_v128_load(lines[j].code[4 * quarter]);
    if (FORMATS[kind].code_bits == 8) {
        split_bytes(bytes, codes[0]);
        split_bytes(wasm_v128_load(lines[j + 4].code[4 * quarter]), codes[1]);
        return;
    }
    if (FORMATS[kind].code_bits == 4 && !FORMATS[kind].has_codebook) {
        codes[0][0] = wasm_v128_and(bytes, nibbles);
        codes[0][1] = wasm_v128_and(wasm_u16x8_shr(bytes, 8), nibbles);
        codes[1][0] = wasm_v128_and(wasm_u16x8_shr(bytes, 4), nibbles);
        codes[1][1] = wasm_u16x8_shr(bytes, 12);
        return;
    }
    v128_t low = wasm_v128_and(bytes, wasm_i8x16_splat(15)), high = wasm_u8x16_shr(bytes, 4);
    if (FORMATS[kind].has_codebook) {
        low = wasm_i8x16_swizzle(book, low);
        high = wasm_i8x16_swizzle(book, high);
    } else {
        low = wasm_v128_or(low, high_bits(lines, quarter, kind, j));
        high = wasm_v128_or(high, high_bits(lines, quarter, kind, j + 4));
    }
    split_bytes(low, codes[0]);
    split_bytes(high, codes[1]);
}

INLINE v128_t codebook_of(const lm_matrix *w, const int kind) {
    return FORMATS[kind].has_codebook ? wasm_v128_load(w->codebook) : wasm_i32x4_splat(0);
}

/* --- sums of a group ---------------------------------------------------------------------------------------------- */

/* Of a panel's four quarters, so many at a time share inputs that are loaded, and so many rows of these share codes. */
INLINE int quarters_at_once(const int rows) { return ROWS_AT_ONCE / rows; }

/* Four rows' sums for each quarter and row of inputs: of all columns, or of each half of them. */
typedef struct {
    v128_t of[ROWS_AT_ONCE][2];
} group_sums;

INLINE v128_t add_pairs_of(v128_t sum, const v128_t codes[2], const v128_t inputs[2]) {
    sum = wasm_i32x4_add(sum, wasm_i32x4_dot_i16x8(codes[0], inputs[0]));
    return wasm_i32x4_add(sum, wasm_i32x4_dot_i16x8(codes[1], inputs[1]));
}

/* Quarters from `first` on, times `rows` rows of inputs `stride` apart: sum q * rows + m is of the first's qth one and row m. */
INLINE group_sums multiply_group(const code_line *lines, int first, v128_t book, const wide_block *in, const int kind, const int rows) {
    const int right = has_two_scales(kind); /* where sums of the right half go */
    group_sums sums;
    for (int m = 0; m < rows; m++)
        for (int q = 0; q < quarters_at_once(rows); q++) {
            sums.of[q * rows + m][0] = wasm_i32x4_splat(in[m].zeros[0]);
            sums.of[q * rows + m][1] = wasm_i32x4_splat(in[m].zeros[1]);
        }
#pragma clang loop unroll(full)
    for (int j = 0; j < 4; j++)
#pragma clang loop unroll(full)
        for (int q = 0; q < quarters_at_once(rows); q++) {
            v128_t codes[2][2];
            load_codes(lines, first + q, book, kind, j, codes);
#pragma clang loop unroll(full)
            for (int m = 0; m < rows; m++) {
                v128_t *sum = sums.of[q * rows + m];
                sum[0] = add_pairs_of(sum[0], codes[0], in[m].pairs[j]);
                sum[right] = add_pairs_of(sum[right], codes[1], in[m].pairs[j + 4]);
            }
        }
    return sums;
}

/* --- tiles -------------------------------------------------------------------------------------------------------- */

INLINE lanes sums_at(const tile_column *t, const float *out) { return t->begins ? (lanes){0} : load_floats(out); }

INLINE void put_lanes(float *to, lanes values) { memcpy(to, &values, sizeof values); }

INLINE lanes as_floats(v128_t numbers) { return (lanes)wasm_f32x4_convert_i32x4(numbers); }

INLINE void tile_rows(const tile_column *t, const int kind, const int rows) {
    const int has_minimum = FORMATS[kind].has_minimum, quarters = quarters_at_once(rows);
    const v128_t book = codebook_of(t->w, kind);
    const uint8_t *tile = t->tiles;
    wide_block in[ROWS_AT_ONCE];
    for (int m = 0; m < rows; m++) widen(&t->x[(size_t)m * t->groups], &in[m], kind);
    for (int k = 0; k < t->count; k++, tile += t->step)
        for (int first = 0; first < 4; first += quarters) {
            const group_sums sums = multiply_group(codes_of(kind, tile, 0), first, book, in, kind, rows);
            for (int q = 0; q < quarters; q++) {
                const lanes scale = load_halves(scales_of(kind, tile) + 4 * (first + q));
                const lanes minimum = has_minimum ? load_halves(minima_of(kind, tile) + 4 * (first + q)) : (lanes){0};
                for (int m = 0; m < rows; m++) {
                    float *out = t->out + k * PANEL_STRIDE + m * LM_TILE_ROWS + 4 * (first + q);
                    lanes product = as_floats(sums.of[q * rows + m][0]) * (scale * in[m].scale);
                    if (has_minimum) product += minimum * in[m].total;
                    put_lanes(out, sums_at(t, out) + product);
                }
            }
        }
}

INLINE v128_t signed_bytes_at(const int8_t *from) {
    return wasm_i32x4_extend_low_i16x8(wasm_i16x8_extend_low_i8x16(wasm_v128_load32_zero(from)));
}

INLINE lanes bytes_at(const uint8_t *from) {
    return as_floats(wasm_u32x4_extend_low_u16x8(wasm_u16x8_extend_low_u8x16(wasm_v128_load32_zero(from))));
}

/* A group's sums times its small integers. */
INLINE lanes scaled_sum(const v128_t sums[2], v128_t scale, v128_t right_scale, const int kind) {
    const v128_t left = wasm_i32x4_mul(sums[0], scale);
    return as_floats(has_two_scales(kind) ? wasm_i32x4_add(left, wasm_i32x4_mul(sums[1], right_scale)) : left);
}

/* Some quarters of one tile of the K types times `rows` rows of inputs: parts[q * rows + m] are sums before the float16 scale. */
INLINE void multiply_super(const uint8_t *tile, const small_integers *small, int first, v128_t book, const wide_block in[][ROWS_AT_ONCE],
                           lanes parts[ROWS_AT_ONCE], const int kind, const int rows) {
    const tile_q6_k *own = (const tile_q6_k *)tile; /* of two scales a group */
    for (int i = 0; i < ROWS_AT_ONCE; i++) parts[i] = (lanes){0};
    for (int g = 0; g < GROUPS_OF_SUPER; g++) {
        const group_sums sums = multiply_group(codes_of(kind, tile, g), first, book, in[g], kind, rows);
        for (int q = 0; q < quarters_at_once(rows); q++) {
            const int row = 4 * (first + q);
            const v128_t scale = signed_bytes_at(has_two_scales(kind) ? &own->s[2 * g][row] : &small->s[g][row]);
            const v128_t right_scale = has_two_scales(kind) ? signed_bytes_at(&own->s[2 * g + 1][row]) : scale;
            for (int m = 0; m < rows; m++)
                parts[q * rows + m] += scaled_sum(sums.of[q * rows + m], scale, right_scale, kind) * in[g][m].scale;
        }
    }
}

/* As `tile_rows`, for the K types. */
INLINE void super_rows(const tile_column *t, const int kind, const int rows) {
    const int has_minimum = FORMATS[kind].has_minimum, quarters = quarters_at_once(rows);
    const v128_t book = codebook_of(t->w, kind);
    const uint8_t *tile = t->tiles;
    wide_block in[GROUPS_OF_SUPER][ROWS_AT_ONCE];
    for (int g = 0; g < GROUPS_OF_SUPER; g++)
        for (int m = 0; m < rows; m++) widen(&t->x[(size_t)m * t->groups + g], &in[g][m], kind);
    for (int k = 0; k < t->count; k++, tile += t->step) {
        small_integers small; /* with two scales a group, these are left alone */
        if (!has_two_scales(kind)) small = unpack_integers(tile, kind);
        for (int first = 0; first < 4; first += quarters) {
            lanes parts[ROWS_AT_ONCE];
            multiply_super(tile, &small, first, book, in, parts, kind, rows);
            for (int q = 0; q < quarters; q++)
                for (int m = 0; m < rows; m++) {
                    const int row = 4 * (first + q);
                    float *out = t->out + k * PANEL_STRIDE + m * LM_TILE_ROWS + row;
                    lanes product = parts[q * rows + m] * load_halves(scales_of(kind, tile) + row), offset = {0};
                    for (int g = 0; g < GROUPS_OF_SUPER && has_minimum; g++) offset += bytes_at(&small.t[g][row]) * in[g][m].total;
                    if (has_minimum) product -= load_halves(minima_of(kind, tile) + row) * offset;
                    put_lanes(out, sums_at(t, out) + product);
                }
        }
    }
}

#include "tile_product.h"
