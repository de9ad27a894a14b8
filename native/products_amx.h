/* The tile products with AMX: `tdpbssd` multiplies 16 rows of inputs with a whole tile, 16 rows by 32 columns, in one
 * instruction.
 *
 * Its second operand takes columns 4j to 4j + 3 of 16 rows one after the other in row j of a register, which is how a tile
 * of ours lies. So codes are widened to 8 bits, less what stands for 0, and used as they are; they serve all rows of inputs.
 *
 * Whole numbers have no rounding, and what follows them is the VNNI set's own code. So both sets have the same results, to the
 * bit, and the VNNI set computes what is left over of 8 rows.
 */
#include "amx.h"

#include "packed_avx512_vnni.h"

#define FEW_ROWS_PRODUCTS lm_products_avx512_vnni

#define GROUPS_AT_ONCE 32 /* whose widened codes take 16 KB, a third of the L1 cache; the inputs of 16 rows take about as much */

/* A thread gives its tiles the shapes below when it first needs them, and releases them at the end of a job: other code in this
 * process may use tiles too, and the system need not save those that are released. */
static _Thread_local int has_tiles;

static inline void use_tiles(void) {
    static const tile_shapes shapes = {
        .palette = 1, /*   sums    inputs  codes   sums of 8 rows, and their inputs */
        .rows =           {16, 16, 16, 16,  8,  8,  8,  8},
        .row_bytes =      {64, 64, 32, 32, 64, 64, 64, 32},
    };
    if (has_tiles) return;
    _tile_loadconfig(&shapes);
    has_tiles = 1;
}

#define LEAVE_JOB leave_tiles
static inline void leave_tiles(void) {
    if (!has_tiles) return;
    _tile_release();
    has_tiles = 0;
}

/* sums (rows, 16) = one group of `rows` rows of inputs times a tile's codes. Even and odd groups take turns with the
 * registers, so that one is multiplied while the other is stored. */
INLINE void multiply(const lm_block *x, size_t stride, const int8_t *codes, const int rows, const int odd, int32_t *sums) {
#define MULTIPLY(SUMS, INPUTS, CODES)          \
    do {                                       \
        _tile_zero(SUMS);                      \
        _tile_loadd(INPUTS, x->q, stride);     \
        _tile_loadd(CODES, codes, 64);         \
        _tile_dpbssd(SUMS, INPUTS, CODES);     \
        _tile_stored(SUMS, sums, 64);          \
    } while (0)
    if (rows == 8)
        MULTIPLY(6, 7, 4);
    else if (odd)
        MULTIPLY(1, 3, 5);
    else
        MULTIPLY(0, 2, 4);
#undef MULTIPLY
}

/* What the upper bits of the outlier's codes add to a row's sums; `codes` are less what stands for 0. */
INLINE __m512i outlier_sums(const int8_t *codes, const lm_block *block, const int kind) {
    const __m512i zero = _mm512_set1_epi8((char)FORMATS[kind].zero), high = four(block->high), none = _mm512_setzero_si512();
    const __m512i stored = _mm512_add_epi8(_mm512_load_si512(codes + 64 * block->outlier), zero);
    const __m512i sum = _mm512_sub_epi32(_mm512_dpbusd_epi32(none, stored, high), _mm512_dpbusd_epi32(none, zero, high));
    return _mm512_slli_epi32(sum, 8);
}

INLINE void add_sums(__m512 *total, const int32_t *sums, const int8_t *codes, const uint8_t *tile, const lm_block *x, int groups,
                     const int kind, const int rows) {
    const factors f = load_factors(tile, kind);
#pragma GCC unroll 16
    for (int m = 0; m < rows; m++) {
        const lm_block *block = &x[(size_t)m * groups];
        const __m512i sum = _mm512_add_epi32(_mm512_load_si512(sums + m * LM_TILE_ROWS), outlier_sums(codes, block, kind));
        total[m] = add_group(total[m], sum, times(f.scale, block), f.other, block, kind);
    }
}

/* Some groups of `rows` rows of inputs times `count` tiles, whose codes are given: added to out (rows, 16), which `begins`. */
INLINE void add_tiles(const int8_t *codes, const uint8_t *tiles, int count, const lm_block *x, int groups, int begins,
                      const int kind, const int rows, float *out) {
    _Alignas(64) int32_t sums[2][16 * LM_TILE_ROWS];
    const size_t size = tile_bytes(kind), stride = groups * sizeof(lm_block);
    __m512 total[16];
#pragma GCC unroll 16
    for (int m = 0; m < rows; m++) total[m] = begins ? _mm512_setzero_ps() : _mm512_loadu_ps(out + m * LM_TILE_ROWS);
    for (int g = 0; g < count; g += 2, codes += 2 * 512, tiles += 2 * size, x += 2) {
        multiply(x, stride, codes, rows, 0, sums[0]);
        if (g + 1 < count) multiply(x + 1, stride, codes + 512, rows, 1, sums[1]);
        add_sums(total, sums[0], codes, tiles, x, groups, kind, rows);
        if (g + 1 < count) add_sums(total, sums[1], codes + 512, tiles + size, x + 1, groups, kind, rows);
    }
#pragma GCC unroll 16
    for (int m = 0; m < rows; m++) _mm512_storeu_ps(out + m * LM_TILE_ROWS, total[m]);
}

/* The codes of some tiles, 8 rows of 64 bytes each. */
INLINE void widen(const lm_matrix *w, const uint8_t *tiles, int count, const int kind, int8_t *to) {
    const __m512i book = codebook_of(w, kind), zero = _mm512_set1_epi8((char)FORMATS[kind].zero);
    for (int g = 0; g < count; g++, tiles += tile_bytes(kind), to += 512) {
        __m512i codes[8];
        load_codes(codes_of(kind, tiles, 0), kind, book, codes);
        prefetch_codes(codes_of(kind, tiles, 0), kind);
        for (int j = 0; j < 8; j++) _mm512_store_si512(to + 64 * j, _mm512_sub_epi8(codes[j], zero));
    }
    __asm__ volatile("" ::"r"(to) : "memory"); /* gcc does not know that tiles are loaded from memory */
}

/* The rows up to the last multiple of 8; returns how many they are. */
INLINE int many_rows_product(
    const lm_matrix *w, const uint8_t *tiles, const lm_block *x, int num_rows, const int kind, float *out) {
    _Alignas(64) int8_t codes[GROUPS_AT_ONCE * 512];
    const int groups = w->cols / LM_GROUP;
    num_rows = num_rows / 8 * 8;
    if (num_rows == 0) return 0;
    use_tiles();
    for (int g = 0; g < groups; g += GROUPS_AT_ONCE, tiles += GROUPS_AT_ONCE * tile_bytes(kind), x += GROUPS_AT_ONCE) {
        const int count = groups - g < GROUPS_AT_ONCE ? groups - g : GROUPS_AT_ONCE;
        widen(w, tiles, count, kind, codes);
        for (int m = 0; m + 16 <= num_rows; m += 16)
            add_tiles(codes, tiles, count, x + (size_t)m * groups, groups, g == 0, kind, 16, out + m * LM_TILE_ROWS);
        const int last = num_rows - 8;
        if (num_rows % 16)
            add_tiles(codes, tiles, count, x + (size_t)last * groups, groups, g == 0, kind, 8, out + last * LM_TILE_ROWS);
    }
    return num_rows;
}

#include "many_rows.h"
