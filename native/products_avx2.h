/* The tile products with AVX2: 8 rows by 4 columns in an instruction pair.
 *
 * `vpmaddubsw` adds two products of unsigned weights and signed inputs in 16 bits, which 4-bit codes fill only to an eighth:
 * all eight of a group are added before they are widened. Codes of 8 bits are multiplied with their sign taken over by the
 * input, and widened at once.
 */
#include <immintrin.h>

#include "tiles.h"

#define NAME "avx2"
#define ROWS_AT_ONCE 4

static inline __attribute__((always_inline)) __m256i four(const int8_t *q) {
    int32_t bits;
    memcpy(&bits, q, 4);
    return _mm256_set1_epi32(bits);
}

/* 8 of a tile's 16 rows (`half` 0 or 1) times `rows` rows of groups. */
static inline __attribute__((always_inline)) void half_tile_rows(
    const lm_matrix *w, const uint8_t *tiles, int groups, int half, const lm_block *x, const int kind, const int rows,
    float *out) {
    const size_t size = tile_bytes(kind);
    const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1), middle = _mm256_set1_epi8(-128);
    const __m256i book = kind == LM_Q4_CODEBOOK
        ? _mm256_xor_si256(middle, _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)w->codebook))) : middle;
    const int narrow = kind == LM_Q4 || kind == LM_Q4_MIN, zero = kind == LM_Q4 ? 8 : 0;
    __m256 total[ROWS_AT_ONCE];
    for (int m = 0; m < rows; m++) total[m] = _mm256_setzero_ps();
    for (int g = 0; g < groups; g++, tiles += size) {
        __m256i codes[8]; /* of columns 4j to 4j + 3; signed, but for those of 4 bits */
        for (int j = 0; j < (kind == LM_Q8 ? 8 : 4); j++) {
            const __m256i bytes = _mm256_loadu_si256((const __m256i *)(tiles + 64 * j + 32 * half));
            _mm_prefetch((const char *)tiles + 64 * j + 2048, _MM_HINT_T0);
            if (kind == LM_Q8) {
                codes[j] = _mm256_xor_si256(bytes, middle);
                continue;
            }
            codes[j] = _mm256_and_si256(bytes, nibble);
            codes[j + 4] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
            if (kind == LM_Q4_CODEBOOK) {
                codes[j] = _mm256_shuffle_epi8(book, codes[j]);
                codes[j + 4] = _mm256_shuffle_epi8(book, codes[j + 4]);
            }
        }
        const uint8_t *halves = tiles + (kind == LM_Q8 ? 512 : 256) + 16 * half;
        const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves));
        const __m256 minimum = kind == LM_Q4_MIN
            ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + 32))) : _mm256_setzero_ps();
        for (int m = 0; m < rows; m++) {
            const lm_block *block = &x[(size_t)m * groups + g];
            __m256i sum = _mm256_setzero_si256();
            for (int j = 0; j < 8; j++) {
                const __m256i input = four(block->q + 4 * j);
                if (narrow)
                    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes[j], input));
                else
                    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(ones, _mm256_maddubs_epi16(
                        _mm256_abs_epi8(codes[j]), _mm256_sign_epi8(input, codes[j]))));
            }
            if (narrow) sum = _mm256_madd_epi16(ones, sum);
            if (zero) sum = _mm256_sub_epi32(sum, _mm256_set1_epi32(zero * block->sum));
            const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(block->scale));
            total[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), both, total[m]);
            if (kind == LM_Q4_MIN)
                total[m] = _mm256_fmadd_ps(minimum, _mm256_set1_ps((float)block->sum * block->scale), total[m]);
        }
    }
    for (int m = 0; m < rows; m++) _mm256_storeu_ps(out + m * LM_TILE_ROWS + 8 * half, total[m]);
}

static inline __attribute__((always_inline)) void tile_rows(
    const lm_matrix *w, const uint8_t *tiles, int groups, const lm_block *x, const int kind, const int rows, float *out) {
    half_tile_rows(w, tiles, groups, 0, x, kind, rows, out);
    half_tile_rows(w, tiles, groups, 1, x, kind, rows, out);
}

#include "tile_product.h"
