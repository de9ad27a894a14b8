/* Products of many rows of inputs with AVX-512 VNNI: weights are unpacked first, a few groups at a time, with the multiples of their scales.
 */
#include "few_rows_avx512_vnni.h"

#define BLOCK_PANELS 2
#define BLOCK_ROWS 4

/* Factors of 16 rows, to be multiplied with many scales of inputs: `times`, without a multiplication for each.
 * Of a scale, (1 + eighths / 8) 2^n, the product is a multiple of the factor with n added to its exponent, and since both have few
 * bits nothing is rounded in either way. `of` are these multiples' bits less those of 1 + eighths / 8, so that the scale's bits as they
 * are can be added. The last one is for a scale that is NaN. */
typedef struct {
    __m512i of[LM_NO_EIGHTHS + 1];
} multiples;

INLINE void put_multiples(__m512 factor, multiples *to) {
    const __m512 eighth = _mm512_mul_ps(factor, _mm512_set1_ps(0.125f));
    for (int i = 0; i < LM_NO_EIGHTHS; i++, factor = _mm512_add_ps(factor, eighth))
        to->of[i] = _mm512_sub_epi32(_mm512_castps_si512(factor), _mm512_castps_si512(_mm512_set1_ps(1 + i / 8.0f)));
    to->of[LM_NO_EIGHTHS] = _mm512_setzero_si512();
}

INLINE __m512 multiple(const multiples *m, const lm_block *block) {
    const __m512i scale = _mm512_castps_si512(_mm512_set1_ps(block->scale));
    return _mm512_castsi512_ps(_mm512_add_epi32(m->of[block->eighths], scale));
}

/* A group of a panel. */
typedef struct {
    __m512i codes[8];
    multiples scale, second; /* the second one where a group has two */
    __m512 minimum;          /* in the K types its integer */
} unpacked;

/* Some panels that are multiplied in blocks. */
typedef struct {
    const lm_matrix *w;
    const uint8_t *tiles; /* of the first panel */
    size_t step;          /* bytes from one panel to the next */
    const lm_block *x;    /* (num_rows, groups) */
    int num_rows, groups, at_once; /* the last one: groups that are unpacked together */
    float *out;                                 /* (panels, PANEL_STRIDE), of each (num_rows, 16) */
    int first, end;                             /* the groups that are unpacked */
    const uint8_t *coming;                      /* of the first panel: the ones that are unpacked next, or NULL */
    unpacked ready[BLOCK_GROUPS][BLOCK_PANELS]; /* those groups */
    factors super[BLOCK_PANELS];                /* of the K types' tile that they make */
    __m512 lost[BLOCK_PANELS];                  /* NaN in rows with a scale that is infinite or NaN, else 0 */
} block_panels;

/* Factors whose exponents can be added to: those that are 0, infinite or NaN become 1, and their rows' codes what stands for 0, so that
 * nothing is added. Masked additions instead would take as long as the multiplications that are saved. */
INLINE __m512 normal_factor(__m512 factor, __m512i *codes, const int count, const int kind) {
    enum { NOT_NORMAL = 0xbf }; /* every class of `vfpclassps` but negative ones */
    const __mmask16 mask = _mm512_fpclass_ps_mask(factor, NOT_NORMAL);
    if (mask == 0) return factor;
    for (int j = 0; j < count; j++) codes[j] = _mm512_mask_mov_epi32(codes[j], mask, _mm512_set1_epi8((char)FORMATS[kind].zero));
    return _mm512_mask_mov_ps(factor, mask, _mm512_set1_ps(1));
}

/* Group `g` of panel `i`, which is group `k` of a tile. */
INLINE void unpack_group(block_panels *s, int i, int g, int k, const uint8_t *tile, const small_integers *small, const int kind) {
    unpacked *to = &s->ready[g - s->first][i];
    __m512i codes[8];
    load_codes(codes_of(kind, tile, k), kind, codebook_of(s->w, kind), codes);
    const factors f = is_super(kind) ? super_factors(tile, small, k, kind) : load_factors(tile, kind);
    s->lost[i] = _mm512_fmadd_ps(f.scale, _mm512_setzero_ps(), s->lost[i]);
    put_multiples(normal_factor(f.scale, codes, has_two_scales(kind) ? 4 : 8, kind), &to->scale);
    if (has_two_scales(kind)) put_multiples(normal_factor(f.other, codes + 4, 4, kind), &to->second);
    if (FORMATS[kind].has_minimum) to->minimum = is_super(kind) ? bytes_at(small->t[k]) : f.other;
    memcpy(to->codes, codes, sizeof codes);
}

/* The next groups of each of `panels` panels. */
INLINE void unpack_groups(block_panels *s, const int kind, const int panels) {
    const int of_tile = tile_cols(kind) / LM_GROUP;
    s->end = s->first + s->at_once < s->groups ? s->first + s->at_once : s->groups;
    for (int i = 0; i < panels; i++) {
        const uint8_t *tile = s->tiles + i * s->step + s->first / of_tile * tile_bytes(kind);
        small_integers small;
        if (is_super(kind)) s->super[i] = load_factors(tile, kind);
        if (is_super(kind) && !has_two_scales(kind)) small = unpack_integers(tile);
        s->lost[i] = _mm512_setzero_ps();
        for (int g = s->first; g < s->end; g++)
            unpack_group(s, i, g, g % of_tile, tile + (g - s->first) / of_tile * tile_bytes(kind), &small, kind);
    }
}

/* What a part's sum of codes times inputs starts from: with what the upper bits of the outlier's codes add, if it is in that part. */
INLINE __m512i begun(const __m512i codes[8], const lm_block *block, const int kind, const int part) {
    const __m512i start = _mm512_set1_epi32(start_of(block, kind, part));
    if (has_two_scales(kind) && block->outlier / 4 != part) return start;
    return _mm512_add_epi32(start, _mm512_slli_epi32(upper_sum(codes[block->outlier], block), 8));
}

/* One group of `rows` rows of inputs times that of each of `panels` panels, added to `totals`: an input serves all panels, and a code
 * all rows. */
INLINE void block_group(const unpacked *group, const lm_block *x, size_t groups, const int kind, const int panels, const int rows,
                        __m512 totals[BLOCK_PANELS][BLOCK_ROWS]) {
    __m512i sum[2][BLOCK_PANELS][BLOCK_ROWS]; /* the second ones where a group has two scales */
    for (int part = 0; part < (has_two_scales(kind) ? 2 : 1); part++)
        for (int m = 0; m < rows; m++)
            for (int i = 0; i < panels; i++)
                sum[part][i][m] = begun(group[i].codes, &x[m * groups], kind, part);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++)
        for (int m = 0; m < rows; m++) {
            const int part = has_two_scales(kind) ? j / 4 : 0;
            const __m512i input = four(x[m * groups].q + 4 * j);
            for (int i = 0; i < panels; i++) sum[part][i][m] = _mm512_dpbusd_epi32(sum[part][i][m], group[i].codes[j], input);
        }
    for (int i = 0; i < panels; i++)
        for (int m = 0; m < rows; m++) {
            const lm_block *block = &x[m * groups];
            const __m512 scale = multiple(&group[i].scale, block);
            const __m512 second = has_two_scales(kind) ? multiple(&group[i].second, block) : _mm512_setzero_ps();
            if (is_super(kind))
                totals[i][m] = add_super_group(totals[i][m], sum[0][i][m], sum[1][i][m], scale, second, kind);
            else
                totals[i][m] = add_group(totals[i][m], sum[0][i][m], scale, group[i].minimum, block, kind);
        }
}

/* Prefetch what is unpacked next, all panels in turn: with `rows` rows from `m` on their share of it, so that memory is never idle while
 * rows are multiplied (docs/decisions/0022). Into the L2 cache, since what is unpacked now fills L1. */
INLINE void prefetch_with_rows(const block_panels *s, int m, const int kind, const int panels, const int rows) {
    const size_t share = tile_bytes(kind) / (tile_cols(kind) / LM_GROUP);
    const int lines = panels * (int)(((s->end - s->first) * share + 63) / 64), end = lines * (m + rows) / s->num_rows;
    if (s->coming == NULL) return;
    for (int line = lines * m / s->num_rows; line < end; line++)
        _mm_prefetch((const char *)s->coming + line % panels * s->step + line / panels * 64, _MM_HINT_T1);
}

/* The groups that are unpacked times `rows` rows of inputs, from `m` on. Totals stay in registers from group to group: a store takes the
 * time of more than one product (docs/decisions/0022). */
INLINE void block_product(const block_panels *s, int m, const int kind, const int panels, const int rows) {
    const lm_block *x = s->x + (size_t)m * s->groups + s->first;
    __m512 totals[BLOCK_PANELS][BLOCK_ROWS];
#define BEFORE(I, K) (s->first == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(TO(I, K)))
#define TO(I, K) (s->out + (I) * PANEL_STRIDE + (m + (K)) * LM_TILE_ROWS)
#define EACH_TOTAL                                                       \
    _Pragma("GCC unroll 4") for (int i = 0; i < panels; i++)             \
        _Pragma("GCC unroll 4") for (int k = 0; k < rows; k++)
    EACH_TOTAL totals[i][k] = is_super(kind) ? _mm512_setzero_ps() : BEFORE(i, k);
    prefetch_with_rows(s, m, kind, panels, rows);
    for (int g = 0; g < s->end - s->first; g++) block_group(s->ready[g], x + g, s->groups, kind, panels, rows, totals);
    EACH_TOTAL {
        __m512 total = totals[i][k];
        if (is_super(kind)) {
            __m512 offset = _mm512_setzero_ps();
            for (int g = 0; g < GROUPS_OF_SUPER && FORMATS[kind].has_minimum; g++)
                offset = _mm512_fmadd_ps(s->ready[g][i].minimum, _mm512_set1_ps(x[(size_t)k * s->groups + g].total), offset);
            total = add_super(BEFORE(i, k), total, offset, s->super[i], kind);
        }
        _mm512_storeu_ps(TO(i, k), _mm512_add_ps(total, s->lost[i]));
    }
#undef TO
#undef BEFORE
#undef EACH_TOTAL
}

/* `panels` panels times all rows, a few groups of each at a time; as many panels from `coming` on are multiplied next. */
INLINE void blocks(block_panels *s, const uint8_t *coming, const int kind, const int panels) {
    for (s->first = 0; s->first < s->groups; s->first = s->end) {
        unpack_groups(s, kind, panels);
        s->coming = s->end == s->groups ? coming : s->tiles + s->end / (tile_cols(kind) / LM_GROUP) * tile_bytes(kind);
        int m = 0;
#define ROWS(NUMBER) \
    for (; m + NUMBER <= s->num_rows; m += NUMBER) block_product(s, m, kind, panels, NUMBER)
        ROWS(BLOCK_ROWS);
        ROWS(2);
        ROWS(1);
#undef ROWS
    }
}

/* As in tile_product.h. */
INLINE void unpacked_product(const lm_matrix *w, int panel, int num_panels, const uint8_t *coming, const lm_block *x, int num_rows,
                             const int kind, float *out) {
    const size_t step = w->cols / tile_cols(kind) * tile_bytes(kind);
    block_panels s; /* not written as a whole: what is unpacked is large */
    s.w = w, s.tiles = (const uint8_t *)w->data + panel * step, s.step = step;
    s.x = x, s.num_rows = num_rows, s.groups = w->cols / LM_GROUP, s.at_once = groups_at_once(s.groups), s.out = out;
    for (int i = 0, count; i < num_panels; i += count, s.tiles += count * step, s.out += count * PANEL_STRIDE) {
        count = num_panels - i < BLOCK_PANELS ? 1 : BLOCK_PANELS;
        const uint8_t *next = i + count == num_panels ? coming : s.tiles + count * step;
        if (count == BLOCK_PANELS)
            blocks(&s, next, kind, BLOCK_PANELS);
        else
            blocks(&s, next, kind, 1);
    }
}
