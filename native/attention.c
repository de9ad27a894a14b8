/* A part of a set: what queries see in one KV chunk of the cache. */
#include "parts.h"

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

/* Prefetch a slot's vector in `from`, keys or values, into the L2 cache: L1 is too small for both. */
INLINE void prefetch_slot(const int dtype, const kv_chunk *at, const void *from, int slot) {
    const size_t size = vector_bytes(dtype, at->head_dim);
    const char *vector = (const char *)from + slot_at(at, slot) * size;
    for (size_t byte = 0; byte < size; byte += 64) __builtin_prefetch(vector + byte, 0, 2);
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
            const float key = number_at(dtype, at->k, places[s] + i);
            for (int h = 0; h < heads; h++) sums[s * HEADS_AT_ONCE + h][0] += key * q[(size_t)h * head_dim + i].value;
        }
    quad found[SLOTS_AT_ONCE];
    put_sums(sums, count, found);
    for (int s = 0; s < count; s++) scores[slot + s * distance] = found[s];
}

/* Four slots far from each other at a time, since a core reads several pages side by side faster (docs/decisions/0009). */
INLINE void score_slots(const int dtype, const int heads, const kv_chunk *at, const paired *q, quad *scores) {
    const int quarter = (at->slots - at->first) / 4;
    for (int slot = at->first; slot < at->first + quarter; slot++) {
        for (int s = 0; s < 4; s++) prefetch_slot(dtype, at, at->v, slot + s * quarter);
        for (int s = 0; s < 4; s += SLOTS_AT_ONCE) score_some(dtype, heads, SLOTS_AT_ONCE, at, slot + s * quarter, quarter, q, scores);
    }
    for (int slot = at->first + 4 * quarter; slot < at->slots; slot++) score_some(dtype, heads, 1, at, slot, 0, q, scores);
}

/* The softmax of four heads' scores, which become its weights. */
static __attribute__((noinline)) void weigh(quad *scores, int slots, quad *largest, quad *sum) {
    lanes largest_of[32 / LANES]; /* several, which do not wait for each other */
    int whole = 0;
    for (int i = 0; i < 32 / LANES; i++) largest_of[i] = (lanes){0} - INFINITY;
    for (; whole + 8 <= slots; whole += 8)
        for (int i = 0; i < 32 / LANES; i++)
            largest_of[i] = larger_lanes(load_floats((float *)(scores + whole) + i * LANES), largest_of[i]);
    quad found[8], most = (quad){0} - INFINITY;
    memcpy(found, largest_of, sizeof found);
    for (int i = 0; i < 8; i++) most = select_quad(found[i] > most, found[i], most);
    for (int s = whole; s < slots; s++) most = select_quad(scores[s] > most, scores[s], most);
    const quad size = (quad)((quad_ints)most & 0x7fffffff); /* beside huge scores 200 alone is nothing */
    for (int s = slots; s % 4; s++) scores[s] = most - 200 - size * 1e-3f; /* e^-87 is nothing beside the largest's 1 */
    const quad repeated[4] = {most, most, most, most};
    lanes largest_lanes, sums[16 / LANES] = {{0}};
    memcpy(&largest_lanes, repeated, sizeof largest_lanes);
    for (int s = 0; s < slots; s += 4)
        for (int i = 0; i < 16 / LANES; i++) {
            float *at = (float *)(scores + s) + i * LANES;
            const lanes here = exp_of_lanes(load_floats(at) - largest_lanes);
            memcpy(at, &here, sizeof here);
            sums[i] += here;
        }
    quad parts[4];
    memcpy(parts, sums, sizeof parts);
    *largest = most;
    *sum = (parts[0] + parts[2]) + (parts[1] + parts[3]);
}

#define PAIRS_AT_ONCE (LANES == 16 ? 2 : 1) /* of a value: AVX-512 has twice as many registers */

/* out[h] (head_dim) from element `i` on, `count` pairs of it: the sum over slots of value times weights[s][h]. */
INLINE void mix_pairs(const int dtype, const int heads, const int count, const kv_chunk *at, int i, const quad *weights,
                      partial *const *out) {
    lanes sums[HEADS_AT_ONCE][2 * PAIRS_AT_ONCE] = {{{0}}};
    for (int s = at->first; s < at->slots;) {
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
    for (int s = at->first; s < at->slots; s++) {
        const lanes value = load_lanes(dtype, at->v, slot_at(at, s) * at->head_dim + i);
        for (int h = 0; h < heads; h++) sums[h] += value * weights[s][h];
    }
    for (int h = 0; h < heads; h++) memcpy(out[h]->mixture + i, &sums[h], sizeof(lanes));
}

/* out[h] (head_dim): the sum over slots of values times weights[s][h]. */
INLINE void mix_slots(const int dtype, const int heads, const kv_chunk *at, const quad *weights, partial *const *out) {
    int i = 0;
    for (; i + PAIRS_AT_ONCE * PAIR <= at->head_dim; i += PAIRS_AT_ONCE * PAIR)
        mix_pairs(dtype, heads, PAIRS_AT_ONCE, at, i, weights, out);
    for (; i + PAIR <= at->head_dim; i += PAIR) mix_pairs(dtype, heads, 1, at, i, weights, out);
    for (; i + LANES <= at->head_dim; i += LANES) mix_lanes(dtype, heads, at, i, weights, out);
    for (; i < at->head_dim; i++)
        for (int h = 0; h < heads; h++) {
            float sum = 0;
            for (int s = at->first; s < at->slots; s++)
                sum += number_at(dtype, at->v, slot_at(at, s) * at->head_dim + i) * weights[s][h];
            out[h]->mixture[i].value = sum;
        }
}

/* What query heads with these scores see in a chunk. */
INLINE void mix_scores(const int dtype, const int heads, const kv_chunk *at, quad *scores, partial *const *out) {
    const int start = at->first / 4 * 4; /* as `weigh` takes them; what lies before the window has no weight */
    quad largest, sum;
    for (int s = start; s < at->first; s++) scores[s] = (quad){0} - INFINITY;
    weigh(scores + start, at->slots - start, &largest, &sum);
    for (int h = 0; h < heads; h++) {
        out[h]->largest = largest[h];
        out[h]->sum = sum[h];
    }
    mix_slots(dtype, heads, at, scores, out);
}

/* --- many rows of one sequence ---------------------------------------------------------------------------------- */

/* columns (head_dim, COLUMNS): the keys of COLUMNS slots from `slot` on, transposed, in the order of `load_pair`. Behind the last slot
 * it is repeated. */
INLINE void transpose_keys(const int dtype, const kv_chunk *at, int slot, float *columns) {
    const int head_dim = at->head_dim;
    for (const float *end = columns + COLUMNS; columns < end; columns += LANES, slot += LANES) {
        size_t places[LANES];
        for (int s = 0; s < LANES; s++) places[s] = slot_at(at, min_int(slot + s, at->slots - 1)) * head_dim;
        int i = 0;
        for (; dtype == LM_BFLOAT16 && i + PAIR <= head_dim; i += PAIR) {
            lanes words[LANES], pair[2]; /* of two numbers each: transposed as they lie, which is half of what floats would be */
            for (int s = 0; s < LANES; s++) memcpy(&words[s], (const uint16_t *)at->k + places[s] + i, sizeof(lanes));
            transpose_lanes(words);
            for (int n = 0; n < LANES; n++) {
                load_pair(dtype, &words[n], 0, pair);
                memcpy(columns + (size_t)(i + n) * COLUMNS, &pair[0], sizeof(lanes));
                memcpy(columns + (size_t)(i + LANES + n) * COLUMNS, &pair[1], sizeof(lanes));
            }
        }
        for (; i + LANES <= head_dim; i += LANES) {
            lanes keys[LANES];
            for (int s = 0; s < LANES; s++) keys[s] = load_lanes(dtype, at->k, places[s] + i);
            transpose_lanes(keys);
            for (int n = 0; n < LANES; n++) memcpy(columns + (size_t)(i + n) * COLUMNS, &keys[n], sizeof(lanes));
        }
        for (; i < head_dim; i++)
            for (int s = 0; s < LANES; s++) columns[(size_t)i * COLUMNS + s] = number_at(dtype, at->k, places[s] + i);
    }
}

/* As `transpose_keys`, for both dtypes. */
static __attribute__((noinline)) void transpose(int dtype, const kv_chunk *at, int slot, float *columns) {
    if (dtype == LM_FLOAT32)
        transpose_keys(LM_FLOAT32, at, slot, columns);
    else
        transpose_keys(LM_BFLOAT16, at, slot, columns);
}

/* scores[s][h] of LANES slots, from registers that have one head's. */
static inline void put_quads(const lanes heads[HEADS_AT_ONCE], quad *scores) {
    quad parts[HEADS_AT_ONCE][LANES / 4];
    memcpy(parts, heads, sizeof parts);
    for (int i = 0; i < LANES / 4; i++) {
        quad four[4] = {parts[0][i], parts[1][i], parts[2][i], parts[3][i]};
        transpose_quads(four);
        memcpy(scores + 4 * i, four, sizeof four);
    }
}

/* scores[s][h] of COLUMNS slots. A register holds slots here and numbers of a key in `score_some`; what are lanes there are added up
 * in the same order. */
INLINE void score_columns(const int heads, int head_dim, const float *columns, const paired *q, quad *scores) {
    enum { PARTS = LANES / 4, GROUPS = COLUMNS / LANES };
    const int whole = head_dim / LANES * LANES;
    lanes sums[4][HEADS_AT_ONCE][GROUPS];
#pragma GCC unroll 4
    for (int lane = 0; lane < 4; lane++) {
        lanes own[PARTS][HEADS_AT_ONCE][GROUPS] = {{{{0}}}};
        for (int i = lane; i < whole; i += LANES)
#pragma GCC unroll 4
            for (int j = 0; j < PARTS; j++) {
                lanes keys[GROUPS];
#pragma GCC unroll 4
                for (int g = 0; g < GROUPS; g++) {
                    keys[g] = load_floats(columns + (size_t)(i + 4 * j) * COLUMNS + g * LANES);
                    IN_REGISTER(keys[g]);
                }
#pragma GCC unroll 4
                for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
                    for (int g = 0; g < GROUPS; g++) own[j][h][g] += keys[g] * q[(size_t)h * head_dim + i + 4 * j].value;
            }
        for (int i = whole; lane == 0 && i < head_dim; i++)
            for (int h = 0; h < heads; h++)
                for (int g = 0; g < GROUPS; g++)
                    own[0][h][g] += load_floats(columns + (size_t)i * COLUMNS + g * LANES) * q[(size_t)h * head_dim + i].value;
        for (int h = 0; h < heads; h++) /* written out, since compilers keep `own` in memory for the sake of a loop */
            for (int g = 0; g < GROUPS; g++) {
                const lanes left = PARTS == 4 ? own[0][h][g] + own[PARTS / 2][h][g] : own[0][h][g];
                const lanes right = PARTS == 4 ? own[PARTS / 4][h][g] + own[PARTS - 1][h][g] : own[PARTS - 1][h][g];
                sums[lane][h][g] = PARTS == 1 ? left : left + right;
            }
    }
    for (int g = 0; g < GROUPS; g++) {
        lanes found[HEADS_AT_ONCE] = {{0}};
        for (int h = 0; h < heads; h++) found[h] = (sums[0][h][g] + sums[2][h][g]) + (sums[1][h][g] + sums[3][h][g]);
        put_quads(found, scores + g * LANES);
    }
}

/* As `score_columns`, for any number of heads. */
static __attribute__((noinline)) void score(int heads, int head_dim, const float *columns, const paired *q, quad *scores) {
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
    const int last = at->slots - 1;
    for (int slot = at->first / COLUMNS * COLUMNS; slot < at->slots; slot += COLUMNS) {
        for (int s = 0; s < COLUMNS; s++) {
            prefetch_slot(dtype, at, at->v, min_int(slot + s, last));
            prefetch_slot(dtype, at, at->k, min_int(slot + s + COLUMNS, last));
        }
        transpose(dtype, at, slot, columns);
        for (int m = 0; m < rows->count; m++)
            if (slot < end_of_row(rows, m) && slot + COLUMNS > first_of_row(rows, m))
                score(heads, at->head_dim, columns, rows->q + m * rows->stride, scores[m] + slot);
    }
    return scores;
}

/* --- for any number of heads and any cache ------------------------------------------------------------------------ */

/* What row m of `rows` sees of a chunk; it has no slots if that is nothing. */
static inline kv_chunk seen_by(const kv_chunk *at, const row_run *rows, int m) {
    kv_chunk seen = *at;
    seen.first = first_of_row(rows, m);
    seen.slots = min_int(end_of_row(rows, m), at->slots);
    return seen;
}

/* What the rows' heads see in a chunk, whose `first` is that of the first row. */
INLINE void attend_floats(const int dtype, const int heads, const kv_chunk *at, const row_run *rows) {
    quad alone[1][CHUNK], (*scores)[CHUNK] = alone;
    if (rows->count > 1)
        scores = score_run(dtype, heads, at, rows);
    else
        score_slots(dtype, heads, at, rows->q, alone[0]);
    for (int m = 0; m < rows->count; m++) {
        const kv_chunk seen = seen_by(at, rows, m);
        if (seen.slots > seen.first) mix_scores(dtype, heads, &seen, scores[m], rows->out[m]);
    }
}

#include "code_attention.h"

void attend_chunk(int heads, const kv_chunk *at, const row_run *rows) {
    if (is_codes(at->k_dtype)) {
        attend_codes(heads, at, rows);
        return;
    }
#define ATTEND(HEADS)                                   \
    if (heads == HEADS) {                               \
        if (at->k_dtype == LM_BFLOAT16)                 \
            attend_floats(LM_BFLOAT16, HEADS, at, rows); \
        else                                            \
            attend_floats(LM_FLOAT32, HEADS, at, rows); \
        return;                                         \
    }
    ATTEND(4) ATTEND(3) ATTEND(2) ATTEND(1)
#undef ATTEND
}
