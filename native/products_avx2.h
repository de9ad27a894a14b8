/* The tile products with AVX2: 8 rows by 4 columns in an instruction pair.
 *
 * `vpmaddubsw` adds two products of unsigned weights and signed inputs in 16 bits, which 4-bit codes fill only to an eighth:
 * all eight of a group are added before they are widened. Of the codes of 5 bits four fit into 16 bits, of those of 6 bits two.
 * Codes of 8 bits are multiplied with their sign taken over by the input, and widened at once; those of a codebook are never -128, and
 * take over the input's.
 *
 * A group meets up to eight panels of 16 rows. What all of them need of its inputs is laid out as registers hold it once, so that products
 * take it from memory without an instruction of its own: one row is multiplied a tenth faster, sixteen by a third.
 *
 * The AVX-VNNI set is compiled from this file too (products_avx_vnni.h): it has `add_four_products`, so that neither 16 bits nor signs
 * limit it. Its results are the same to the bit. What a group adds up to is a whole number in both: nothing saturates here, since the sums of
 * 16 bits reach at most 2 * 128 * 127 (codes of 8 bits), 2 * 127 * 127 (codebooks), 4 * 63 * 127, 8 * 31 * 127 and 16 * 15 * 127, all of
 * them below 32,768; and with `vpdpbusd`, which adds in 32 bits, no sum reaches 2^27. All that follows is one source.
 */
#include <immintrin.h>

#include "tiles.h"

#define ROWS_AT_ONCE 16
#define FEW_ROWS 4 /* whose products are unrolled */
#define PARTS_STRIDE (2 * PANELS_AT_ONCE)
#ifndef HAS_FOUR_PRODUCTS
#define HAS_FOUR_PRODUCTS 0 /* whether `add_four_products` is there: of unsigned bytes with signed ones, added in 32 bits */
#endif

INLINE __m256i four(const int8_t *q) {
    int32_t bits;
    memcpy(&bits, q, 4);
    return _mm256_set1_epi32(bits);
}

INLINE __m256 sums_at(const tile_column *t, const float *out) { return t->begins ? _mm256_setzero_ps() : _mm256_loadu_ps(out); }

/* Codes of 8 bits and those of a codebook are signed once they are loaded; of others, and of all if 32 bits are added at once, the zero
 * point is taken off the sums. */
INLINE int is_signed(const int kind) { return !HAS_FOUR_PRODUCTS && FORMATS[kind].zero == 128; }

/* Whether a zero point is taken off the sums. */
INLINE int has_zero_point(const int kind) { return FORMATS[kind].zero != 0 && !is_signed(kind); }

/* Two scales for a group: one for each half of its columns, as Q6_K has them. */
INLINE int has_two_scales(const int kind) { return FORMATS[kind].small_scales == 2; }

/* Whether eight products of two codes and inputs each fit into 16 bits when they are added up. */
INLINE int is_narrow(const int kind) { return FORMATS[kind].code_bits == 4 && !is_signed(kind); }

/* The 16 entries of a codebook, twice; nothing where there is none. */
INLINE __m256i codebook_of(const lm_matrix *w, const int kind) {
    if (!FORMATS[kind].has_codebook) return _mm256_setzero_si256();
    const __m128i entries = _mm_loadu_si128((const __m128i *)w->codebook);
    const __m256i both = _mm256_broadcastsi128_si256(entries);
    return is_signed(kind) ? _mm256_xor_si256(_mm256_set1_epi8(-128), both) : both;
}

/* codes[j], j < 8: columns 4j to 4j + 3 of 8 of a group's rows (`half` 0 or 1), in 8 bits each. */
INLINE void load_codes(const code_line *lines, int half, __m256i book, const int kind, __m256i codes[8]) {
    const int bits = FORMATS[kind].code_bits, first = 8 * half;
    const __m256i nibble = _mm256_set1_epi8(15), middle = _mm256_set1_epi8(-128);
    const __m256i high_mask = _mm256_set1_epi8((char)(((1 << (bits - 4)) - 1) << 4));
    for (int j = 0; j < (bits == 8 ? 8 : 4); j++) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i *)lines[j].code[first]);
        if (half == 0) _mm_prefetch((const char *)&lines[j] + BYTES_AHEAD, _MM_HINT_T0);
        if (bits == 8) {
            codes[j] = is_signed(kind) ? _mm256_xor_si256(bytes, middle) : bytes;
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

/* Four inputs for 8 rows of weights, and their sizes where weights take over their signs. */
typedef struct {
    __m256i q, size;
} wide_four;

/* A row's inputs of a group, as registers hold them. `zeros` is what zero points add: to a group, or to each half of it, if it has two scales. */
typedef struct {
    wide_four fours[8], high;
    __m256i zeros[2];
    __m256 scale, total;
    uint32_t outlier;
} wide_block;

INLINE wide_four widen_four(const int8_t *q, const int kind) {
    const __m256i wide = four(q);
    return (wide_four){wide, FORMATS[kind].has_codebook && is_signed(kind) ? _mm256_abs_epi8(wide) : wide};
}

INLINE void widen(const lm_block *block, wide_block *to, const int kind) {
    for (int j = 0; j < 8; j++) to->fours[j] = widen_four(block->q + 4 * j, kind);
    to->high = widen_four(block->high, kind);
    to->outlier = block->outlier;
    const int zero = is_signed(kind) ? 0 : FORMATS[kind].zero, has_two = has_two_scales(kind);
    to->zeros[0] = _mm256_set1_epi32(zero * (has_two ? block->negated_halves[0] : block->negated_sum));
    to->zeros[1] = _mm256_set1_epi32(zero * block->negated_halves[1]);
    to->scale = _mm256_set1_ps(block->scale);
    to->total = _mm256_set1_ps(block->total);
}

#if HAS_FOUR_PRODUCTS
/* start + the products of half a group's codes and inputs. */
INLINE __m256i half_group(__m256i start, const __m256i *codes, const wide_four *in, const int kind) {
    (void)kind;
    for (int j = 0; j < 4; j++) start = add_four_products(start, codes[j], in[j].q);
    return start;
}

/* What the upper bits of the outlier's codes add to a sum. */
INLINE __m256i outlier_sum(const __m256i codes[8], const wide_block *in, const int kind) {
    (void)kind;
    return _mm256_slli_epi32(add_four_products(_mm256_setzero_si256(), codes[in->outlier], in->high.q), 8);
}

/* The products of a group's codes and inputs, added up, in two chains: each product waits for the one before it. */
INLINE __m256i whole_group(const __m256i codes[8], const wide_block *in, const int kind) {
    const __m256i start = has_zero_point(kind) ? in->zeros[0] : _mm256_setzero_si256();
    const __m256i left = half_group(start, codes, in->fours, kind);
    return _mm256_add_epi32(left, half_group(outlier_sum(codes, in, kind), codes + 4, in->fours + 4, kind));
}

/* The same of each half, which has a zero point of its own. */
INLINE void two_halves(const __m256i codes[8], const wide_block *in, __m256i *left, __m256i *right, const int kind) {
    *left = half_group(in->zeros[0], codes, in->fours, kind), *right = half_group(in->zeros[1], codes + 4, in->fours + 4, kind);
    if (in->outlier < 4)
        *left = _mm256_add_epi32(*left, outlier_sum(codes, in, kind));
    else
        *right = _mm256_add_epi32(*right, outlier_sum(codes, in, kind));
}
#else
/* Four columns' codes times inputs, in 16 bits, two columns each. */
INLINE __m256i pair_products(__m256i codes, wide_four in, const int kind) {
    if (FORMATS[kind].has_codebook) return _mm256_maddubs_epi16(in.size, _mm256_sign_epi8(codes, in.q));
    if (is_signed(kind)) return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(in.q, codes));
    return _mm256_maddubs_epi16(codes, in.q);
}

/* Pairs of 16 bits, added up and multiplied with `factor`. */
INLINE __m256i widen_pairs(__m256i pairs, const int factor) { return _mm256_madd_epi16(_mm256_set1_epi16(factor), pairs); }

/* The products of half a group's codes and inputs, added up. */
INLINE __m256i half_group(const __m256i *codes, const wide_four *in, const int kind) {
    __m256i sums[4];
    for (int j = 0; j < 4; j++) sums[j] = pair_products(codes[j], in[j], kind);
    if (is_signed(kind)) {
        __m256i sum = _mm256_setzero_si256();
        for (int j = 0; j < 4; j++) sum = _mm256_add_epi32(sum, widen_pairs(sums[j], 1));
        return sum;
    }
    const __m256i left = _mm256_add_epi16(sums[0], sums[1]), right = _mm256_add_epi16(sums[2], sums[3]);
    if (FORMATS[kind].code_bits <= 5) return widen_pairs(_mm256_add_epi16(left, right), 1);
    return _mm256_add_epi32(widen_pairs(left, 1), widen_pairs(right, 1));
}

/* sum + what the upper bits of the outlier's codes add to it. */
INLINE __m256i add_outlier(__m256i sum, const __m256i codes[8], const wide_block *in, const int kind) {
    return _mm256_add_epi32(sum, widen_pairs(pair_products(codes[in->outlier], in->high, kind), 256));
}

/* The products of a group's codes and inputs, added up, without the outlier's upper bits. */
INLINE __m256i lower_group(const __m256i codes[8], const wide_block *in, const int kind) {
    if (!is_narrow(kind)) return _mm256_add_epi32(half_group(codes, in->fours, kind), half_group(codes + 4, in->fours + 4, kind));
    __m256i sum = _mm256_setzero_si256();
    for (int j = 0; j < 8; j++) sum = _mm256_add_epi16(sum, pair_products(codes[j], in->fours[j], kind));
    return widen_pairs(sum, 1);
}

/* The products of a group's codes and inputs, added up. */
INLINE __m256i whole_group(const __m256i codes[8], const wide_block *in, const int kind) {
    const __m256i sum = add_outlier(lower_group(codes, in, kind), codes, in, kind);
    return has_zero_point(kind) ? _mm256_add_epi32(sum, in->zeros[0]) : sum;
}

/* The same of each half, which has a zero point of its own. */
INLINE void two_halves(const __m256i codes[8], const wide_block *in, __m256i *left, __m256i *right, const int kind) {
    *left = half_group(codes, in->fours, kind), *right = half_group(codes + 4, in->fours + 4, kind);
    if (in->outlier < 4)
        *left = add_outlier(*left, codes, in, kind);
    else
        *right = add_outlier(*right, codes, in, kind);
    *left = _mm256_add_epi32(*left, in->zeros[0]);
    *right = _mm256_add_epi32(*right, in->zeros[1]);
}
#endif

/* What codes of a group of a tile, half of its rows, add to out (8), a row's results. */
INLINE void add_group(const tile_column *t, const __m256i codes[8], const wide_block *in, __m256 scale, __m256 minimum, float *out,
                      const int kind) {
    const int has_minimum = FORMATS[kind].has_minimum;
    const __m256i sum = whole_group(codes, in, kind); /* first: as an argument, gcc computes it last, and prompts of Q4_0 take a tenth longer */
    __m256 total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(scale, in->scale), sums_at(t, out));
    if (has_minimum) total = _mm256_fmadd_ps(minimum, in->total, total);
    _mm256_storeu_ps(out, total);
}

/* 8 of a tile's 16 rows (`half` 0 or 1) times `rows` rows of inputs. */
INLINE void half_tile_rows(const tile_column *t, const uint8_t *tile, int half, __m256i book, const wide_block *in, float *out,
                           const int kind, const int rows) {
    const int has_minimum = FORMATS[kind].has_minimum;
    __m256i codes[8];
    load_codes(codes_of(kind, tile, 0), half, book, kind, codes);
    const float16 *scales = scales_of(kind, tile) + 8 * half;
    if (half == 0) _mm_prefetch((const char *)scales + BYTES_AHEAD, _MM_HINT_T0);
    const __m256 scale = halves_at(scales), minimum = has_minimum ? halves_at(minima_of(kind, tile) + 8 * half) : _mm256_setzero_ps();
    out += 8 * half;
    if (rows > FEW_ROWS) {
        _Pragma("GCC unroll 1")
        for (int m = 0; m < rows; m++) add_group(t, codes, &in[m], scale, minimum, out + m * LM_TILE_ROWS, kind);
        return;
    }
    for (int m = 0; m < rows; m++, out += LM_TILE_ROWS) {
        const wide_block *x = &in[m];
        wide_block here; /* codes of 8 bits and their sizes fill all registers: rows that share them are widened where they are used */
        if (FORMATS[kind].code_bits == 8 && is_signed(kind) && rows > 2) {
            widen(&t->x[(size_t)m * t->groups], &here, kind);
            x = &here;
        }
        add_group(t, codes, x, scale, minimum, out, kind);
    }
}

INLINE void tile_rows(const tile_column *t, const int kind, const int rows) {
    const __m256i book = codebook_of(t->w, kind);
    const uint8_t *tile = t->tiles;
    wide_block in[ROWS_AT_ONCE];
    for (int m = 0; m < rows; m++) widen(&t->x[(size_t)m * t->groups], &in[m], kind);
    for (int i = 0; i < t->count; i++, tile += t->step)
        for (int half = 0; half < 2; half++) half_tile_rows(t, tile, half, book, in, t->out + i * PANEL_STRIDE, kind, rows);
}

/* A group's product before the float16 scale and the inputs'. */
INLINE __m256 super_value(const __m256i codes[8], const wide_block *in, const int kind, __m256 scale, __m256 right_scale) {
    if (!has_two_scales(kind)) return _mm256_mul_ps(_mm256_cvtepi32_ps(whole_group(codes, in, kind)), scale);
    __m256i left, right;
    two_halves(codes, in, &left, &right, kind);
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(left), scale, _mm256_mul_ps(_mm256_cvtepi32_ps(right), right_scale));
}

INLINE __m256 bytes_at(const uint8_t *from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)));
}

INLINE __m256 signed_bytes_at(const int8_t *from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
}

/* Group `g` of 8 of a tile's 16 rows, for the K types: added to `parts`, of `rows` rows of inputs, PARTS_STRIDE apart. */
INLINE void half_super_group(const uint8_t *tile, const small_integers *small, int g, int half, __m256i book, const wide_block *in,
                             __m256 *parts, const int kind, const int rows) {
    const tile_q6_k *own = (const tile_q6_k *)tile; /* of two scales a group */
    const int first = 8 * half;
    const __m256 scale = has_two_scales(kind) ? signed_bytes_at(&own->s[2 * g][first]) : signed_bytes_at(&small->s[g][first]);
    const __m256 right_scale = has_two_scales(kind) ? signed_bytes_at(&own->s[2 * g + 1][first]) : scale;
    __m256i codes[8];
    load_codes(codes_of(kind, tile, g), half, book, kind, codes);
    if (rows > FEW_ROWS) {
        _Pragma("GCC unroll 1")
        for (int m = 0; m < rows; m++, parts += PARTS_STRIDE)
            *parts = _mm256_fmadd_ps(super_value(codes, &in[m], kind, scale, right_scale), in[m].scale, *parts);
        return;
    }
    for (int m = 0; m < rows; m++, parts += PARTS_STRIDE)
        *parts = _mm256_fmadd_ps(super_value(codes, &in[m], kind, scale, right_scale), in[m].scale, *parts);
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
    __m256 parts[ROWS_AT_ONCE][PANELS_AT_ONCE][2];
    for (int i = 0; i < t->count; i++) {
        const uint8_t *tile = t->tiles + i * t->step;
        for (size_t at = 0; at < FORMATS[kind].codes_at; at += 64) _mm_prefetch((const char *)tile + at + BYTES_AHEAD, _MM_HINT_T0);
        if (!has_two_scales(kind)) small[i] = unpack_integers(tile, kind);
        for (int half = 0; half < 2; half++)
            for (int m = 0; m < rows; m++) parts[m][i][half] = _mm256_setzero_ps();
    }
    const __m256i book = codebook_of(t->w, kind);
    for (int g = 0; g < 8; g++) {
        wide_block in[ROWS_AT_ONCE];
        for (int m = 0; m < rows; m++) widen(&t->x[(size_t)m * t->groups + g], &in[m], kind);
        for (int i = 0; i < t->count; i++)
            for (int half = 0; half < 2; half++)
                half_super_group(t->tiles + i * t->step, &small[i], g, half, book, in, &parts[0][i][half], kind, rows);
    }
    for (int i = 0; i < t->count; i++)
        for (int m = 0; m < rows; m++)
            for (int half = 0; half < 2; half++) {
                float *out = t->out + i * PANEL_STRIDE + m * LM_TILE_ROWS + 8 * half;
                const lm_block *x = &t->x[(size_t)m * t->groups];
                const __m256 part = parts[m][i][half];
                _mm256_storeu_ps(out, add_super(sums_at(t, out), part, t->tiles + i * t->step, &small[i], half, x, kind));
            }
}

#include "tile_product.h"
