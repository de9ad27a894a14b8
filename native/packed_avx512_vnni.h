/* How AVX-512 VNNI multiplies packed weights: `vpdpbusd` multiplies 16 rows by 4 columns and adds them up, in one instruction.
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

/* What sums of codes times inputs start from; where a group has two scales there are two sums, `part` 0 and 1. From memory: a number that
 * comes from a general register takes two operations more. */
INLINE __m512i start_of(const lm_block *block, const int kind, const int part) {
    const int zero = FORMATS[kind].zero;
    if (zero == 0) return _mm512_setzero_si512();
    const int32_t sum = has_two_scales(kind) ? block->negated_halves[part] : block->negated_sum;
    return _mm512_slli_epi32(_mm512_set1_epi32(sum), __builtin_ctz(zero));
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

/* Whether codes lie in two lines. */
INLINE int lies_in_two_lines(const int kind) { return FORMATS[kind].code_bits == 5 || FORMATS[kind].code_bits == 6; }

/* As `load_four`, or from codes of 8 bits that were made of them; j is a constant. */
INLINE __m512i four_at(const code_line *lines, const int kind, __m512i book, const int j, const int made) {
    return made ? codes_in(&lines[j]) : load_four(lines, kind, book, j);
}

/* The same for a block's outlier. */
INLINE __m512i outlier_codes_at(const code_line *lines, const int kind, __m512i book, const lm_block *block, const int made) {
    if (made || FORMATS[kind].code_bits == 8) return codes_in(&lines[block->outlier]);
    const __m512i shift = _mm512_set1_epi32(block->outlier & 4); /* vpsrlvd: vpsrlw takes the time of a product where its count is no constant */
    const __m512i codes = _mm512_and_si512(_mm512_srlv_epi32(codes_in(&lines[block->outlier % 4]), shift), _mm512_set1_epi8(15));
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
    static const int32_t SHIFTS[8][2] = {{8, 32}, {8, 32}, {8, 32}, {8, 32}, {32, 8}, {32, 8}, {32, 8}, {32, 8}}; /* of each outlier */
    if (!has_two_scales(kind)) return _mm512_slli_epi32(upper, 8);
    return _mm512_sllv_epi32(upper, _mm512_set1_epi32(SHIFTS[block->outlier][part]));
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
    if (!has_two_scales(kind)) return (factors){signed_bytes_at(small->s[g]), _mm512_setzero_ps()};
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

#define MOST_PANELS 2 /* of a block, and rows: an input is loaded once for both panels, and all totals stay in registers */
#define MOST_ROWS 5
#define BLOCK_GROUPS 8 /* whose totals do, since a store takes the time of a product; as many as a tile of the K types has */

INLINE int rows_of_block(const int kind) { return has_two_scales(kind) ? 4 : MOST_ROWS; }

#define EACH_PANEL _Pragma("GCC unroll 2") for (int i = 0; i < panels; i++)
#define EACH_ROW _Pragma("GCC unroll 5") for (int m = 0; m < rows; m++)
typedef __m512 block_totals[MOST_PANELS][MOST_ROWS];

/* A group of each of `panels` panels times those of `rows` rows of inputs, added to `totals`: an input serves all panels, and a code all
 * rows. Codes are kept where `keep` is not NULL. A row's outlier comes behind four columns, each row's behind others: one after the
 * other they would keep the multiplying pipes waiting. Those of all panels come together, which takes fewer operations than one by one. */
INLINE void multiply_group(const code_line *const *lines, const factors *f, const lm_block *x, size_t groups, __m512i book, const int kind,
                           const int panels, const int rows, const int made, code_line *const *keep, block_totals totals) {
    const int parts = has_two_scales(kind) ? 2 : 1, fours = 8 / parts;
    __m512i sum[MOST_PANELS][MOST_ROWS], upper[MOST_PANELS][MOST_ROWS];
#pragma GCC unroll 2
    for (int part = 0; part < parts; part++) {
        __asm__ volatile("" ::: "memory"); /* what the second part needs is not loaded in the first, whose registers it would take */
        EACH_ROW EACH_PANEL sum[i][m] = start_of(&x[m * groups], kind, part);
#pragma GCC unroll 8
        for (int n = 0; n < fours; n++) {
            const int j = parts == 2 ? part * 4 + n : n / 2 + n % 2 * 4; /* codes of the same bytes follow each other */
            __m512i codes[MOST_PANELS];
            EACH_PANEL codes[i] = four_at(lines[i], kind, book, j, made);
            if (keep != NULL) EACH_PANEL _mm512_store_si512(&keep[i][j], codes[i]);
            EACH_ROW {
                const lm_block *block = &x[m * groups];
                const __m512i input = four(block->q + 4 * j);
                EACH_PANEL sum[i][m] = _mm512_dpbusd_epi32(sum[i][m], codes[i], input);
                if (m * fours / rows != n) continue;
                if (part == 0) EACH_PANEL upper[i][m] = upper_sum(outlier_codes_at(lines[i], kind, book, block, made), block);
                EACH_PANEL sum[i][m] = _mm512_add_epi32(sum[i][m], share_of(upper[i][m], block, kind, part));
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

/* Some groups of each of a column's panels, and what is multiplied a little later: as many of its panels, or of other ones, as far apart;
 * or NULL. */
typedef struct {
    tile_column at;
    int num_groups;
    const uint8_t *coming;
} block_column;

/* Prefetch the coming panels' share of panel i's group g: the panels take turns, since memory is read faster from several pages, and in
 * equal pieces, so that it is never idle (docs/decisions/0022). Into the second level: with what is multiplied now it would not fit into
 * the 32 kB of a first one, and a core waits for more lines of the second (docs/decisions/0071). */
INLINE void prefetch_share(const block_column *c, int i, int g, const int kind) {
    const size_t share = tile_bytes(kind) / (tile_cols(kind) / LM_GROUP);
    const int number = i * c->num_groups + g;
    const char *from = (const char *)c->coming + number % c->at.count * c->at.step + number / c->at.count * share;
    for (size_t place = 0; place < share; place += 64) _mm_prefetch(from + place, _MM_HINT_T1);
}

/* What is made of a panel once for all rows: codes of 8 bits, by the first block, and the K types' small integers. */
typedef struct {
    code_line codes[BLOCK_GROUPS][8];
    small_integers small;
} made_of_panel;

/* Straight to where they stay: a store takes up to 1.3 times a product's time. */
INLINE void make_codes(const code_line *lines, const int kind, code_line to[8]) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) _mm512_store_si512(&to[j], load_four(lines, kind, _mm512_setzero_si512(), j));
}

/* A block's codes: as they are packed, or so and kept in 8 bits for other blocks, or those that were kept. */
enum { PACKED, KEEPING, KEPT };

/* Panels `first_panel` and on of a column times `rows` rows of inputs, from row `first` on. */
INLINE void multiply_block(const block_column *c, made_of_panel *made, int first_panel, int first, const int kind, const int panels,
                           const int rows, const int codes) {
    const tile_column *t = &c->at;
    const int makes = codes == KEEPING && lies_in_two_lines(kind); /* all of a group, and then reads them */
    const __m512i book = codebook_of(t->w, kind);
    const uint8_t *tile = t->tiles + first_panel * t->step;
    const lm_block *x = t->x + (size_t)first * t->groups;
    float *out = t->out + first_panel * PANEL_STRIDE + first * LM_TILE_ROWS;
    block_totals totals;
    EACH_PANEL EACH_ROW totals[i][m] = is_super(kind) ? _mm512_setzero_ps() : sums_at(t, out + i * PANEL_STRIDE + m * LM_TILE_ROWS);
    for (int g = 0; g < c->num_groups; g++) {
        const code_line *lines[MOST_PANELS];
        code_line *kept[MOST_PANELS];
        factors f[MOST_PANELS];
        EACH_PANEL {
            const uint8_t *own = tile + i * t->step + (is_super(kind) ? 0 : g * tile_bytes(kind));
            f[i] = is_super(kind) ? super_factors(own, &made[i].small, g, kind) : load_factors(own, kind);
            if (first == 0 && c->coming != NULL) prefetch_share(c, first_panel + i, g, kind);
            lines[i] = codes_of(kind, own, is_super(kind) ? g : 0);
            kept[i] = made[i].codes[g];
            if (makes) make_codes(lines[i], kind, kept[i]);
            if (makes || codes == KEPT) lines[i] = kept[i];
        }
        multiply_group(lines, f, x + g, t->groups, book, kind, panels, rows, makes || codes == KEPT,
                       codes == KEEPING && !makes ? kept : NULL, totals);
    }
    EACH_PANEL {
        float *to = out + i * PANEL_STRIDE;
        if (is_super(kind)) add_supers(t, to, tile + i * t->step, &made[i].small, x, kind, rows, totals[i]);
        EACH_ROW _mm512_storeu_ps(to + m * LM_TILE_ROWS, totals[i][m]);
    }
}

INLINE void multiply_rows(const block_column *c, made_of_panel *made, int first_panel, int first, const int kind, const int panels,
                          int rows, const int codes) {
#define CASE(NUMBER) \
    case NUMBER: if (NUMBER <= rows_of_block(kind)) multiply_block(c, made, first_panel, first, kind, panels, NUMBER, codes); break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) }
#undef CASE
}

/* Panels `first_panel` and on of a column times all rows, shared out evenly, since a block of one row or two takes as long for its codes
 * as one of five. Codes that lie in two lines are always kept, for outliers; those of 4 bits for three blocks, since keeping them takes
 * longer than unpacking them a second time. */
INLINE void multiply_panels(const block_column *c, int first_panel, int num_rows, const int kind, const int panels) {
    _Alignas(64) made_of_panel made[MOST_PANELS];
    EACH_PANEL if (is_super(kind) && !has_two_scales(kind)) made[i].small = unpack_integers(c->at.tiles + (first_panel + i) * c->at.step, kind);
    int num_blocks = (num_rows + rows_of_block(kind) - 1) / rows_of_block(kind);
    const int keeps = lies_in_two_lines(kind) || (FORMATS[kind].code_bits == 4 && num_blocks > 2);
    for (int m = 0, rows; m < num_rows; m += rows) {
        rows = (num_rows - m) / num_blocks--;
        if (!keeps)
            multiply_rows(c, made, first_panel, m, kind, panels, rows, PACKED);
        else if (m == 0)
            multiply_rows(c, made, first_panel, m, kind, panels, rows, KEEPING);
        else
            multiply_rows(c, made, first_panel, m, kind, panels, rows, KEPT);
    }
}

/* How many groups of a panel are multiplied at once: about as many each time, so that each time those of the next one can be prefetched
 * evenly. */
INLINE int groups_at_once(int groups) {
    const int times = (groups + BLOCK_GROUPS - 1) / BLOCK_GROUPS;
    return (groups + times - 1) / times;
}

/* How many groups ahead of their product panels are prefetched: those of two turns, or of one where there are not so many. */
INLINE int groups_ahead(int groups, int at_once) { return 2 * at_once < groups ? 2 * at_once : at_once; }

/* As in tile_product.h; panels take turns, a few groups at a time. */
INLINE void blocked_product(const lm_matrix *w, int panel, int num_panels, const uint8_t *coming, const lm_block *x, int num_rows,
                           const int kind, float *out) {
    const int groups = w->cols / LM_GROUP, of_tile = tile_cols(kind) / LM_GROUP, at_once = groups_at_once(groups);
    const int ahead = groups_ahead(groups, at_once);
    const size_t step = groups / of_tile * tile_bytes(kind), size = at_once / of_tile * tile_bytes(kind);
    const uint8_t *tiles = (const uint8_t *)w->data + panel * step;
    for (int g = 0; g < groups; g += at_once, tiles += size) {
        const int left = groups - g, beyond = ahead - left; /* groups of the next panels */
        const uint8_t *later = tiles + ahead / of_tile * tile_bytes(kind);
        if (beyond >= 0) later = coming == NULL ? NULL : coming + beyond / of_tile * tile_bytes(kind);
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
            .coming = later,
        };
        int i = 0;
        for (; i + 2 <= num_panels; i += 2) multiply_panels(&c, i, num_rows, kind, 2);
        if (i < num_panels) multiply_panels(&c, i, num_rows, kind, 1);
    }
}
