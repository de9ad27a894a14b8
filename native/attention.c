/* A part of a set: what queries see in one KV chunk of the cache. */
#include "parts.h"

/* A key's or value's numbers, before the scale that those of LM_INT8 have. */
static inline float kept_at(int dtype, const void *from, size_t place) {
    return dtype == LM_INT8 ? ((const int8_t *)from)[place] : number_at(dtype, from, place);
}

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
static __attribute__((noinline)) void weigh(quad *scores, int slots, quad *largest, quad *sum) {
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
        here = exp_of_wide(here - largest_wide);
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

/* As `transpose_keys`, for any cache. */
static __attribute__((noinline)) void transpose(int dtype, const kv_chunk *at, int slot, float *columns) {
    switch (dtype) {
    case LM_FLOAT32: transpose_keys(LM_FLOAT32, at, slot, columns); break;
    case LM_BFLOAT16: transpose_keys(LM_BFLOAT16, at, slot, columns); break;
    default: transpose_keys(LM_INT8, at, slot, columns);
    }
}

/* As `score_columns`, for any number of heads. */
static __attribute__((noinline)) void score(int heads, int head_dim, const float *columns, const paired *q, lanes scores[HEADS_AT_ONCE]) {
    switch (heads) {
    case 1: score_columns(1, head_dim, columns, q, scores); break;
    case 2: score_columns(2, head_dim, columns, q, scores); break;
    case 3: score_columns(3, head_dim, columns, q, scores); break;
    default: score_columns(4, head_dim, columns, q, scores);
    }
}

/* The scores of several rows' heads, in their scratch: of each row the same as of that row alone, to the bit. */
static __attribute__((noinline)) quad (*score_run(int dtype, int heads, const kv_chunk *at, const row_run *rows))[CHUNK] {
    quad(*scores)[CHUNK] = (quad(*)[CHUNK])rows->scratch;
    float *columns = (float *)(scores + ROWS_OF_RUN);
    for (int slot = 0; slot < at->slots; slot += LANES) {
        lanes scale = (lanes){0} + 1;
        transpose(dtype, at, slot, columns);
        for (int s = 0; s < LANES && slot + s < at->slots && dtype == LM_INT8; s++) scale[s] = at->k_scales[slot_at(at, slot + s)];
        for (int m = 0; m < rows->count; m++) {
            if (slot >= rows->visible - (rows->count - 1 - m)) continue;
            lanes own[HEADS_AT_ONCE] = {{0}};
            score(heads, at->head_dim, columns, rows->q + m * rows->stride, own);
            for (int h = 0; h < HEADS_AT_ONCE && dtype == LM_INT8; h++) own[h] *= scale;
            for (int s = 0; s < LANES; s++) scores[m][slot + s] = (quad){own[0][s], own[1][s], own[2][s], own[3][s]};
        }
    }
    return scores;
}

/* --- for any number of heads and any cache ------------------------------------------------------------------------ */

/* What the rows' heads see in a chunk. */
INLINE void attend_heads(const int dtype, const int heads, const kv_chunk *at, const row_run *rows) {
    quad alone[1][CHUNK], (*scores)[CHUNK] = alone;
    if (rows->count > 1)
        scores = score_run(dtype, heads, at, rows);
    else
        score_slots(dtype, heads, at, rows->q, alone[0]);
    for (int m = 0; m < rows->count; m++) {
        kv_chunk seen = *at;
        seen.slots = min_int(rows->visible - (rows->count - 1 - m), at->slots);
        if (seen.slots > 0) mix_scores(dtype, heads, &seen, scores[m], rows->out[m]);
    }
}

void attend_chunk(int dtype, int heads, const kv_chunk *at, const row_run *rows) {
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
