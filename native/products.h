/* The products of one stage: a thread takes some panels of a matrix at a time, and a set's parts multiply them. */
#include "adapters.h"

#define LEAST_PANELS 2 /* of a piece: a group of 32 gated values */

static inline int panels_of(const lm_matrix *w) { return (w->rows + LM_TILE_ROWS - 1) / LM_TILE_ROWS; }

/* Some panels of one of a stage's matrices; `count` is 0 when no piece is left. */
typedef struct {
    int matrix, panel, count;
} piece;

/* Most panels of some matrices are handed out first, eight at a time, then four at a time, then two, as many pieces of each size for every
 * thread, so that all threads end at about the same time. */
static piece piece_of(const lm_matrix *const *w, int num_matrices, lm_team team, int number) {
    for (int size = PANELS_AT_ONCE; size >= LEAST_PANELS; size /= 2)
        for (int i = 0; i < num_matrices; i++) {
            const int all = panels_of(w[i]), large = all * 3 / 4 / (PANELS_AT_ONCE * team.count) * team.count * PANELS_AT_ONCE;
            const int middle = (all - large) / (PANELS_AT_ONCE / 2 * team.count) * team.count * (PANELS_AT_ONCE / 2);
            const int first = size == PANELS_AT_ONCE ? 0 : size == LEAST_PANELS ? large + middle : large;
            const int count = size == PANELS_AT_ONCE ? large : size == LEAST_PANELS ? all - large - middle : middle;
            const int pieces = (count + size - 1) / size;
            if (number < pieces) return (piece){i, first + number * size, min_int(size, count - number * size)};
            number -= pieces;
        }
    return (piece){0, 0, 0};
}

/* Prefetch where a piece begins; products prefetch what follows on the way. */
static inline void prefetch_beginning(const lm_matrix *w, piece at) {
    if (is_float(w)) return; /* `four_rows` prefetches itself */
    const size_t size = (size_t)tiles_of(w) * tile_bytes(w->kind);
    for (int i = 0; i < at.count; i++)
        for (size_t place = 0; place < size && place < BYTES_AHEAD; place += 64)
            __builtin_prefetch(panel_at(w, at.panel + i) + place);
}

/* What is multiplied after a piece of w, for a product that prefetches it: NULL if there is none, or if it is prefetched here. */
static inline const uint8_t *announced(const lm_matrix *w, const lm_matrix *next, piece coming) {
    if (coming.count == 0) return NULL;
    if (TILES.prefetches_coming && !is_float(w) && w->kind == next->kind && w->cols == next->cols) return panel_at(next, coming.panel);
    prefetch_beginning(next, coming);
    return NULL;
}

/* out (num_rows, 16) = the results of each token's two rows, added. */
static inline void add_residuals(float *out, int num_rows) {
    for (int k = 0; k < num_rows; k++) {
        const float *codes = out + 2 * k * LM_TILE_ROWS;
        for (int i = 0; i < LM_TILE_ROWS; i += LANES) {
            const lanes sum = load_floats(codes + i) + load_floats(codes + LM_TILE_ROWS + i);
            memcpy(out + k * LM_TILE_ROWS + i, &sum, sizeof sum);
        }
    }
}

/* How many rows of tokens a product takes at once: of floats whole panels. */
static inline int rows_at_once(int of_floats, inputs in) {
    const int rows = ROWS_IN_CACHE / in.parts;
    return of_floats ? rows / TOKENS * TOKENS : rows;
}

/* Results of a piece for `num_rows` rows of tokens from `m` on, at most `rows_at_once`. */
static inline void panels_product(const lm_matrix *w, piece at, const uint8_t *coming, inputs in, int m, int num_rows, float *out) {
    if (is_float(w))
        float_product(w, at.panel, at.count, in, m, num_rows, out);
    else
        TILES.product(w, at.panel, at.count, coming, in.blocks + (size_t)m * in.parts * in.groups, num_rows * in.parts, out);
    for (int i = 0; i < at.count && in.parts == 2 && !is_float(w); i++) add_residuals(out + i * PANEL_STRIDE, num_rows);
}

/* Rows of tokens `m` to `m + rows` of one panel, written to y (num_rows), or added to it. */
static inline void write_panel(const float *out, int panel, const lm_matrix *w, int m, int rows, float *y, int stride, int add) {
    const int width = min_int(LM_TILE_ROWS, w->rows - panel * LM_TILE_ROWS);
    for (int k = 0; k < rows; k++) {
        float *to = y + (size_t)(m + k) * stride + panel * LM_TILE_ROWS;
        for (int r = 0; r < width; r++) to[r] = out[k * LM_TILE_ROWS + r] + (add ? to[r] : 0);
    }
}

/* A piece's results out (at.count, PANEL_STRIDE) for `num_rows` rows of tokens from `m` on, with what their adapters add to product i;
 * s may be NULL. */
static void correct_panels(lm_team team, const adapted *s, int i, const lm_matrix *w, piece at, int m, int num_rows, float *out) {
    if (s == NULL) return;
    lm_await(team, s->lowered);
    for (int k = 0; k < at.count; k++) {
        const int panel = at.panel + k, width = min_int(LM_TILE_ROWS, w->rows - panel * LM_TILE_ROWS);
        for (int row = 0; row < num_rows; row++)
            correct(s, m + row, i, panel, width, out + k * PANEL_STRIDE + row * LM_TILE_ROWS);
    }
}

/* Add a matrix's bias, if it has one, to a piece's results out (at.count, PANEL_STRIDE) for `num_rows` rows of tokens. */
static inline void add_bias(const lm_matrix *w, piece at, int num_rows, float *out) {
    if (w->bias == NULL) return;
    for (int k = 0; k < at.count; k++) {
        const int first = (at.panel + k) * LM_TILE_ROWS, width = min_int(LM_TILE_ROWS, w->rows - first);
        for (int row = 0; row < num_rows; row++)
            for (int r = 0; r < width; r++) out[k * PANEL_STRIDE + row * LM_TILE_ROWS + r] += w->bias[first + r];
    }
}

/* Several matrices of the same inputs as one: y[i] (num_rows, strides[i]) is written, or added to; `s` is NULL where no adapter corrects
 * them. */
static void products(lm_team team, atomic_int *next, const lm_matrix *const *w, int count, inputs in, int num_rows,
                     float *const *y, const int *strides, int add, const adapted *s) {
    _Alignas(64) float out[PANELS_AT_ONCE * PANEL_STRIDE];
    piece at = piece_of(w, count, team, lm_next(next));
    for (piece coming; at.count > 0; at = coming) {
        coming = piece_of(w, count, team, lm_next(next));
        const int i = at.matrix, at_once = rows_at_once(is_float(w[i]), in);
        const uint8_t *next_tiles = announced(w[i], w[coming.matrix], coming);
        for (int m = 0; m < num_rows; m += at_once) {
            const int rows = min_int(at_once, num_rows - m);
            panels_product(w[i], at, next_tiles, in, m, rows, out);
            correct_panels(team, s, i, w[i], at, m, rows, out);
            add_bias(w[i], at, rows, out);
            for (int k = 0; k < at.count; k++)
                write_panel(out + k * PANEL_STRIDE, at.panel + k, w[i], m, rows, y[i], strides[i], add);
        }
    }
    if (s != NULL) lm_await(team, s->lowered); /* a thread that found no piece too */
}

/* silu(gate) * up of a group of 32, as inputs of the next product. */
static void put_gated(const float *gate, const float *up, int row, inputs gated, size_t to, int g) {
    _Alignas(64) float group[LM_GROUP];
    for (int i = 0; i < LM_GROUP; i += LANES) {
        const int at = i / LM_TILE_ROWS * PANEL_STRIDE + row * LM_TILE_ROWS + i % LM_TILE_ROWS;
        const lanes gated_here = silu(load_floats(gate + at)) * load_floats(up + at);
        memcpy(group + i, &gated_here, sizeof gated_here);
    }
    put_group(group, gated, to, g);
}

/* Both products of a gated layer, and what is made of them, in one stage: two panels of each make a group of 32. */
static void gated_products(lm_team team, atomic_int *next, const lm_layer *layer, inputs in, int num_rows, inputs gated,
                           const adapted *s) {
    _Alignas(64) float gate[PANELS_AT_ONCE * PANEL_STRIDE], up[PANELS_AT_ONCE * PANEL_STRIDE];
    const lm_matrix *const w[] = {&layer->gate};
    const int at_once = rows_at_once(is_float(&layer->gate) || is_float(&layer->up), in);
    piece at = piece_of(w, 1, team, lm_next(next));
    for (piece coming; at.count > 0; at = coming) {
        coming = piece_of(w, 1, team, lm_next(next));
        const uint8_t *of_up = announced(&layer->gate, &layer->up, at);
        const uint8_t *next_tiles = announced(&layer->up, &layer->gate, coming);
        for (int m = 0; m < num_rows; m += at_once) {
            const int rows = min_int(at_once, num_rows - m);
            panels_product(&layer->gate, at, of_up, in, m, rows, gate);
            panels_product(&layer->up, at, next_tiles, in, m, rows, up);
            correct_panels(team, s, 0, &layer->gate, at, m, rows, gate);
            correct_panels(team, s, 1, &layer->up, at, m, rows, up);
            add_bias(&layer->gate, at, rows, gate);
            add_bias(&layer->up, at, rows, up);
            if (at.count % 2 != 0) { /* the last group's other half */
                memset(gate + at.count * PANEL_STRIDE, 0, rows * LM_TILE_ROWS * sizeof(float));
                memset(up + at.count * PANEL_STRIDE, 0, rows * LM_TILE_ROWS * sizeof(float));
            }
            for (int k = 0; k < rows; k++)
                for (int i = 0; i < at.count; i += 2)
                    put_gated(gate + i * PANEL_STRIDE, up + i * PANEL_STRIDE, k, gated, m + k, (at.panel + i) / 2);
        }
    }
    if (s != NULL) lm_await(team, s->lowered);
}
