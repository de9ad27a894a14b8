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
    return FORMATS[kind].has_codebook
        ? _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)w->codebook)) : _mm512_setzero_si512();
}

/* Two scales for a group: one for each half of its columns, as Q6_K has them. */
INLINE int has_two_scales(const int kind) { return FORMATS[kind].small_scales == 2; }

/* What sums of codes times inputs start from; where a group has two scales there are two sums, `part` 0 and 1. */
INLINE __m512i start_of(const lm_block *block, const int kind, const int part) {
    const int sum = !has_two_scales(kind) ? block->sum : part == 0 ? block->first : block->sum - block->first;
    return _mm512_set1_epi32(-FORMATS[kind].zero * sum);
}

/* codes[j] holds columns 4j to 4j + 3 of a group's 16 rows, in 8 bits each. */
INLINE void load_codes(const code_line *lines, const int kind, __m512i book, __m512i codes[8]) {
    const int bits = FORMATS[kind].code_bits;
    const __m512i nibble = _mm512_set1_epi8(15), high_mask = _mm512_set1_epi8((char)(((1 << (bits - 4)) - 1) << 4));
    for (int j = 0; j < (bits == 8 ? 8 : 4); j++) {
        const __m512i bytes = _mm512_loadu_si512(&lines[j]);
        _mm_prefetch((const char *)&lines[j] + BYTES_AHEAD, _MM_HINT_T0);
        if (bits == 8) {
            codes[j] = bytes;
            continue;
        }
        codes[j] = _mm512_and_si512(bytes, nibble);
        codes[j + 4] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble);
        if (FORMATS[kind].has_codebook) {
            codes[j] = _mm512_shuffle_epi8(book, codes[j]);
            codes[j + 4] = _mm512_shuffle_epi8(book, codes[j + 4]);
        }
    }
    if (bits == 4 || bits == 8) return;
    for (int i = 4; i < bits; i++) _mm_prefetch((const char *)&lines[i] + BYTES_AHEAD, _MM_HINT_T0);
    for (int j = 0; j < 8; j++) {
        const __m512i bytes = _mm512_loadu_si512(&lines[high_line(kind, j)]);
        const int shift = high_shift(kind, j); /* to where bit 4 of the code lies */
        const __m512i placed = shift < 4 ? _mm512_slli_epi16(bytes, 4 - shift) : _mm512_srli_epi16(bytes, shift - 4);
        codes[j] = _mm512_or_si512(codes[j], _mm512_and_si512(placed, high_mask));
    }
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

/* The total of 16 rows and that of one more group, whose codes' products add up to `sum`. */
INLINE __m512 add_group(__m512 total, __m512i sum, factors f, const lm_block *block, const int kind) {
    const __m512 both = _mm512_mul_ps(f.scale, _mm512_set1_ps(block->scale));
    total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), both, total);
    if (FORMATS[kind].has_minimum) total = _mm512_fmadd_ps(f.other, _mm512_set1_ps(block->total), total);
    return total;
}

INLINE __m512 sums_at(const tile_column *t, const float *out) { return t->begins ? _mm512_setzero_ps() : _mm512_loadu_ps(out); }

/* The tiles of `count` panels, at most 2, from panel i on. What is made of the inputs of all rows before: where their sums start,
 * and themselves four by four, or NULL where those are too many for the registers. */
INLINE void one_or_two_tiles(const tile_column *t, int i, const int count, const __m512i *starts, __m512i (*inputs)[8],
                             const int kind, const int rows) {
    const __m512i book = codebook_of(t->w, kind);
    __m512i codes[2][8];
    factors f[2];
    for (int k = 0; k < count; k++) {
        const uint8_t *tile = t->tiles + (i + k) * t->step;
        load_codes(codes_of(kind, tile, 0), kind, book, codes[k]);
        f[k] = load_factors(tile, kind);
    }
    for (int m = 0; m < rows; m++) {
        const lm_block *block = &t->x[(size_t)m * t->groups];
        __m512i sum[2];
        for (int k = 0; k < count; k++) sum[k] = starts[m];
        for (int j = 0; j < 8; j++) {
            const __m512i input = inputs != NULL ? inputs[m][j] : four(block->q + 4 * j);
            for (int k = 0; k < count; k++) sum[k] = _mm512_dpbusd_epi32(sum[k], codes[k][j], input);
        }
        for (int k = 0; k < count; k++) {
            float *out = t->out + (i + k) * PANEL_STRIDE + m * LM_TILE_ROWS;
            _mm512_storeu_ps(out, add_group(sums_at(t, out), sum[k], f[k], block, kind));
        }
    }
}

INLINE void tile_rows(const tile_column *t, const int kind, const int rows) {
    const int stay = rows <= 2, pairs = rows == 8 && FORMATS[kind].code_bits != 8; /* codes of 8 bits, loaded as they are, gain nothing */
    __m512i starts[ROWS_AT_ONCE], inputs[2][8];
    for (int m = 0; m < rows; m++) {
        const lm_block *block = &t->x[(size_t)m * t->groups];
        starts[m] = start_of(block, kind, 0);
        for (int j = 0; j < 8 && stay; j++) inputs[m][j] = four(block->q + 4 * j);
    }
    int i = 0;
    for (; pairs && i + 2 <= t->count; i += 2) one_or_two_tiles(t, i, 2, starts, NULL, kind, rows);
    for (; i < t->count; i++) one_or_two_tiles(t, i, 1, starts, stay ? inputs : NULL, kind, rows);
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

/* The part of 256 columns and one more group of it, whose codes' products add up to `sum`, or in halves to `sum` and `second`. The product
 * before the float16 scale and the inputs' is a whole number below 2^24, as floats hold them. */
INLINE __m512 add_super_group(__m512 part, __m512i sum, __m512i second, factors f, const lm_block *block, const int kind) {
    __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), f.scale);
    if (has_two_scales(kind)) value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(second), f.other, value);
    return _mm512_fmadd_ps(value, _mm512_set1_ps(block->scale), part);
}

/* The total of 16 rows and that of 256 more columns, of which `part` is all but the scale and the minima. */
INLINE __m512 add_super(
    __m512 total, __m512 part, const uint8_t *tile, const small_integers *small, const lm_block *x, const int kind) {
    total = _mm512_fmadd_ps(halves_at(scales_of(kind, tile)), part, total);
    if (!FORMATS[kind].has_minimum) return total;
    __m512 offset = _mm512_setzero_ps();
    for (int g = 0; g < 8; g++)
        offset = _mm512_fmadd_ps(bytes_at(small->t[g]), _mm512_set1_ps(x[g].total), offset);
    return _mm512_fnmadd_ps(halves_at(minima_of(kind, tile)), offset, total);
}

/* As `tile_rows`, for the K types; the panels take turns group by group here too. */
INLINE void super_rows(const tile_column *t, const int kind, const int rows) {
    small_integers small[PANELS_AT_ONCE];
    __m512 parts[PANELS_AT_ONCE][ROWS_AT_ONCE];
    for (int i = 0; i < t->count; i++) {
        const uint8_t *tile = t->tiles + i * t->step;
        for (size_t at = 0; at < FORMATS[kind].codes_at; at += 64) _mm_prefetch((const char *)tile + at + BYTES_AHEAD, _MM_HINT_T0);
        if (!has_two_scales(kind)) small[i] = unpack_integers(tile);
        for (int m = 0; m < rows; m++) parts[i][m] = _mm512_setzero_ps();
    }
    for (int g = 0; g < 8; g++)
        for (int i = 0; i < t->count; i++) {
            const uint8_t *tile = t->tiles + i * t->step;
            const factors f = super_factors(tile, &small[i], g, kind);
            __m512i codes[8];
            load_codes(codes_of(kind, tile, g), kind, _mm512_setzero_si512(), codes);
            for (int m = 0; m < rows; m++) {
                const lm_block *block = &t->x[(size_t)m * t->groups + g];
                __m512i left = start_of(block, kind, 0);
                __m512i right = has_two_scales(kind) ? start_of(block, kind, 1) : _mm512_setzero_si512();
                for (int j = 0; j < 4; j++) {
                    left = _mm512_dpbusd_epi32(left, codes[j], four(block->q + 4 * j));
                    right = _mm512_dpbusd_epi32(right, codes[j + 4], four(block->q + 4 * j + 16));
                }
                if (!has_two_scales(kind)) left = _mm512_add_epi32(left, right);
                parts[i][m] = add_super_group(parts[i][m], left, right, f, block, kind);
            }
        }
    for (int i = 0; i < t->count; i++)
        for (int m = 0; m < rows; m++) {
            float *out = t->out + i * PANEL_STRIDE + m * LM_TILE_ROWS;
            const lm_block *x = &t->x[(size_t)m * t->groups];
            _mm512_storeu_ps(out, add_super(sums_at(t, out), parts[i][m], t->tiles + i * t->step, &small[i], x, kind));
        }
}

/* --- many rows --------------------------------------------------------------------------------------------------- */

#define ROWS_FOR_BLOCKS 12 /* from so many on it pays to unpack weights first */
#define BLOCK_PANELS 4
#define BLOCK_ROWS 4
#define BLOCK_GROUPS 4 /* of a panel are unpacked at a time: the L1 cache holds them beside the sums of 64 rows */

_Static_assert(GROUPS_OF_SUPER % BLOCK_GROUPS == 0, "a tile of the K types is whole blocks");

typedef struct {
    __m512i codes[8];
    factors f;
} unpacked;

/* One group of `rows` rows of inputs times that of each of `panels` panels: added to each one's out (rows, 16), which `begins`.
 * The sums stay in registers; an input serves all panels, and a code all rows. */
INLINE void block_product(const unpacked *group, const lm_block *x, size_t groups, int begins, const int kind, const int panels,
                          const int rows, float *out) {
    __m512i sum[2][BLOCK_PANELS][BLOCK_ROWS]; /* the second ones where a group has two scales */
    for (int part = 0; part < (has_two_scales(kind) ? 2 : 1); part++)
        for (int m = 0; m < rows; m++)
            for (int i = 0; i < panels; i++) sum[part][i][m] = start_of(&x[m * groups], kind, part);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++)
        for (int m = 0; m < rows; m++) {
            const int part = has_two_scales(kind) ? j / 4 : 0;
            const __m512i input = four(x[m * groups].q + 4 * j);
            for (int i = 0; i < panels; i++) sum[part][i][m] = _mm512_dpbusd_epi32(sum[part][i][m], group[i].codes[j], input);
        }
    for (int i = 0; i < panels; i++)
        for (int m = 0; m < rows; m++) {
            float *to = out + i * PANEL_STRIDE + m * LM_TILE_ROWS;
            __m512 total = begins ? _mm512_setzero_ps() : _mm512_loadu_ps(to);
            if (is_super(kind))
                total = add_super_group(total, sum[0][i][m], sum[1][i][m], group[i].f, &x[m * groups], kind);
            else
                total = add_group(total, sum[0][i][m], group[i].f, &x[m * groups], kind);
            _mm512_storeu_ps(to, total);
        }
}

/* As above, with all rows. */
INLINE void block_rows(const unpacked *group, const lm_block *x, size_t groups, int begins, const int kind, const int panels,
                       int num_rows, float *out) {
    int m = 0;
#define ROWS(NUMBER)                            \
    for (; m + NUMBER <= num_rows; m += NUMBER) \
    block_product(group, x + m * groups, groups, begins, kind, panels, NUMBER, out + m * LM_TILE_ROWS)
    if (!has_two_scales(kind)) ROWS(BLOCK_ROWS); /* two sums take twice as many registers */
    ROWS(2);
    ROWS(1);
#undef ROWS
}

/* Some panels that are multiplied in blocks. */
typedef struct {
    const lm_matrix *w;
    const uint8_t *tiles; /* of the first panel */
    size_t step;          /* bytes from one panel to the next */
    const lm_block *x;    /* (num_rows, groups) */
    int num_rows, groups;
} block_panels;

/* Group `g` of each of `panels` panels; the K types' integers are unpacked with the first one of a tile. */
INLINE void unpack_groups(const block_panels *s, int g, const int kind, const int panels, unpacked *to, small_integers *small) {
    const int of_tile = tile_cols(kind) / LM_GROUP;
    for (int i = 0; i < panels; i++) {
        const uint8_t *tile = s->tiles + i * s->step + g / of_tile * tile_bytes(kind);
        load_codes(codes_of(kind, tile, g % of_tile), kind, codebook_of(s->w, kind), to[i].codes);
        if (is_super(kind)) {
            if (g % of_tile == 0 && !has_two_scales(kind)) small[i] = unpack_integers(tile);
            to[i].f = super_factors(tile, &small[i], g % of_tile, kind);
        } else {
            to[i].f = load_factors(tile, kind);
        }
    }
}

/* Tile `t` of each panel, whose products but for the scale and the minima are in `parts`, added to out. */
INLINE void add_parts(const block_panels *s, int t, const int kind, const int panels, const small_integers *small,
                      const float *parts, float *out) {
    for (int i = 0; i < panels; i++)
        for (int m = 0; m < s->num_rows; m++) {
            const size_t at = i * PANEL_STRIDE + m * LM_TILE_ROWS;
            const __m512 total = t == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(out + at);
            const lm_block *x = s->x + (size_t)m * s->groups + t * GROUPS_OF_SUPER;
            const uint8_t *tile = s->tiles + i * s->step + t * tile_bytes(kind);
            _mm512_storeu_ps(out + at, add_super(total, _mm512_loadu_ps(parts + at), tile, &small[i], x, kind));
        }
}

/* `panels` panels times all rows, a few groups of each at a time. */
INLINE void blocks(const block_panels *s, const int kind, const int panels, float *out) {
    unpacked ready[BLOCK_GROUPS][BLOCK_PANELS];
    small_integers small[BLOCK_PANELS];
    float parts[BLOCK_PANELS * PANEL_STRIDE]; /* of the K types */
    const int of_tile = tile_cols(kind) / LM_GROUP;
    for (int first = 0; first < s->groups; first += BLOCK_GROUPS) {
        const int end = first + BLOCK_GROUPS < s->groups ? first + BLOCK_GROUPS : s->groups;
        for (int g = first; g < end; g++) unpack_groups(s, g, kind, panels, ready[g - first], small);
        for (int g = first; g < end; g++) {
            const int begins = is_super(kind) ? g % of_tile == 0 : g == 0;
            block_rows(ready[g - first], s->x + g, s->groups, begins, kind, panels, s->num_rows, is_super(kind) ? parts : out);
        }
        if (is_super(kind) && end % of_tile == 0) add_parts(s, end / of_tile - 1, kind, panels, small, parts, out);
    }
}

/* As in tile_product.h. */
INLINE void blocked_product(const lm_matrix *w, int panel, int num_panels, const lm_block *x, int num_rows, const int kind,
                            float *out) {
    const size_t step = w->cols / tile_cols(kind) * tile_bytes(kind);
    block_panels s = {w, (const uint8_t *)w->data + panel * step, step, x, num_rows, w->cols / LM_GROUP};
    int i = 0;
    for (; i + BLOCK_PANELS <= num_panels; i += BLOCK_PANELS, s.tiles += BLOCK_PANELS * step)
        blocks(&s, kind, BLOCK_PANELS, out + i * PANEL_STRIDE);
    for (; i < num_panels; i++, s.tiles += step) blocks(&s, kind, 1, out + i * PANEL_STRIDE);
}

#include "tile_product.h"
