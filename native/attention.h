/* Attention over the cache: what queries see in one KV chunk, and how the results of several chunks are merged. */
#include "cache.h"

/* RoPE: `angles` are head_dim / 2 cosines, then as many sines. */
static inline void rotate(float *head, const float *angles, int half) {
    const float *cosine = angles, *sine = angles + half;
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cosine[i] - b * sine[i];
        head[i + half] = b * cosine[i] + a * sine[i];
    }
}

/* Round a key or value to 8 bits; returns its scale. NaN and infinities make that NaN. Each step is one operation that
 * IEEE rounds, so that `to_codes` in attention/paged.py gives the same codes. */
static inline float to_codes(const float *values, int head_dim, int8_t *codes) {
    float poison;
    const float scale = largest_size(values, head_dim, &poison) / 127 + poison;
    for (int i = 0; i < head_dim; i++) codes[i] = (int8_t)nearest_code(scale > 0 ? values[i] / scale : 0);
    return scale;
}

/* Put one head's key or value into its slot. */
static inline void store(int dtype, void *to, float *scales, size_t slot, const float *values, int head_dim) {
    const size_t place = slot * head_dim;
    if (dtype == LM_FLOAT32) {
        memcpy((float *)to + place, values, (size_t)head_dim * sizeof(float));
    } else if (dtype == LM_INT8) {
        scales[slot] = to_codes(values, head_dim, (int8_t *)to + place);
    } else {
        for (int i = 0; i < head_dim; i++) ((uint16_t *)to)[place + i] = to_bf16(values[i]);
    }
}

/* A key's or value's numbers, before the scale that those of LM_INT8 have. */
static inline float kept_at(int dtype, const void *from, size_t place) {
    return dtype == LM_INT8 ? ((const int8_t *)from)[place] : number_at(dtype, from, place);
}

/* A softmax over some slots: the largest score, the sum of e^(score - largest), and the values weighted so. */
typedef struct {
    float largest, sum;
    paired mixture[]; /* (head_dim) */
} partial;

static inline partial *partial_at(float *partials, size_t index, int head_dim) {
    return (partial *)(partials + index * (size_t)(head_dim + 2));
}

#define HEADS_AT_ONCE 4 /* that share each key and value that is loaded */

/* The sums over each of `count` times four, in order. */
INLINE void put_sums(const lanes *values, const int count, quad *out) {
#if LANES == 16
    if (count == 4) {
        const lanes sums = sums_of_16(values);
        memcpy(out, &sums, sizeof sums);
        return;
    }
#endif
    for (int s = 0; s < count; s++) out[s] = sums_of(values + s * HEADS_AT_ONCE);
}

/* Prefetch a slot's value, which is read after the chunk's last key: into the L2 cache, since L1 is too small for both. */
INLINE void prefetch_value(const int dtype, const kv_chunk *at, int slot) {
    const size_t size = dtype == LM_FLOAT32 ? 4 : dtype == LM_BFLOAT16 ? 2 : 1;
    const char *value = (const char *)at->v + slot_at(at, slot) * at->head_dim * size;
    for (size_t byte = 0; byte < at->head_dim * size; byte += 64) __builtin_prefetch(value + byte, 0, 2);
}

#define SLOTS_AT_ONCE (LANES == 16 ? 4 : 1) /* are scored, as far as there are registers for their sums */

/* scores[s][h] = q[h] (head_dim) times the key of slot s, for `count` slots from `slot` on, each `distance` after the last one;
 * `count` and `heads` are constants, so that the sums stay in registers. */
INLINE void score_some(const int dtype, const int heads, const int count, const kv_chunk *at, int slot, int distance,
                       const paired *q, quad *scores) {
    const int head_dim = at->head_dim;
    size_t slots[SLOTS_AT_ONCE], places[SLOTS_AT_ONCE];
    for (int s = 0; s < count; s++) {
        slots[s] = slot_at(at, slot + s * distance);
        places[s] = slots[s] * head_dim;
    }
    lanes sums[SLOTS_AT_ONCE * HEADS_AT_ONCE] = {{0}};
    int i = 0;
    for (; i + PAIR <= head_dim; i += PAIR) {
        lanes keys[SLOTS_AT_ONCE][2];
        for (int s = 0; s < count; s++) load_pair(dtype, at->k, places[s] + i, keys[s]);
        for (int j = 0; j < 2; j++)
            for (int h = 0; h < heads; h++) {
                const lanes query = load_paired(q + (size_t)h * head_dim + i + j * LANES);
                for (int s = 0; s < count; s++) sums[s * HEADS_AT_ONCE + h] += keys[s][j] * query;
            }
    }
    for (; i + LANES <= head_dim; i += LANES)
        for (int s = 0; s < count; s++) {
            const lanes key = load_lanes(dtype, at->k, places[s] + i);
            for (int h = 0; h < heads; h++) sums[s * HEADS_AT_ONCE + h] += key * load_paired(q + (size_t)h * head_dim + i);
        }
    for (; i < head_dim; i++)
        for (int s = 0; s < count; s++) {
            const float key = kept_at(dtype, at->k, places[s] + i);
            for (int h = 0; h < heads; h++) sums[s * HEADS_AT_ONCE + h][0] += key * q[(size_t)h * head_dim + i].value;
        }
    quad found[SLOTS_AT_ONCE];
    put_sums(sums, count, found);
    for (int s = 0; s < count; s++)
        scores[slot + s * distance] = dtype == LM_INT8 ? found[s] * at->k_scales[slots[s]] : found[s];
}

/* Four slots far from each other at a time, since a core reads several pages side by side faster (docs/decisions/0009). */
INLINE void score_slots(const int dtype, const int heads, const kv_chunk *at, const paired *q, quad *scores) {
    const int quarter = at->slots / 4;
    for (int slot = 0; slot < quarter; slot++) {
        for (int s = 0; s < 4; s++) prefetch_value(dtype, at, slot + s * quarter);
        for (int s = 0; s < 4; s += SLOTS_AT_ONCE)
            score_some(dtype, heads, SLOTS_AT_ONCE, at, slot + s * quarter, quarter, q, scores);
    }
    for (int slot = 4 * quarter; slot < at->slots; slot++) score_some(dtype, heads, 1, at, slot, 0, q, scores);
}

/* The softmax of four heads' scores, which become its weights. */
static inline void weigh(quad *scores, int slots, quad *largest, quad *sum) {
    wide most_of_four = (wide){0} - INFINITY;
    for (int s = 0; s + 4 <= slots; s += 4) {
        wide here;
        memcpy(&here, scores + s, sizeof here);
        most_of_four = select_wide(here > most_of_four, here, most_of_four);
    }
    quad found[4], most = (quad){0} - INFINITY;
    memcpy(found, &most_of_four, sizeof found);
    for (int i = 0; i < 4; i++) most = select_quad(found[i] > most, found[i], most);
    for (int s = slots / 4 * 4; s < slots; s++) most = select_quad(scores[s] > most, scores[s], most);
    const quad size = (quad)((quad_ints)most & 0x7fffffff); /* beside huge scores 200 alone is nothing */
    for (int s = slots; s % 4; s++) scores[s] = most - 200 - size * 1e-3f; /* e^-87 is nothing beside the largest's 1 */
    const quad repeated[4] = {most, most, most, most};
    wide largest_wide, sums = {0};
    memcpy(&largest_wide, repeated, sizeof repeated);
    for (int s = 0; s < slots; s += 4) {
        wide here;
        memcpy(&here, scores + s, sizeof here);
        here = exp_below_zero(here - largest_wide);
        memcpy(scores + s, &here, sizeof here);
        sums += here;
    }
    quad parts[4];
    memcpy(parts, &sums, sizeof parts);
    *largest = most;
    *sum = (parts[0] + parts[2]) + (parts[1] + parts[3]);
}

#define PAIRS_AT_ONCE (LANES == 16 ? 2 : 1) /* of a value: AVX-512 has twice as many registers */

/* out[h] (head_dim) from element `i` on, `count` pairs of it: the sum over slots of value times weights[s][h]. */
INLINE void mix_pairs(const int dtype, const int heads, const int count, const kv_chunk *at, int i, const quad *weights,
                      partial *const *out) {
    lanes sums[HEADS_AT_ONCE][2 * PAIRS_AT_ONCE] = {{{0}}};
    for (int s = 0; s < at->slots;) {
        size_t place = slot_at(at, s) * at->head_dim + i;
        for (const int end = end_of_block(at, s); s < end; s++, place += at->head_dim)
            for (int j = 0; j < 2 * count; j += 2) {
                lanes value[2];
                load_pair(dtype, at->v, place + j * LANES, value);
                for (int h = 0; h < heads; h++) {
                    sums[h][j] += value[0] * weights[s][h];
                    sums[h][j + 1] += value[1] * weights[s][h];
                }
            }
    }
    for (int h = 0; h < heads; h++) memcpy(out[h]->mixture + i, sums[h], count * PAIR * sizeof(float));
}

/* The same of one register of it, behind all pairs. */
INLINE void mix_lanes(const int dtype, const int heads, const kv_chunk *at, int i, const quad *weights, partial *const *out) {
    lanes sums[HEADS_AT_ONCE] = {{0}};
    for (int s = 0; s < at->slots; s++) {
        const lanes value = load_lanes(dtype, at->v, slot_at(at, s) * at->head_dim + i);
        for (int h = 0; h < heads; h++) sums[h] += value * weights[s][h];
    }
    for (int h = 0; h < heads; h++) memcpy(out[h]->mixture + i, &sums[h], sizeof(lanes));
}

INLINE void mix_slots(const int dtype, const int heads, const kv_chunk *at, const quad *weights, partial *const *out) {
    int i = 0;
    for (; i + PAIRS_AT_ONCE * PAIR <= at->head_dim; i += PAIRS_AT_ONCE * PAIR)
        mix_pairs(dtype, heads, PAIRS_AT_ONCE, at, i, weights, out);
    for (; i + PAIR <= at->head_dim; i += PAIR) mix_pairs(dtype, heads, 1, at, i, weights, out);
    for (; i + LANES <= at->head_dim; i += LANES) mix_lanes(dtype, heads, at, i, weights, out);
    for (; i < at->head_dim; i++)
        for (int h = 0; h < heads; h++) {
            float sum = 0;
            for (int s = 0; s < at->slots; s++)
                sum += kept_at(dtype, at->v, slot_at(at, s) * at->head_dim + i) * weights[s][h];
            out[h]->mixture[i].value = sum;
        }
}

/* What query heads with these scores see in a chunk. */
INLINE void mix_scores(const int dtype, const int heads, const kv_chunk *at, quad *scores, partial *const *out) {
    quad largest, sum;
    weigh(scores, at->slots, &largest, &sum);
    for (int h = 0; h < heads; h++) {
        out[h]->largest = largest[h];
        out[h]->sum = sum[h];
    }
    if (dtype == LM_INT8)
        for (int s = 0; s < at->slots; s++) scores[s] *= at->v_scales[slot_at(at, s)];
    mix_slots(dtype, heads, at, scores, out);
}

/* --- many rows of one sequence ---------------------------------------------------------------------------------- */

#define ROWS_OF_RUN 32

/* Rows of tokens that follow each other in one sequence; each sees one slot more than the row before it. */
typedef struct {
    const paired *q;             /* (head_dim) of the first row's first head, then of the next one */
    size_t stride;               /* to the next row's */
    int count, visible;          /* rows; slots from the chunk's first on that the last row sees, be it more than CHUNK */
    partial *(*out)[HEADS_AT_ONCE]; /* of each row and head */
    float *scratch;              /* run_scratch(head_dim) numbers */
} row_run;

/* Numbers for the scores of a run and for LANES keys. */
static inline size_t run_scratch(int head_dim) { return ROWS_OF_RUN * CHUNK * 4 + (size_t)head_dim * LANES; }

/* columns (head_dim, LANES): the keys of LANES slots from `slot` on, transposed, in the order of `load_pair`. Behind the last slot
 * it is repeated. */
INLINE void transpose_keys(const int dtype, const kv_chunk *at, int slot, float *columns) {
    for (int s = 0; s < LANES; s += 4) {
        size_t places[4];
        for (int j = 0; j < 4; j++)
            places[j] = slot_at(at, slot + s + j < at->slots ? slot + s + j : at->slots - 1) * at->head_dim;
        int i = 0;
        for (; i + 4 <= at->head_dim; i += 4) {
            quad values[4];
            for (int j = 0; j < 4; j++) values[j] = load_quad(dtype, at->k, places[j] + i);
            const quad a = SHUFFLE(values[0], values[1], 0, 4, 1, 5), b = SHUFFLE(values[0], values[1], 2, 6, 3, 7);
            const quad c = SHUFFLE(values[2], values[3], 0, 4, 1, 5), d = SHUFFLE(values[2], values[3], 2, 6, 3, 7);
            const quad four[4] = {SHUFFLE(a, c, 0, 1, 4, 5), SHUFFLE(a, c, 2, 3, 6, 7), SHUFFLE(b, d, 0, 1, 4, 5),
                                     SHUFFLE(b, d, 2, 3, 6, 7)};
            for (int j = 0; j < 4; j++) {
                const int place = place_in_pairs(dtype, i + j, at->head_dim);
                memcpy(columns + (size_t)place * LANES + s, &four[j], sizeof(quad));
            }
        }
        for (; i < at->head_dim; i++)
            for (int j = 0; j < 4; j++) columns[(size_t)i * LANES + s + j] = kept_at(dtype, at->k, places[j] + i);
    }
}

/* scores (LANES) of as many slots and each head. A register holds slots here and numbers of a key in `score_slots`; what are
 * lanes there are added up in the same order. */
INLINE void score_columns(const int heads, int head_dim, const float *columns, const paired *q, lanes scores[HEADS_AT_ONCE]) {
    enum { PARTS = LANES / 4 };
    const int whole = head_dim / LANES * LANES;
    lanes sums[4][HEADS_AT_ONCE];
#pragma GCC unroll 4
    for (int lane = 0; lane < 4; lane++) {
        lanes own[PARTS][HEADS_AT_ONCE] = {{{0}}};
        for (int i = lane; i < whole; i += LANES)
            for (int j = 0; j < PARTS; j++) {
                lanes key;
                memcpy(&key, columns + (size_t)(i + 4 * j) * LANES, sizeof key);
                for (int h = 0; h < heads; h++) own[j][h] += key * q[(size_t)h * head_dim + i + 4 * j].value;
            }
        for (int i = whole; lane == 0 && i < head_dim; i++) {
            lanes key;
            memcpy(&key, columns + (size_t)i * LANES, sizeof key);
            for (int h = 0; h < heads; h++) own[0][h] += key * q[(size_t)h * head_dim + i].value;
        }
        for (int h = 0; h < heads; h++) { /* written out, since compilers keep `own` in memory for the sake of a loop */
            const lanes left = PARTS == 4 ? own[0][h] + own[PARTS / 2][h] : own[0][h];
            const lanes right = PARTS == 4 ? own[PARTS / 4][h] + own[PARTS - 1][h] : own[PARTS - 1][h];
            sums[lane][h] = PARTS == 1 ? left : left + right;
        }
    }
    for (int h = 0; h < heads; h++) scores[h] = (sums[0][h] + sums[2][h]) + (sums[1][h] + sums[3][h]);
}

/* What the rows' heads see in a chunk: the same as of each row alone, to the bit. */
INLINE void attend_run(const int dtype, const int heads, const kv_chunk *at, const row_run *rows) {
    const int head_dim = at->head_dim;
    quad(*scores)[CHUNK] = (quad(*)[CHUNK])rows->scratch;
    float *columns = (float *)(scores + ROWS_OF_RUN);
    for (int slot = 0; slot < at->slots; slot += LANES) {
        transpose_keys(dtype, at, slot, columns);
        lanes scale = {0};
        if (dtype == LM_INT8)
            for (int s = 0; s < LANES && slot + s < at->slots; s++) scale[s] = at->k_scales[slot_at(at, slot + s)];
        for (int m = 0; m < rows->count; m++) {
            if (slot >= rows->visible - (rows->count - 1 - m)) continue;
            lanes own[HEADS_AT_ONCE] = {{0}};
            score_columns(heads, head_dim, columns, rows->q + m * rows->stride, own);
            for (int h = 0; h < heads && dtype == LM_INT8; h++) own[h] *= scale;
            for (int s = 0; s < LANES; s++) scores[m][slot + s] = (quad){own[0][s], own[1][s], own[2][s], own[3][s]};
        }
    }
    for (int m = 0; m < rows->count; m++) {
        kv_chunk seen = *at;
        seen.slots = rows->visible - (rows->count - 1 - m);
        if (seen.slots > at->slots) seen.slots = at->slots;
        if (seen.slots > 0) mix_scores(dtype, heads, &seen, scores[m], rows->out[m]);
    }
}

/* --- for any number of heads and any cache ------------------------------------------------------------------------ */

INLINE void attend_heads(const int dtype, const int heads, const kv_chunk *at, const row_run *rows) {
    if (rows->count > 1) {
        attend_run(dtype, heads, at, rows);
        return;
    }
    quad scores[CHUNK];
    score_slots(dtype, heads, at, rows->q, scores);
    mix_scores(dtype, heads, at, scores, rows->out[0]);
}

/* What `heads` query heads of one kv head see in a chunk, for each of some rows. */
static void attend_chunk(int dtype, int heads, const kv_chunk *at, const row_run *rows) {
#define ATTEND(DTYPE, HEADS)                  \
    if (dtype == DTYPE && heads == HEADS) {   \
        attend_heads(DTYPE, HEADS, at, rows); \
        return;                               \
    }
#define ATTEND_ANY(DTYPE) ATTEND(DTYPE, 4) ATTEND(DTYPE, 3) ATTEND(DTYPE, 2) ATTEND(DTYPE, 1)
    ATTEND_ANY(LM_BFLOAT16) ATTEND_ANY(LM_FLOAT32) ATTEND_ANY(LM_INT8)
#undef ATTEND_ANY
#undef ATTEND
}

/* Merge a later chunk's result into that of the earlier ones; always in this order, so that the sum is always the same. */
static void merge(partial *known, const partial *next, int head_dim) {
    const float largest = known->largest > next->largest ? known->largest : next->largest;
    const float a = exp_of(known->largest - largest), b = exp_of(next->largest - largest);
    known->sum = known->sum * a + next->sum * b;
    known->largest = largest;
    for (int i = 0; i < head_dim; i++) known->mixture[i].value = known->mixture[i].value * a + next->mixture[i].value * b;
}
