/* The tile products with AVX-512 VNNI: `vpdpbusd` multiplies 16 rows by 4 columns and adds them up, in one instruction.
 *
 * It wants unsigned weights and signed inputs. So the codes are used as they are stored, and the zero point is folded into
 * where the sum starts: sum(x * (q - zero)) = sum(x * q) - zero * sum(x).
 */
#include <immintrin.h>

#include "tiles.h"

#define NAME "avx512_vnni"
#define ROWS_AT_ONCE 8

INLINE __m512i four(const int8_t *q) {
    int32_t bits;
    memcpy(&bits, q, 4);
    return _mm512_set1_epi32(bits);
}

INLINE __m512i codebook_of(const lm_matrix *w, const int kind) {
    return kind == LM_Q4_CODEBOOK
        ? _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)w->codebook)) : _mm512_setzero_si512();
}

/* What stands for 0 in a tile's codes. */
INLINE int zero_of(const int kind) { return kind == LM_Q4 ? 8 : kind == LM_Q4_MIN ? 0 : 128; }

/* codes[j] holds columns 4j to 4j + 3 of a tile's 16 rows, in 8 bits each. */
INLINE void load_codes(const uint8_t *tile, const int kind, __m512i book, __m512i codes[8]) {
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int j = 0; j < (kind == LM_Q8 ? 8 : 4); j++) {
        __m512i bytes = _mm512_loadu_si512(tile + 64 * j);
        _mm_prefetch((const char *)tile + 64 * j + BYTES_AHEAD, _MM_HINT_T0);
        if (kind == LM_Q8) {
            codes[j] = bytes;
            continue;
        }
        codes[j] = _mm512_and_si512(bytes, nibble);
        codes[j + 4] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble);
        if (kind == LM_Q4_CODEBOOK) {
            codes[j] = _mm512_shuffle_epi8(book, codes[j]);
            codes[j + 4] = _mm512_shuffle_epi8(book, codes[j + 4]);
        }
    }
}

typedef struct {
    __m512 scale, minimum;
} factors;

INLINE factors load_factors(const uint8_t *tile, const int kind) {
    const uint8_t *halves = tile + (kind == LM_Q8 ? 512 : 256);
    const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves));
    return (factors){scale, kind == LM_Q4_MIN ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(halves + 32)))
                                              : _mm512_setzero_ps()};
}

/* The total of 16 rows and that of one more group, whose codes' products add up to `sum`. */
INLINE __m512 add_group(__m512 total, __m512i sum, factors f, const lm_block *block, const int kind) {
    const __m512 both = _mm512_mul_ps(f.scale, _mm512_set1_ps(block->scale));
    total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), both, total);
    if (kind == LM_Q4_MIN) total = _mm512_fmadd_ps(f.minimum, _mm512_set1_ps(block->total), total);
    return total;
}

INLINE __m512 sums_at(const span *s, int m) {
    return s->begins ? _mm512_setzero_ps() : _mm512_loadu_ps(s->out + m * LM_TILE_ROWS);
}

INLINE void tile_rows(const span *s, const int kind, const int rows) {
    const uint8_t *tiles = s->tiles;
    const __m512i book = codebook_of(s->w, kind);
    __m512 total[ROWS_AT_ONCE];
    for (int m = 0; m < rows; m++) total[m] = sums_at(s, m);
    for (int g = 0; g < s->count; g++, tiles += tile_bytes(kind)) {
        __m512i codes[8];
        load_codes(tiles, kind, book, codes);
        const factors f = load_factors(tiles, kind);
        for (int m = 0; m < rows; m++) {
            const lm_block *block = &s->x[(size_t)m * s->groups + g];
            __m512i sum = _mm512_set1_epi32(-zero_of(kind) * block->sum);
            for (int j = 0; j < 8; j++) sum = _mm512_dpbusd_epi32(sum, codes[j], four(block->q + 4 * j));
            total[m] = add_group(total[m], sum, f, block, kind);
        }
    }
    for (int m = 0; m < rows; m++) _mm512_storeu_ps(s->out + m * LM_TILE_ROWS, total[m]);
}

/* codes[j], j < 8: columns 4j to 4j + 3 of a group of the K formats. */
INLINE void super_codes(const uint8_t *from, const int kind, __m512i codes[8]) {
    const __m512i fifth = _mm512_set1_epi8(16), both = _mm512_set1_epi8(48);
    load_codes(from, LM_Q4, _mm512_setzero_si512(), codes); /* the low four bits */
    if (kind == LM_Q4_K) return;
    for (int j = 0; j < 8; j++) {
        const __m512i bytes = _mm512_loadu_si512(from + 256 + (kind == LM_Q6_K ? j / 4 * 64 : 0));
        const int shift = kind == LM_Q6_K ? 2 * (j % 4) : j; /* where bit 4 of the code lies */
        const __m512i placed = shift < 4 ? _mm512_slli_epi16(bytes, 4 - shift) : _mm512_srli_epi16(bytes, shift - 4);
        codes[j] = _mm512_or_si512(codes[j], _mm512_and_si512(placed, kind == LM_Q6_K ? both : fifth));
    }
}

/* sum + the products of half a group's codes and inputs. */
INLINE __m512i half_group(__m512i sum, const __m512i *codes, const int8_t *q) {
    for (int j = 0; j < 4; j++) sum = _mm512_dpbusd_epi32(sum, codes[j], four(q + 4 * j));
    return sum;
}

/* A group's product before the float16 scale and the inputs': a whole number below 2^24, as floats hold them. */
INLINE __m512 super_value(
    const __m512i codes[8], const lm_block *block, const int kind, __m512 scale, __m512 right_scale) {
    if (kind != LM_Q6_K) {
        const __m512i left = half_group(_mm512_setzero_si512(), codes, block->q);
        return _mm512_mul_ps(_mm512_cvtepi32_ps(half_group(left, codes + 4, block->q + 16)), scale);
    }
    const __m512i left = half_group(_mm512_set1_epi32(-32 * block->first), codes, block->q);
    const __m512i right = half_group(_mm512_set1_epi32(-32 * (block->sum - block->first)), codes + 4, block->q + 16);
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(left), scale, _mm512_mul_ps(_mm512_cvtepi32_ps(right), right_scale));
}

INLINE __m512 small_floats(const uint8_t *from, const int kind) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    return _mm512_cvtepi32_ps(kind == LM_Q6_K ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
}

INLINE __m512 halves_at(const uint8_t *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

/* As `tile_rows`, for the K formats. */
INLINE void super_rows(const span *s, const int kind, const int rows) {
    const uint8_t *tile = s->tiles;
    __m512 total[ROWS_AT_ONCE];
    for (int m = 0; m < rows; m++) total[m] = sums_at(s, m);
    for (int first = 0; first < 8 * s->count; first += 8, tile += tile_bytes(kind)) {
        const small_integers small = unpack_integers(tile); /* Q6_K has others, and leaves these alone */
        const uint8_t *from = tile + head_bytes(kind);
        __m512 part[ROWS_AT_ONCE];
        for (int m = 0; m < rows; m++) part[m] = _mm512_setzero_ps();
        for (int g = 0; g < 8; g++, from += code_bytes(kind)) {
            __m512i codes[8];
            super_codes(from, kind, codes);
            const uint8_t *scales = kind == LM_Q6_K ? tile + 32 + 32 * g : small.scale + 16 * g;
            const __m512 scale = small_floats(scales, kind);
            const __m512 right_scale = kind == LM_Q6_K ? small_floats(scales + 16, kind) : scale;
            for (int m = 0; m < rows; m++) {
                const lm_block *block = &s->x[(size_t)m * s->groups + first + g];
                const __m512 value = super_value(codes, block, kind, scale, right_scale);
                part[m] = _mm512_fmadd_ps(value, _mm512_set1_ps(block->scale), part[m]);
            }
        }
        for (int m = 0; m < rows; m++) {
            total[m] = _mm512_fmadd_ps(halves_at(tile), part[m], total[m]);
            if (kind == LM_Q6_K) continue;
            __m512 offset = _mm512_setzero_ps();
            for (int g = 0; g < 8; g++) {
                const lm_block *block = &s->x[(size_t)m * s->groups + first + g];
                const __m512 sum = _mm512_set1_ps(block->total);
                offset = _mm512_fmadd_ps(small_floats(small.minimum + 16 * g, kind), sum, offset);
            }
            total[m] = _mm512_fnmadd_ps(halves_at(tile + 32), offset, total[m]);
        }
    }
    for (int m = 0; m < rows; m++) _mm512_storeu_ps(s->out + m * LM_TILE_ROWS, total[m]);
}

/* --- many rows --------------------------------------------------------------------------------------------------- */

#define ROWS_FOR_BLOCKS 12 /* from so many on it pays to unpack weights first */
#define BLOCK_STRIPES 4
#define BLOCK_ROWS 4
#define BLOCK_TILES 4 /* of a stripe are unpacked at a time: the first cache holds them and the sums of 64 rows */

typedef struct {
    __m512i codes[8];
    factors f;
} unpacked;

/* One group of `rows` rows of inputs times a tile of each of `stripes` stripes: added to each one's out (rows, 16), which
 * `begins`. The sums stay in registers; an input serves all stripes, and a code all rows. */
INLINE void block_product(const unpacked (*tile)[BLOCK_TILES], const lm_block *x, size_t groups, int begins, const int kind,
                          const int stripes, const int rows, float *out, int stride) {
    __m512i sum[BLOCK_STRIPES][BLOCK_ROWS];
    for (int m = 0; m < rows; m++)
        for (int i = 0; i < stripes; i++) sum[i][m] = _mm512_set1_epi32(-zero_of(kind) * x[m * groups].sum);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++)
        for (int m = 0; m < rows; m++) {
            const __m512i input = four(x[m * groups].q + 4 * j);
            for (int i = 0; i < stripes; i++) sum[i][m] = _mm512_dpbusd_epi32(sum[i][m], tile[i]->codes[j], input);
        }
    for (int i = 0; i < stripes; i++)
        for (int m = 0; m < rows; m++) {
            float *to = out + i * stride + m * LM_TILE_ROWS;
            const __m512 total = begins ? _mm512_setzero_ps() : _mm512_loadu_ps(to);
            _mm512_storeu_ps(to, add_group(total, sum[i][m], tile[i]->f, &x[m * groups], kind));
        }
}

/* `stripes` stripes times all rows, a few tiles of each at a time. */
INLINE void blocks(const lm_matrix *w, int stripe, const lm_block *x, int num_rows, const int kind, const int stripes, float *out,
                   int stride) {
    unpacked tiles[BLOCK_STRIPES][BLOCK_TILES];
    const __m512i book = codebook_of(w, kind);
    const int groups = tiles_of(w);
    for (int first = 0; first < groups; first += BLOCK_TILES) {
        const int end = first + BLOCK_TILES < groups ? first + BLOCK_TILES : groups;
        for (int i = 0; i < stripes; i++)
            for (int g = first; g < end; g++) {
                const uint8_t *tile = stripe_at(w, stripe + i) + g * tile_bytes(kind);
                load_codes(tile, kind, book, tiles[i][g - first].codes);
                tiles[i][g - first].f = load_factors(tile, kind);
            }
        for (int g = first; g < end; g++) {
            const unpacked(*tile)[BLOCK_TILES] = (const unpacked(*)[BLOCK_TILES]) & tiles[0][g - first];
            int m = 0;
#define ROWS(NUMBER)                            \
    for (; m + NUMBER <= num_rows; m += NUMBER) \
    block_product(tile, x + (size_t)m * groups + g, groups, g == 0, kind, stripes, NUMBER, out + m * LM_TILE_ROWS, stride)
            ROWS(BLOCK_ROWS);
            ROWS(1);
#undef ROWS
        }
    }
}

/* As in tile_product.h, of the formats whose groups have one scale. */
INLINE void blocked_product(const lm_matrix *w, int stripe, int num_stripes, const lm_block *x, int num_rows, const int kind,
                            float *out, int stride) {
    int i = 0;
    for (; i + BLOCK_STRIPES <= num_stripes; i += BLOCK_STRIPES)
        blocks(w, stripe + i, x, num_rows, kind, BLOCK_STRIPES, out + i * stride, stride);
    for (; i < num_stripes; i++) blocks(w, stripe + i, x, num_rows, kind, 1, out + i * stride, stride);
}

#include "tile_product.h"
