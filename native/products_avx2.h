/* The tile products with AVX2: 8 rows by 4 columns in an instruction pair.
 *
 * `vpmaddubsw` adds two products of unsigned weights and signed inputs in 16 bits, which 4-bit codes fill only to an eighth:
 * all eight of a group are added before they are widened. Of the codes of 5 bits four fit into 16 bits, of those of 6 bits two.
 * Codes of 8 bits are multiplied with their sign taken over by the input, and widened at once.
 */
#include <immintrin.h>

#include "tiles.h"

#define ROWS_AT_ONCE 4

INLINE __m256i four(const int8_t *q) {
    int32_t bits;
    memcpy(&bits, q, 4);
    return _mm256_set1_epi32(bits);
}

INLINE __m256 sums_at(const tile_column *t, const float *out) { return t->begins ? _mm256_setzero_ps() : _mm256_loadu_ps(out); }

/* Codes of 8 bits and those of a codebook are signed once they are loaded; of others the zero point is taken off the sums. */
INLINE int is_signed(const int kind) { return FORMATS[kind].zero == 128; }

/* Whether eight products of two codes and inputs each fit into 16 bits when they are added up. */
INLINE int is_narrow(const int kind) { return FORMATS[kind].code_bits == 4 && !is_signed(kind); }

/* codes[j], j < 8: columns 4j to 4j + 3 of 8 of a group's rows (`half` 0 or 1), in 8 bits each. */
INLINE void load_codes(const code_line *lines, int half, const lm_matrix *w, const int kind, __m256i codes[8]) {
    const int bits = FORMATS[kind].code_bits, first = 8 * half;
    const __m256i nibble = _mm256_set1_epi8(15), middle = _mm256_set1_epi8(-128);
    const __m256i high_mask = _mm256_set1_epi8((char)(((1 << (bits - 4)) - 1) << 4));
    const __m256i book = FORMATS[kind].has_codebook
        ? _mm256_xor_si256(middle, _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)w->codebook))) : middle;
    for (int j = 0; j < (bits == 8 ? 8 : 4); j++) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i *)lines[j].code[first]);
        if (half == 0) _mm_prefetch((const char *)&lines[j] + BYTES_AHEAD, _MM_HINT_T0);
        if (bits == 8) {
            codes[j] = _mm256_xor_si256(bytes, middle);
            continue;
        }
        codes[j] = _mm256_and_si256(bytes, nibble);
        codes[j + 4] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
        if (FORMATS[kind].has_codebook) {
            codes[j] = _mm256_shuffle_epi8(book, codes[j]);
            codes[j + 4] = _mm256_shuffle_epi8(book, codes[j + 4]);
        }
    }
    if (bits == 4 || bits == 8) return;
    for (int i = 4; i < bits && half == 0; i++) _mm_prefetch((const char *)&lines[i] + BYTES_AHEAD, _MM_HINT_T0);
    for (int j = 0; j < 8; j++) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i *)lines[high_line(kind, j)].code[first]);
        const int shift = high_shift(kind, j); /* to where bit 4 of the code lies */
        const __m256i placed = shift < 4 ? _mm256_slli_epi16(bytes, 4 - shift) : _mm256_srli_epi16(bytes, shift - 4);
        codes[j] = _mm256_or_si256(codes[j], _mm256_and_si256(placed, high_mask));
    }
}

INLINE __m256 halves_at(const float16 *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }

/* sum + four columns' codes times inputs. */
INLINE __m256i add_four(__m256i sum, __m256i codes, __m256i input, const int kind) {
    const __m256i ones = _mm256_set1_epi16(1);
    if (!is_signed(kind)) return _mm256_add_epi32(sum, _mm256_madd_epi16(ones, _mm256_maddubs_epi16(codes, input)));
    const __m256i products = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(input, codes));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(ones, products));
}

/* The products of half a group's codes and inputs, added up. */
INLINE __m256i half_group(const __m256i *codes, const int8_t *q, const int kind) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sums[4];
    if (is_signed(kind)) {
        __m256i sum = _mm256_setzero_si256();
        for (int j = 0; j < 4; j++) sum = add_four(sum, codes[j], four(q + 4 * j), kind);
        return sum;
    }
    for (int j = 0; j < 4; j++) sums[j] = _mm256_maddubs_epi16(codes[j], four(q + 4 * j));
    const __m256i left = _mm256_add_epi16(sums[0], sums[1]), right = _mm256_add_epi16(sums[2], sums[3]);
    if (FORMATS[kind].code_bits <= 5) return _mm256_madd_epi16(ones, _mm256_add_epi16(left, right));
    return _mm256_add_epi32(_mm256_madd_epi16(ones, left), _mm256_madd_epi16(ones, right));
}

/* The products of a group's codes and inputs, added up. */
INLINE __m256i whole_group(const __m256i codes[8], const int8_t *q, const int kind) {
    if (!is_narrow(kind)) return _mm256_add_epi32(half_group(codes, q, kind), half_group(codes + 4, q + 16, kind));
    __m256i sum = _mm256_setzero_si256();
    for (int j = 0; j < 8; j++) sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes[j], four(q + 4 * j)));
    return _mm256_madd_epi16(_mm256_set1_epi16(1), sum);
}

/* sum + what the upper bits of the outlier's codes add to it. */
INLINE __m256i add_outlier(__m256i sum, const __m256i codes[8], const lm_block *block, const int kind) {
    const __m256i high = add_four(_mm256_setzero_si256(), codes[block->outlier], four(block->high), kind);
    return _mm256_add_epi32(sum, _mm256_slli_epi32(high, 8));
}

/* 8 of a tile's 16 rows (`half` 0 or 1) times `rows` rows of inputs. */
INLINE void half_tile_rows(const tile_column *t, const uint8_t *tile, int half, float *out, const int kind, const int rows) {
    const int has_minimum = FORMATS[kind].has_minimum;
    const int zero = is_signed(kind) ? 0 : FORMATS[kind].zero; /* what is left to be taken off */
    __m256i codes[8];
    load_codes(codes_of(kind, tile, 0), half, t->w, kind, codes);
    const float16 *scales = scales_of(kind, tile) + 8 * half;
    if (half == 0) _mm_prefetch((const char *)scales + BYTES_AHEAD, _MM_HINT_T0);
    const __m256 scale = halves_at(scales), minimum = has_minimum ? halves_at(minima_of(kind, tile) + 8 * half) : _mm256_setzero_ps();
    for (int m = 0; m < rows; m++, out += LM_TILE_ROWS) {
        const lm_block *block = &t->x[(size_t)m * t->groups];
        __m256i sum = add_outlier(whole_group(codes, block->q, kind), codes, block, kind);
        if (zero) sum = _mm256_add_epi32(sum, _mm256_set1_epi32(zero * block->negated_sum));
        const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(block->scale));
        __m256 total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), both, sums_at(t, out + 8 * half));
        if (has_minimum) total = _mm256_fmadd_ps(minimum, _mm256_set1_ps(block->total), total);
        _mm256_storeu_ps(out + 8 * half, total);
    }
}

INLINE void tile_rows(const tile_column *t, const int kind, const int rows) {
    const uint8_t *tile = t->tiles;
    for (int i = 0; i < t->count; i++, tile += t->step)
        for (int half = 0; half < 2; half++) half_tile_rows(t, tile, half, t->out + i * PANEL_STRIDE, kind, rows);
}

/* Two scales for a group: one for each half of its columns, as Q6_K has them. */
INLINE int has_two_scales(const int kind) { return FORMATS[kind].small_scales == 2; }

/* A group's product before the float16 scale and the inputs'. */
INLINE __m256 super_value(
    const __m256i codes[8], const lm_block *block, const int kind, __m256 scale, __m256 right_scale) {
    if (!has_two_scales(kind)) {
        const __m256i sum = add_outlier(whole_group(codes, block->q, kind), codes, block, kind);
        return _mm256_mul_ps(_mm256_cvtepi32_ps(sum), scale);
    }
    __m256i left = half_group(codes, block->q, kind), right = half_group(codes + 4, block->q + 16, kind);
    const int zero = FORMATS[kind].zero;
    if (block->outlier < 4)
        left = add_outlier(left, codes, block, kind);
    else
        right = add_outlier(right, codes, block, kind);
    left = _mm256_add_epi32(left, _mm256_set1_epi32(zero * block->negated_halves[0]));
    right = _mm256_add_epi32(right, _mm256_set1_epi32(zero * block->negated_halves[1]));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(left), scale, _mm256_mul_ps(_mm256_cvtepi32_ps(right), right_scale));
}

INLINE __m256 bytes_at(const uint8_t *from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)));
}

INLINE __m256 signed_bytes_at(const int8_t *from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
}

/* Group `g` of 8 of a tile's 16 rows, for the K types: added to `parts`, of `rows` rows of inputs. */
INLINE void half_super_group(const tile_column *t, const uint8_t *tile, const small_integers *small, int g, int half, __m256 *parts,
                             const int kind, const int rows) {
    const tile_q6_k *own = (const tile_q6_k *)tile; /* of two scales a group */
    const int first = 8 * half;
    const __m256 scale = has_two_scales(kind) ? signed_bytes_at(&own->s[2 * g][first]) : signed_bytes_at(&small->s[g][first]);
    const __m256 right_scale = has_two_scales(kind) ? signed_bytes_at(&own->s[2 * g + 1][first]) : scale;
    __m256i codes[8];
    load_codes(codes_of(kind, tile, g), half, t->w, kind, codes);
    for (int m = 0; m < rows; m++) {
        const lm_block *block = &t->x[(size_t)m * t->groups + g];
        const __m256 value = super_value(codes, block, kind, scale, right_scale);
        parts[m] = _mm256_fmadd_ps(value, _mm256_set1_ps(block->scale), parts[m]);
    }
}

/* The total of 8 of a tile's 16 rows and that of 256 more columns, of which `part` is all but the scale and the minima. */
INLINE __m256 add_super(
    __m256 total, __m256 part, const uint8_t *tile, const small_integers *small, int half, const lm_block *x, const int kind) {
    total = _mm256_fmadd_ps(halves_at(scales_of(kind, tile) + 8 * half), part, total);
    if (!FORMATS[kind].has_minimum) return total;
    __m256 offset = _mm256_setzero_ps();
    for (int g = 0; g < 8; g++)
        offset = _mm256_fmadd_ps(bytes_at(&small->t[g][8 * half]), _mm256_set1_ps(x[g].total), offset);
    return _mm256_fnmadd_ps(halves_at(minima_of(kind, tile) + 8 * half), offset, total);
}

/* As `tile_rows`, for the K types; the panels take turns group by group here too. */
INLINE void super_rows(const tile_column *t, const int kind, const int rows) {
    small_integers small[PANELS_AT_ONCE]; /* with two scales a group, these are left alone */
    __m256 parts[PANELS_AT_ONCE][2][ROWS_AT_ONCE];
    for (int i = 0; i < t->count; i++) {
        const uint8_t *tile = t->tiles + i * t->step;
        for (size_t at = 0; at < FORMATS[kind].codes_at; at += 64) _mm_prefetch((const char *)tile + at + BYTES_AHEAD, _MM_HINT_T0);
        if (!has_two_scales(kind)) small[i] = unpack_integers(tile, kind);
        for (int half = 0; half < 2; half++)
            for (int m = 0; m < rows; m++) parts[i][half][m] = _mm256_setzero_ps();
    }
    for (int g = 0; g < 8; g++)
        for (int i = 0; i < t->count; i++)
            for (int half = 0; half < 2; half++)
                half_super_group(t, t->tiles + i * t->step, &small[i], g, half, parts[i][half], kind, rows);
    for (int i = 0; i < t->count; i++)
        for (int m = 0; m < rows; m++)
            for (int half = 0; half < 2; half++) {
                float *out = t->out + i * PANEL_STRIDE + m * LM_TILE_ROWS + 8 * half;
                const lm_block *x = &t->x[(size_t)m * t->groups];
                const __m256 part = parts[i][half][m];
                _mm256_storeu_ps(out, add_super(sums_at(t, out), part, t->tiles + i * t->step, &small[i], half, x, kind));
            }
}

#include "tile_product.h"
