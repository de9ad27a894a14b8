/* How AVX-512 VNNI multiplies a few rows of inputs: `vpdpbusd` multiplies 16 rows by 4 columns and adds them up, in one instruction.
 *
 * It takes unsigned weights and signed inputs. So the codes are used as they are stored, and the zero point is folded into
 * where the sum starts: sum(x * (q - zero)) = sum(x * q) - zero * sum(x).
 */
#include <immintrin.h>

#include "tiles.h"

#define ROWS_AT_ONCE 2 /* that have their inputs in registers; more are multiplied in blocks */

INLINE __m512i four(const int8_t *q) {
    int32_t bits;
    memcpy(&bits, q, 4);
    return _mm512_set1_epi32(bits);
}

INLINE __m512i codebook_of(const lm_matrix *w, const int kind) {
    return FORMATS[kind].has_codebook
        ? _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)w->codebook)) : _mm512_setzero_si512();
}

/* Two scales for a group: one for each half of its columns, as Q6_K has them. */
INLINE int has_two_scales(const int kind) { return FORMATS[kind].small_scales == 2; }

/* What sums of codes times inputs start from; where a group has two scales there are two sums, `part` 0 and 1. */
INLINE int start_of(const lm_block *block, const int kind, const int part) {
    const int sum = !has_two_scales(kind) ? block->sum : part == 0 ? block->first : block->sum - block->first;
    return -FORMATS[kind].zero * sum;
}

INLINE __m512i codes_in(const code_line *line) { return _mm512_loadu_si512(line); }

/* The codes of columns 4j to 4j + 3 of a group's 16 rows, in 8 bits each; j is a constant. */
INLINE __m512i load_four(const code_line *lines, const int kind, __m512i book, const int j) {
    const int bits = FORMATS[kind].code_bits;
    if (bits == 8) return codes_in(&lines[j]);
    const __m512i bytes = codes_in(&lines[j % 4]), low = j < 4 ? bytes : _mm512_srli_epi16(bytes, 4);
    const __m512i codes = _mm512_and_si512(low, _mm512_set1_epi8(15));
    if (FORMATS[kind].has_codebook) return _mm512_shuffle_epi8(book, codes);
    if (bits == 4) return codes;
    const __m512i high_mask = _mm512_set1_epi8((char)(((1 << (bits - 4)) - 1) << 4)), high = codes_in(&lines[high_line(kind, j)]);
    const int shift = high_shift(kind, j); /* to where bit 4 of the code lies */
    const __m512i placed = shift < 4 ? _mm512_slli_epi16(high, 4 - shift) : _mm512_srli_epi16(high, shift - 4);
    return _mm512_or_si512(codes, _mm512_and_si512(placed, high_mask));
}

/* All codes of a group: codes[j] are those of columns 4j to 4j + 3. */
INLINE void load_codes(const code_line *lines, const int kind, __m512i book, __m512i codes[8]) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) codes[j] = load_four(lines, kind, book, j);
}

/* Where an outlier's codes are looked up: in the packed lines themselves, or in a copy of 8 bits where they lie in two lines, since making
 * them again then takes longer than eight stores (docs/decisions/0022). */
INLINE int needs_copy(const int kind) { return FORMATS[kind].code_bits == 5 || FORMATS[kind].code_bits == 6; }

INLINE const code_line *lookable(const code_line *lines, const int kind, code_line copy[8]) {
    if (!needs_copy(kind)) return lines;
    __m512i codes[8];
    load_codes(lines, kind, _mm512_setzero_si512(), codes);
    memcpy(copy, codes, sizeof codes);
    return copy;
}

/* As `load_four`, from what `lookable` gave; j is a constant. */
INLINE __m512i four_at(const code_line *lines, const int kind, __m512i book, const int j) {
    return needs_copy(kind) ? codes_in(&lines[j]) : load_four(lines, kind, book, j);
}

/* The same for a j that is not known beforehand. */
INLINE __m512i look_up_four(const code_line *lines, const int kind, __m512i book, const unsigned j) {
    if (needs_copy(kind) || FORMATS[kind].code_bits == 8) return codes_in(&lines[j]);
    const __m512i shift = _mm512_set1_epi32(j & 4); /* vpsrlvd: vpsrlw takes the time of a product where its count is no constant */
    const __m512i codes = _mm512_and_si512(_mm512_srlv_epi32(codes_in(&lines[j % 4]), shift), _mm512_set1_epi8(15));
    return FORMATS[kind].has_codebook ? _mm512_shuffle_epi8(book, codes) : codes;
}

INLINE void prefetch_head(const uint8_t *tile, const int kind) {
    for (size_t at = 0; at < FORMATS[kind].codes_at; at += 64) _mm_prefetch((const char *)tile + at + BYTES_AHEAD, _MM_HINT_T0);
}

INLINE void prefetch_codes(const code_line *lines, const int kind) {
    for (size_t at = 0; at < FORMATS[kind].code_bytes; at += 64) _mm_prefetch((const char *)lines + at + BYTES_AHEAD, _MM_HINT_T0);
}

/* The codes of a group's outlier times the upper bits of its inputs. */
INLINE __m512i upper_sum(__m512i codes, const lm_block *block) {
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, four(block->high));
}

/* What an upper sum adds to that of a part of its group. Where there are two parts, a shift by all bits leaves nothing for the other one. */
INLINE __m512i share_of(__m512i upper, const lm_block *block, const int kind, const int part) {
    if (!has_two_scales(kind)) return _mm512_slli_epi32(upper, 8);
    const int is_late = block->outlier / 4;
    return _mm512_sllv_epi32(upper, _mm512_set1_epi32(is_late == part ? 8 : 32));
}

typedef struct {
    __m512 scale, other; /* `other` is the minimum, or the scale of a group's second half */
} factors;

INLINE __m512 halves_at(const float16 *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }

INLINE factors load_factors(const uint8_t *tile, const int kind) {
    const float16 *scales = scales_of(kind, tile);
    _mm_prefetch((const char *)scales + BYTES_AHEAD, _MM_HINT_T0);
    return (factors){halves_at(scales), FORMATS[kind].has_minimum ? halves_at(minima_of(kind, tile)) : _mm512_setzero_ps()};
}

/* Factors of 16 rows times a scale of inputs. */
INLINE __m512 times(__m512 factor, const lm_block *block) { return _mm512_mul_ps(factor, _mm512_set1_ps(block->scale)); }

/* The total of 16 rows and that of one more group, whose codes' products add up to `sum`; `scale` is that of both, weights and inputs. */
INLINE __m512 add_group(__m512 total, __m512i sum, __m512 scale, __m512 minimum, const lm_block *block, const int kind) {
    total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, total);
    if (FORMATS[kind].has_minimum) total = _mm512_fmadd_ps(minimum, _mm512_set1_ps(block->total), total);
    return total;
}

INLINE __m512 sums_at(const tile_column *t, const float *out) { return t->begins ? _mm512_setzero_ps() : _mm512_loadu_ps(out); }

/* As in tile_product.h: the inputs of one row or two stay in registers for all panels. */
INLINE void tile_rows(const tile_column *t, const int kind, const int rows) {
    const __m512i book = codebook_of(t->w, kind);
    __m512i starts[ROWS_AT_ONCE], inputs[ROWS_AT_ONCE][8];
    for (int m = 0; m < rows; m++) {
        const lm_block *block = &t->x[(size_t)m * t->groups];
        starts[m] = _mm512_set1_epi32(start_of(block, kind, 0));
        for (int j = 0; j < 8; j++) inputs[m][j] = four(block->q + 4 * j);
    }
    for (int i = 0; i < t->count; i++) {
        const uint8_t *tile = t->tiles + i * t->step;
        const code_line *lines = codes_of(kind, tile, 0);
        __m512i codes[8];
        code_line copy[8];
        const code_line *from = lookable(lines, kind, copy);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) codes[j] = four_at(from, kind, book, j);
        prefetch_codes(lines, kind);
        const factors f = load_factors(tile, kind);
        for (int m = 0; m < rows; m++) {
            const lm_block *block = &t->x[(size_t)m * t->groups];
            float *out = t->out + i * PANEL_STRIDE + m * LM_TILE_ROWS;
            __m512i sum = starts[m];
            for (int j = 0; j < 8; j++) sum = _mm512_dpbusd_epi32(sum, codes[j], inputs[m][j]);
            sum = _mm512_add_epi32(sum, share_of(upper_sum(look_up_four(from, kind, book, (unsigned)block->outlier), block), block, kind, 0));
            _mm512_storeu_ps(out, add_group(sums_at(t, out), sum, times(f.scale, block), f.other, block, kind));
        }
    }
}

INLINE __m512 bytes_at(const uint8_t *from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)));
}

INLINE __m512 signed_bytes_at(const int8_t *from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
}

/* A group of a tile of the K types; with two scales a group, `small` is left alone. */
INLINE factors super_factors(const uint8_t *tile, const small_integers *small, int g, const int kind) {
    if (!has_two_scales(kind)) return (factors){bytes_at(small->s[g]), _mm512_setzero_ps()};
    const tile_q6_k *own = (const tile_q6_k *)tile;
    return (factors){signed_bytes_at(own->s[2 * g]), signed_bytes_at(own->s[2 * g + 1])};
}

/* The part of 256 columns and one more group of it, whose codes' products add up to `sum`, or in halves to `sum` and `second`. */
INLINE __m512 add_super_group(__m512 part, __m512i sum, __m512i second, __m512 scale, __m512 other, const int kind) {
    part = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, part);
    return has_two_scales(kind) ? _mm512_fmadd_ps(_mm512_cvtepi32_ps(second), other, part) : part;
}

/* The total of 16 rows and that of 256 more columns: `part` is all but the scale and the minima, and `offset` the minima but for their
 * scale. */
INLINE __m512 add_super(__m512 total, __m512 part, __m512 offset, factors f, const int kind) {
    total = _mm512_fmadd_ps(f.scale, part, total);
    return FORMATS[kind].has_minimum ? _mm512_fnmadd_ps(f.other, offset, total) : total;
}

/* As `tile_rows`, for the K types; the panels take turns group by group here too. */
INLINE void super_rows(const tile_column *t, const int kind, const int rows) {
    small_integers small[PANELS_AT_ONCE];
    __m512 parts[PANELS_AT_ONCE][ROWS_AT_ONCE];
    for (int i = 0; i < t->count; i++) {
        const uint8_t *tile = t->tiles + i * t->step;
        prefetch_head(tile, kind);
        if (!has_two_scales(kind)) small[i] = unpack_integers(tile);
        for (int m = 0; m < rows; m++) parts[i][m] = _mm512_setzero_ps();
    }
    for (int g = 0; g < 8; g++)
        for (int i = 0; i < t->count; i++) {
            const uint8_t *tile = t->tiles + i * t->step;
            const factors f = super_factors(tile, &small[i], g, kind);
            const code_line *lines = codes_of(kind, tile, g);
            const __m512i none = _mm512_setzero_si512();
            __m512i codes[8];
            code_line copy[8];
            const code_line *from = lookable(lines, kind, copy);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) codes[j] = four_at(from, kind, none, j);
            prefetch_codes(lines, kind);
            for (int m = 0; m < rows; m++) {
                const lm_block *block = &t->x[(size_t)m * t->groups + g];
                const __m512i upper = upper_sum(look_up_four(from, kind, none, (unsigned)block->outlier), block);
                __m512i left = _mm512_set1_epi32(start_of(block, kind, 0)), right = none;
                if (has_two_scales(kind)) right = _mm512_set1_epi32(start_of(block, kind, 1));
                if (!has_two_scales(kind) || block->outlier < 4)
                    left = _mm512_add_epi32(left, _mm512_slli_epi32(upper, 8));
                else
                    right = _mm512_add_epi32(right, _mm512_slli_epi32(upper, 8));
                for (int j = 0; j < 4; j++) {
                    left = _mm512_dpbusd_epi32(left, codes[j], four(block->q + 4 * j));
                    right = _mm512_dpbusd_epi32(right, codes[j + 4], four(block->q + 4 * j + 16));
                }
                if (!has_two_scales(kind)) left = _mm512_add_epi32(left, right);
                parts[i][m] = add_super_group(parts[i][m], left, right, times(f.scale, block), times(f.other, block), kind);
            }
        }
    for (int i = 0; i < t->count; i++)
        for (int m = 0; m < rows; m++) {
            float *out = t->out + i * PANEL_STRIDE + m * LM_TILE_ROWS;
            const lm_block *x = &t->x[(size_t)m * t->groups];
            __m512 offset = _mm512_setzero_ps();
            for (int g = 0; g < 8 && FORMATS[kind].has_minimum; g++)
                offset = _mm512_fmadd_ps(bytes_at(small[i].t[g]), _mm512_set1_ps(x[g].total), offset);
            _mm512_storeu_ps(out, add_super(sums_at(t, out), parts[i][m], offset, load_factors(t->tiles + i * t->step, kind), kind));
        }
}

/* --- some rows --------------------------------------------------------------------------------------------------- */

#define ROWS_FOR_BLOCKS 4
#define ROWS_OF_BLOCK 8
#define BLOCK_GROUPS 8 /* whose totals stay in registers, since a store takes the time of a product; as many as a tile of the K types has */

#define EACH_ROW _Pragma("GCC unroll 8") for (int m = 0; m < rows; m++)

/* A panel's group times those of `rows` rows of inputs, added to `totals`; the codes serve all rows. The outliers of one row or two come
 * behind four columns of all rows: one after the other they would keep the multiplying pipes waiting. */
INLINE void multiply_group(const code_line *lines, factors f, const lm_block *x, size_t groups, __m512i book, const int kind,
                           const int rows, __m512 totals[ROWS_OF_BLOCK]) {
    const int parts = has_two_scales(kind) ? 2 : 1, fours = 8 / parts;
    __m512i sum[ROWS_OF_BLOCK], upper[ROWS_OF_BLOCK];
#pragma GCC unroll 2
    for (int part = 0; part < parts; part++) {
        __asm__ volatile("" ::: "memory"); /* what the second part needs is not loaded in the first, whose registers it would take */
        EACH_ROW sum[m] = parts == 2 ? _mm512_setzero_si512() : _mm512_set1_epi32(start_of(&x[m * groups], kind, 0));
#pragma GCC unroll 8
        for (int n = 0; n < fours; n++) {
            const int j = parts == 2 ? part * 4 + n : n / 2 + n % 2 * 4; /* codes of the same bytes follow each other */
            const __m512i codes = four_at(lines, kind, book, j);
            EACH_ROW sum[m] = _mm512_dpbusd_epi32(sum[m], codes, four(x[m * groups].q + 4 * j));
            for (int k = 0; k < parts; k++) {
                const int m = n * parts + k;
                if (m >= rows) continue;
                const lm_block *block = &x[m * groups];
                if (part == 0) upper[m] = upper_sum(look_up_four(lines, kind, book, (unsigned)block->outlier), block);
                sum[m] = _mm512_add_epi32(sum[m], share_of(upper[m], block, kind, part));
                if (parts == 2) sum[m] = _mm512_add_epi32(sum[m], _mm512_set1_epi32(start_of(block, kind, part)));
            }
        }
        EACH_ROW totals[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[m]), times(part == 0 ? f.scale : f.other, &x[m * groups]), totals[m]);
    }
    if (is_super(kind) || !FORMATS[kind].has_minimum) return;
    EACH_ROW totals[m] = _mm512_fmadd_ps(f.other, _mm512_set1_ps(x[m * groups].total), totals[m]);
}

/* The totals of 256 columns, of which all but the scale and the minima is given, added to those before. */
INLINE void add_supers(const tile_column *t, const float *out, const uint8_t *tile, const small_integers *small, const lm_block *x,
                       const int kind, const int rows, __m512 totals[ROWS_OF_BLOCK]) {
    const factors f = load_factors(tile, kind);
    __m512 offsets[ROWS_OF_BLOCK];
    EACH_ROW offsets[m] = _mm512_setzero_ps();
    for (int g = 0; g < GROUPS_OF_SUPER && FORMATS[kind].has_minimum; g++, x++) {
        const __m512 minima = bytes_at(small->t[g]);
        EACH_ROW offsets[m] = _mm512_fmadd_ps(minima, _mm512_set1_ps(x[(size_t)m * t->groups].total), offsets[m]);
    }
    EACH_ROW totals[m] = add_super(sums_at(t, out + m * LM_TILE_ROWS), totals[m], offsets[m], f, kind);
}

/* Some groups of each of a column's panels, and what is multiplied next: the same of its panels, or of other ones, as far apart; or NULL. */
typedef struct {
    tile_column at;
    int num_groups;
    const uint8_t *coming;
} block_column;

/* Prefetch the coming panels' share of panel i's group g: the panels take turns, since memory is read faster from several pages, and in
 * equal pieces, so that it is never idle (docs/decisions/0022). */
INLINE void prefetch_share(const block_column *c, int i, int g, const int kind) {
    const size_t share = tile_bytes(kind) / (tile_cols(kind) / LM_GROUP);
    const int number = i * c->num_groups + g;
    const char *from = (const char *)c->coming + number % c->at.count * c->at.step + number / c->at.count * share;
    for (size_t place = 0; place < share; place += 64) _mm_prefetch(from + place, _MM_HINT_T0);
}

/* A column's panel i times `rows` rows of inputs, from row `first` on. */
INLINE void multiply_block(const block_column *c, int i, int first, const int kind, const int rows) {
    const tile_column *t = &c->at;
    const __m512i book = codebook_of(t->w, kind);
    const uint8_t *tile = t->tiles + i * t->step;
    const lm_block *x = t->x + (size_t)first * t->groups;
    float *out = t->out + i * PANEL_STRIDE + first * LM_TILE_ROWS;
    small_integers small;
    code_line copy[8];
    __m512 totals[ROWS_OF_BLOCK];
    if (is_super(kind) && !has_two_scales(kind)) small = unpack_integers(tile);
    EACH_ROW totals[m] = is_super(kind) ? _mm512_setzero_ps() : sums_at(t, out + m * LM_TILE_ROWS);
    for (int g = 0; g < c->num_groups; g++) {
        const uint8_t *own = is_super(kind) ? tile : tile + g * tile_bytes(kind);
        const code_line *lines = codes_of(kind, own, is_super(kind) ? g : 0);
        const factors f = is_super(kind) ? super_factors(own, &small, g, kind) : load_factors(own, kind);
        if (first == 0 && c->coming != NULL) prefetch_share(c, i, g, kind);
        multiply_group(lookable(lines, kind, copy), f, x + g, t->groups, book, kind, rows, totals);
    }
    if (is_super(kind)) add_supers(t, out, tile, &small, x, kind, rows, totals);
    EACH_ROW _mm512_storeu_ps(out + m * LM_TILE_ROWS, totals[m]);
}

/* How many groups of a panel are multiplied at once: about as many each time, so that each time those of the next one can be prefetched
 * evenly. */
INLINE int groups_at_once(int groups) {
    const int times = (groups + BLOCK_GROUPS - 1) / BLOCK_GROUPS;
    return (groups + times - 1) / times;
}

/* As in tile_product.h; panels take turns, a few groups at a time. Rows are shared out evenly, since a block of one row or two takes as
 * long for its codes as one of eight. */
INLINE void packed_product(const lm_matrix *w, int panel, int num_panels, const uint8_t *coming, const lm_block *x, int num_rows,
                           const int kind, float *out) {
    const int groups = w->cols / LM_GROUP, of_tile = tile_cols(kind) / LM_GROUP, at_once = groups_at_once(groups);
    const size_t step = groups / of_tile * tile_bytes(kind), size = at_once / of_tile * tile_bytes(kind);
    const uint8_t *tiles = (const uint8_t *)w->data + panel * step;
    for (int g = 0; g < groups; g += at_once, tiles += size) {
        const int left = groups - g;
        const block_column c = {
            .at = {
                .w = w,
                .tiles = tiles,
                .step = step,
                .count = num_panels,
                .begins = g == 0,
                .x = x + g,
                .groups = groups,
                .out = out,
            },
            .num_groups = left < at_once ? left : at_once,
            .coming = left <= at_once ? coming : tiles + size,
        };
        int num_blocks = (num_rows + ROWS_OF_BLOCK - 1) / ROWS_OF_BLOCK;
        for (int m = 0, rows; m < num_rows; m += rows) {
            rows = (num_rows - m) / num_blocks--; /* at least ROWS_FOR_BLOCKS */
#define CASE(NUMBER)                                                                          \
    case NUMBER:                                                                              \
        for (int i = 0; i < num_panels; i++) multiply_block(&c, i, m, kind, NUMBER);          \
        break;
            switch (rows) { CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#undef CASE
        }
    }
}
