/* How AVX-512 VNNI multiplies a few rows of inputs: `vpdpbusd` multiplies 16 rows by 4 columns and adds them up, in one instruction.
 *
 * It takes unsigned weights and signed inputs. So the codes are used as they are stored, and the zero point is folded into
 * where the sum starts: sum(x * (q - zero)) = sum(x * q) - zero * sum(x).
 */
#include <immintrin.h>

#include "tiles.h"

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

/* --- blocks of panels and rows ------------------------------------------------------------------------------------ */

#define MOST_PANELS 2 /* of a block, and rows */
#define MOST_ROWS 8
#define BLOCK_GROUPS 8 /* whose totals stay in registers, since a store takes the time of a product; as many as a tile of the K types has */

/* A block of two panels loads each input once for both. Types whose codes are copied, and K types, have no registers for that. */
INLINE int panels_of_block(const int kind) { return needs_copy(kind) || is_super(kind) ? 1 : 2; }
INLINE int rows_of_block(const int kind) { return panels_of_block(kind) == 1 ? 8 : 5; }

#define EACH_PANEL _Pragma("GCC unroll 2") for (int i = 0; i < panels; i++)
#define EACH_ROW _Pragma("GCC unroll 8") for (int m = 0; m < rows; m++)
typedef __m512 block_totals[MOST_PANELS][MOST_ROWS];

/* A group of each of `panels` panels times those of `rows` rows of inputs, added to `totals`: an input serves all panels, and a code all
 * rows. The outliers of one sum or two come behind four columns of all rows: one after the other they would keep the multiplying pipes waiting. */
INLINE void multiply_group(const code_line *const *lines, const factors *f, const lm_block *x, size_t groups, __m512i book, const int kind,
                           const int panels, const int rows, block_totals totals) {
    const int parts = has_two_scales(kind) ? 2 : 1, fours = 8 / parts, count = panels * rows;
    __m512i sum[MOST_PANELS][MOST_ROWS], upper[MOST_PANELS][MOST_ROWS];
#pragma GCC unroll 2
    for (int part = 0; part < parts; part++) {
        __asm__ volatile("" ::: "memory"); /* what the second part needs is not loaded in the first, whose registers it would take */
        EACH_ROW EACH_PANEL sum[i][m] = parts == 2 ? _mm512_setzero_si512() : _mm512_set1_epi32(start_of(&x[m * groups], kind, 0));
#pragma GCC unroll 8
        for (int n = 0; n < fours; n++) {
            const int j = parts == 2 ? part * 4 + n : n / 2 + n % 2 * 4; /* codes of the same bytes follow each other */
            __m512i codes[MOST_PANELS];
            EACH_PANEL codes[i] = four_at(lines[i], kind, book, j);
            EACH_ROW {
                const __m512i input = four(x[m * groups].q + 4 * j);
                EACH_PANEL sum[i][m] = _mm512_dpbusd_epi32(sum[i][m], codes[i], input);
            }
            for (int k = (n * count + fours - 1) / fours; k < ((n + 1) * count + fours - 1) / fours; k++) {
                const int m = k / panels, i = k % panels;
                const lm_block *block = &x[m * groups];
                if (part == 0) upper[i][m] = upper_sum(look_up_four(lines[i], kind, book, (unsigned)block->outlier), block);
                sum[i][m] = _mm512_add_epi32(sum[i][m], share_of(upper[i][m], block, kind, part));
                if (parts == 2) sum[i][m] = _mm512_add_epi32(sum[i][m], _mm512_set1_epi32(start_of(block, kind, part)));
            }
        }
        EACH_ROW EACH_PANEL totals[i][m] =
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[i][m]), times(part == 0 ? f[i].scale : f[i].other, &x[m * groups]), totals[i][m]);
    }
    if (is_super(kind) || !FORMATS[kind].has_minimum) return;
    EACH_ROW EACH_PANEL totals[i][m] = _mm512_fmadd_ps(f[i].other, _mm512_set1_ps(x[m * groups].total), totals[i][m]);
}

/* The totals of 256 columns of a panel, of which all but the scale and the minima is given, added to those before. */
INLINE void add_supers(const tile_column *t, const float *out, const uint8_t *tile, const small_integers *small, const lm_block *x,
                       const int kind, const int rows, __m512 totals[MOST_ROWS]) {
    const factors f = load_factors(tile, kind);
    __m512 offsets[MOST_ROWS];
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

/* Panels `first_panel` and on of a column times `rows` rows of inputs, from row `first` on. */
INLINE void multiply_block(const block_column *c, int first_panel, int first, const int kind, const int panels, const int rows) {
    const tile_column *t = &c->at;
    const __m512i book = codebook_of(t->w, kind);
    const uint8_t *tile = t->tiles + first_panel * t->step;
    const lm_block *x = t->x + (size_t)first * t->groups;
    float *out = t->out + first_panel * PANEL_STRIDE + first * LM_TILE_ROWS;
    small_integers small[MOST_PANELS];
    code_line copy[MOST_PANELS][8];
    block_totals totals;
    EACH_PANEL {
        if (is_super(kind) && !has_two_scales(kind)) small[i] = unpack_integers(tile + i * t->step);
        EACH_ROW totals[i][m] = is_super(kind) ? _mm512_setzero_ps() : sums_at(t, out + i * PANEL_STRIDE + m * LM_TILE_ROWS);
    }
    for (int g = 0; g < c->num_groups; g++) {
        const code_line *lines[MOST_PANELS];
        factors f[MOST_PANELS];
        EACH_PANEL {
            const uint8_t *own = tile + i * t->step + (is_super(kind) ? 0 : g * tile_bytes(kind));
            f[i] = is_super(kind) ? super_factors(own, &small[i], g, kind) : load_factors(own, kind);
            if (first == 0 && c->coming != NULL) prefetch_share(c, first_panel + i, g, kind);
            lines[i] = lookable(codes_of(kind, own, is_super(kind) ? g : 0), kind, copy[i]);
        }
        multiply_group(lines, f, x + g, t->groups, book, kind, panels, rows, totals);
    }
    EACH_PANEL {
        float *to = out + i * PANEL_STRIDE;
        if (is_super(kind)) add_supers(t, to, tile + i * t->step, &small[i], x, kind, rows, totals[i]);
        EACH_ROW _mm512_storeu_ps(to + m * LM_TILE_ROWS, totals[i][m]);
    }
}

/* All of a column's panels times `rows` rows of inputs, from row `first` on. */
INLINE void multiply_panels(const block_column *c, int first, const int kind, const int rows) {
    int i = 0;
    for (; i + panels_of_block(kind) <= c->at.count; i += panels_of_block(kind)) multiply_block(c, i, first, kind, panels_of_block(kind), rows);
    if (panels_of_block(kind) > 1 && i < c->at.count) multiply_block(c, i, first, kind, 1, rows);
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
        int num_blocks = (num_rows + rows_of_block(kind) - 1) / rows_of_block(kind);
        for (int m = 0, rows; m < num_rows; m += rows) {
            rows = (num_rows - m) / num_blocks--;
#define CASE(NUMBER) \
    case NUMBER: if (NUMBER <= rows_of_block(kind)) multiply_panels(&c, m, kind, NUMBER); break;
            switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#undef CASE
        }
    }
}
