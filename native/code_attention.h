/* Attention over keys and values that are codes, in whole numbers: a part of attention.c.
 *
 * Lanes are slots where queries are multiplied with keys, so that no register's numbers are ever summed, and numbers of a value where
 * weights are multiplied with values. What is unpacked is multiplied with all heads. Sums of products are exact, so a row has the
 * same bits whatever rows come along.
 */
#ifndef LLAMARIUM_CODE_ATTENTION_H
#define LLAMARIUM_CODE_ATTENTION_H

#define SCORE_REGISTERS (LANES == 16 ? 4 : 2) /* of one head's scores at once: sums that do not wait for each other */
#define SLOTS_OF_STEP (SCORE_REGISTERS * LANES)

/* Of each head: scores, then weights; slots from the first strip's first to the last strip's last. */
typedef struct {
    float of[HEADS_AT_ONCE][CHUNK] __attribute__((aligned(64)));
} chunk_weights;

/* Weights as codes of 16 bits, what they are multiplied with, and their sums. */
typedef struct {
    int16_t codes[HEADS_AT_ONCE][CHUNK] __attribute__((aligned(64)));
    float scale[HEADS_AT_ONCE];
    int32_t total[HEADS_AT_ONCE];
} weight_codes;

static inline int begin_of_strips(const kv_chunk *at) { return at->first / STRIP * STRIP; }

static inline int end_of_strips(const kv_chunk *at) { return (at->slots + STRIP - 1) / STRIP * STRIP; }

/* The scales of group `g` of a strip's vectors, LANES of them from the strip's slot `nth` on; `strip` is the cache's first slot of it. */
INLINE lanes load_scales(const int dtype, const void *scales, size_t strip, int groups, int g, int nth) {
    return dtype == LM_INT8 ? load_floats((const float *)scales + strip + nth)
                            : load_lanes(LM_BFLOAT16, scales, strip * groups + g * STRIP + nth);
}

/* Codes of all heads' queries, two by two, each head's beside the others'. */
typedef struct {
    int16_t codes[HEADS_AT_ONCE][2];
} query_pair;

/* What keys are multiplied with; `zeros` is what codes in 4 bits being stored plus 8 adds to each group's sums. */
typedef struct {
    query_pair *pairs;                 /* (head_dim / 2) */
    int32_t (*zeros)[HEADS_AT_ONCE];   /* (groups) */
    float scale[HEADS_AT_ONCE];
} code_queries;

#define PAIRS_OF_GROUP (NIBBLE_GROUP / 2)

/* Put the queries of some heads side by side, in `memory`; what a last group in 4 bits lacks is 0. */
static __attribute__((noinline)) code_queries pair_queries(const kv_chunk *at, int heads, const paired *q, float *memory) {
    const int pairs = at->head_dim / 2, groups = nibble_groups(at->head_dim);
    code_queries queries = {.pairs = (query_pair *)memory};
    queries.zeros = (int32_t(*)[HEADS_AT_ONCE])(queries.pairs + groups * PAIRS_OF_GROUP);
    memset(queries.pairs + pairs, 0, (groups * PAIRS_OF_GROUP - pairs) * sizeof *queries.pairs);
    for (int h = 0; h < heads; h++, q += at->head_dim) {
        queries.scale[h] = scale_of_query(q, at->head_dim);
        for (int i = 0; i < pairs; i++) memcpy(queries.pairs[i].codes[h], codes_of_query(q) + 2 * i, sizeof queries.pairs[i].codes[h]);
        for (int g = 0; g < groups && at->k_dtype == LM_INT4; g++) {
            int32_t sum = 0;
            for (int i = 0; i < size_of_group(at->head_dim, g); i++) sum += codes_of_query(q)[g * NIBBLE_GROUP + i];
            queries.zeros[g][h] = 8 * sum;
        }
    }
    return queries;
}

/* sums[h][r] += two codes of each query, times those of LANES slots in each of SCORE_REGISTERS. */
INLINE void add_key_pair(const int heads, const short_pairs *keys, const query_pair *q, lane_ints sums[][SCORE_REGISTERS]) {
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++) {
        const short_pairs query = repeat_pair(q->codes[h]);
#pragma GCC unroll 4
        for (int r = 0; r < SCORE_REGISTERS; r++) sums[h][r] = add_products(sums[h][r], keys[r], query);
    }
}

/* found[h][r] += the sums of a group, or a vector, times its scales. */
INLINE void add_scaled(const int dtype, const int heads, const kv_chunk *at, const size_t *strips, const int *nth, int g,
                       lane_ints sums[][SCORE_REGISTERS], lanes found[][SCORE_REGISTERS]) {
#pragma GCC unroll 4
    for (int r = 0; r < SCORE_REGISTERS; r++) {
        const lanes scale = load_scales(dtype, at->k_scales, strips[r], nibble_groups(at->head_dim), g, nth[r]);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) found[h][r] += __builtin_convertvector(sums[h][r], lanes) * scale;
    }
}

/* Where a step's slots lie, of each register: the first key, the slot of its strip, and the lane in it. */
typedef struct {
    const uint8_t *keys[SCORE_REGISTERS];
    size_t strips[SCORE_REGISTERS];
    int nth[SCORE_REGISTERS];
} step_places;

INLINE step_places places_of(const int dtype, const kv_chunk *at, int slot) {
    step_places to;
    const int bytes = dtype == LM_INT8 ? 2 : 4; /* of a slot, in what is loaded at once */
#pragma GCC unroll 4
    for (int r = 0; r < SCORE_REGISTERS; r++) {
        const int own = slot + r * LANES, is_same = r > 0 && r * LANES % STRIP != 0; /* a compiler knows: as the last one */
        to.strips[r] = is_same ? to.strips[r - 1] : slot_at(at, max_int(min_int(own, at->slots - 1), at->first) / STRIP * STRIP);
        to.nth[r] = own % STRIP;
        to.keys[r] = is_same ? to.keys[r - 1] + LANES * bytes
                             : (const uint8_t *)at->k + to.strips[r] * vector_bytes(dtype, at->head_dim) + to.nth[r] * bytes;
    }
    return to;
}

/* Add a group of 4-bit keys, from `pair` on, to sums; returns the pair behind it. */
INLINE int add_nibble_group(const int heads, const step_places *places, const code_queries *q, int g, int pair, int end,
                            lane_ints sums[HEADS_AT_ONCE][SCORE_REGISTERS]) {
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int r = 0; r < SCORE_REGISTERS; r++) sums[h][r] = (lane_ints){0} - q->zeros[g][h];
    while (pair < end) {
        lane_bits words[SCORE_REGISTERS];
        short_pairs keys[SCORE_REGISTERS];
#pragma GCC unroll 4
        for (int r = 0; r < SCORE_REGISTERS; r++) memcpy(&words[r], places->keys[r] + (size_t)pair * STRIP, sizeof(lanes));
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++, pair++) {
#pragma GCC unroll 4
            for (int r = 0; r < SCORE_REGISTERS; r++) keys[r] = nibble_pairs(words[r], part);
            add_key_pair(heads, keys, q->pairs + pair, sums);
        }
    }
    return pair;
}

/* scores[h] of SLOTS_OF_STEP slots from `slot` on; where these are of strips that the chunk does not have, others'. */
INLINE void score_step(const int dtype, const int heads, const kv_chunk *at, int slot, const code_queries *q, chunk_weights *scores) {
    const int head_dim = at->head_dim;
    const step_places places = places_of(dtype, at, slot);
    lanes found[HEADS_AT_ONCE][SCORE_REGISTERS] = {{{0}}};
    lane_ints sums[HEADS_AT_ONCE][SCORE_REGISTERS] = {{{0}}};
    if (dtype == LM_INT8) {
        short_pairs keys[SCORE_REGISTERS];
        for (int pair = 0; pair < head_dim / 2; pair++) {
#pragma GCC unroll 4
            for (int r = 0; r < SCORE_REGISTERS; r++) keys[r] = load_bytes_as_shorts(places.keys[r] + (size_t)pair * 2 * STRIP);
            add_key_pair(heads, keys, q->pairs + pair, sums);
        }
        add_scaled(dtype, heads, at, places.strips, places.nth, 0, sums, found);
    } else {
        for (int g = 0, pair = 0; g < nibble_groups(head_dim); g++) {
            pair = add_nibble_group(heads, &places, q, g, pair, pair + size_of_group(head_dim, g) / 2, sums);
            add_scaled(dtype, heads, at, places.strips, places.nth, g, sums, found);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < SCORE_REGISTERS; r++)
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            const lanes own = found[h][r] * q->scale[h];
            memcpy(scores->of[h] + slot + r * LANES, &own, sizeof own);
        }
}

/* Prefetch a strip's values into the L2 cache: L1 is too small for keys and values. Keys are read in the order in which they lie, which
 * processors prefetch by themselves. */
INLINE void prefetch_values(const kv_chunk *at, int slot) {
    const size_t size = vector_bytes(at->v_dtype, at->head_dim);
    const char *strip = (const char *)at->v + slot_at(at, slot) * size;
    for (size_t byte = 0; byte < STRIP * size; byte += 64) __builtin_prefetch(strip + byte, 0, 2);
}

INLINE void score_strips(const int dtype, const int heads, const kv_chunk *at, const code_queries *q, chunk_weights *scores) {
    int strip = begin_of_strips(at);
    for (int slot = at->first / SLOTS_OF_STEP * SLOTS_OF_STEP; slot < at->slots; slot += SLOTS_OF_STEP) {
        for (; strip < min_int(slot + SLOTS_OF_STEP, at->slots); strip += STRIP) prefetch_values(at, strip);
        score_step(dtype, heads, at, slot, q, scores);
    }
}

/* Give slots of the first and last strip that are not seen a value of their own. */
static inline void fill_unseen(const kv_chunk *at, float *numbers, float value) {
    for (int s = begin_of_strips(at); s < at->first; s++) numbers[s] = value;
    for (int s = at->slots; s < end_of_strips(at); s++) numbers[s] = value;
}

static inline float largest_of(lanes values) {
    quad parts[LANES / 4], most;
    memcpy(parts, &values, sizeof parts);
    most = parts[0];
    for (int i = 1; i < LANES / 4; i++) most = select_quad(parts[i] > most, parts[i], most);
    const float first = most[0] > most[1] ? most[0] : most[1], second = most[2] > most[3] ? most[2] : most[3];
    return first > second ? first : second;
}

static inline float total_of(lanes values) {
    const quad parts = fold_lanes(values);
    return (parts[0] + parts[2]) + (parts[1] + parts[3]);
}

/* The float whose bits are the largest. */
static inline float largest_bits_of(lane_ints bits) {
    int32_t numbers[LANES];
    float found;
    memcpy(numbers, &bits, sizeof numbers);
    for (int i = 1; i < LANES; i++) numbers[0] = max_int(numbers[0], numbers[i]);
    memcpy(&found, numbers, sizeof found);
    return found;
}

/* The softmax of one head's scores, which become its weights. */
static __attribute__((noinline)) void weigh_head(const kv_chunk *at, float *scores, partial *out) {
    const int begin = begin_of_strips(at), end = end_of_strips(at);
    fill_unseen(at, scores, -INFINITY);
    lanes most[STRIP / LANES], sums[STRIP / LANES] = {{0}}; /* several, which do not wait for each other */
    for (int i = 0; i < STRIP / LANES; i++) most[i] = (lanes){0} - INFINITY;
    for (int s = begin; s < end; s += STRIP)
        for (int i = 0; i < STRIP / LANES; i++) most[i] = larger_lanes(load_floats(scores + s + i * LANES), most[i]);
    for (int i = 1; i < STRIP / LANES; i++) most[0] = larger_lanes(most[i], most[0]);
    out->largest = largest_of(most[0]);
    for (int s = begin; s < end; s += STRIP)
        for (int i = 0; i < STRIP / LANES; i++) {
            const lanes here = exp_of_lanes(load_floats(scores + s + i * LANES) - out->largest);
            memcpy(scores + s + i * LANES, &here, sizeof here);
            sums[i] += here; /* of slots that are not seen e^-87, which is nothing beside the largest's 1 */
        }
    for (int i = 1; i < STRIP / LANES; i++) sums[0] += sums[i];
    out->sum = total_of(sums[0]);
}

/* The weights of values of group `g`, of LM_INT8 of all, times their scales. */
INLINE void scale_weights(const int dtype, const int heads, const kv_chunk *at, int g, const chunk_weights *weights, chunk_weights *scaled) {
    const int groups = nibble_groups(at->head_dim);
    for (int s = begin_of_strips(at); s < end_of_strips(at); s += STRIP) {
        const size_t strip = slot_at(at, s);
#pragma GCC unroll 4
        for (int i = 0; i < STRIP; i += LANES) {
            const lanes scale = load_scales(dtype, at->v_scales, strip, groups, g, i);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) {
                const lanes own = load_floats(weights->of[h] + s + i) * scale;
                memcpy(scaled->of[h] + s + i, &own, sizeof own);
            }
        }
    }
}

/* One head's weights, scaled, as codes. Not a number, or infinite: so is what they are multiplied with. */
static __attribute__((noinline)) void round_weights(const kv_chunk *at, int h, float *scaled, weight_codes *w) {
    const int begin = begin_of_strips(at), end = end_of_strips(at);
    fill_unseen(at, scaled, 0);
    lane_ints most[STRIP / LANES] = {{0}}, total = {0}; /* sizes are ordered as their bits are, and NaN is the largest */
    for (int s = begin; s < end; s += STRIP)
        for (int i = 0; i < STRIP / LANES; i++)
            most[i] = larger_ints((lane_ints)load_floats(scaled + s + i * LANES) & INT32_MAX, most[i]);
    for (int i = 1; i < STRIP / LANES; i++) most[0] = larger_ints(most[i], most[0]);
    const float largest = largest_bits_of(most[0]), inverse = largest > 1e-30f ? INT16_MAX / largest : 0; /* less is nothing, and has no inverse */
    for (int s = begin; s < end; s += STRIP) {
        lane_ints codes[STRIP / LANES];
        for (int i = 0; i < STRIP / LANES; i++) {
            codes[i] = nearest_ints(load_floats(scaled + s + i * LANES) * inverse);
            total += codes[i];
        }
        put_shorts(codes, w->codes[h] + s);
    }
    w->scale[h] = largest / INT16_MAX + largest * 0;
    w->total[h] = 0;
    for (int i = 0; i < LANES; i++) w->total[h] += total[i];
}

#define PAIRS_OF_CODES(heads) ((heads) > 2 && LANES < 16 ? 2 : 4) /* registers of a value, as far as there are some for their sums */

/* out[h] (head_dim) from element `i` on, `count` registers of it, of which the first is the `part`th of values that begin at `place` in
 * two slots' memory: the sum over slots of weights times codes. */
INLINE void mix_some_codes(const int dtype, const int heads, const int count, const kv_chunk *at, size_t place, int part, int i,
                           const weight_codes *w, partial *const *out) {
    const size_t bytes = vector_bytes(dtype, at->head_dim);
    const int end = (at->slots + 1) & ~1, per_group = 8 / PAIR_LANES;
    pair_ints sums[HEADS_AT_ONCE][4] = {{{0}}};
    for (int s = at->first & ~1; s < end;) {
        const uint8_t *codes = (const uint8_t *)at->v + slot_at(at, s) * bytes + place;
        for (const int stop = min_int(((s >> at->block_bits) + 1) << at->block_bits, end); s < stop; s += 2, codes += 2 * bytes) {
            pair_ints values[4];
            for (int j = 0; j < count; j++)
                values[j] = dtype == LM_INT8 ? load_byte_pairs(codes + (size_t)(part + j) * 2 * PAIR_LANES)
                                             : load_nibble_pairs(codes + (part + j) % per_group * sizeof(pair_ints), (part + j) / per_group);
            for (int h = 0; h < heads; h++) {
                int32_t pair;
                memcpy(&pair, w->codes[h] + s, sizeof pair);
                for (int j = 0; j < count; j++) sums[h][j] = add_pairs(sums[h][j], values[j], (pair_ints){0} + pair);
            }
        }
    }
    for (int h = 0; h < heads; h++)
        for (int j = 0; j < count; j++) {
            const int zeros = dtype == LM_INT4 ? 8 * w->total[h] : 0;
            const pair_floats found = __builtin_convertvector(sums[h][j] - zeros, pair_floats) * w->scale[h];
            const int left = min_int(at->head_dim - i - j * PAIR_LANES, PAIR_LANES); /* a last group in 4 bits may have fewer */
            if (left > 0) memcpy(out[h]->mixture + i + j * PAIR_LANES, &found, left * sizeof(float));
        }
}

/* What is left of values in 8 bits behind all registers. */
INLINE void mix_left(const int heads, const kv_chunk *at, int i, const weight_codes *w, partial *const *out) {
    for (int h = 0; h < heads; h++) {
        int32_t sum = 0;
        for (int s = at->first; s < at->slots; s++) {
            const size_t slot = slot_at(at, s);
            const int8_t *pair = (const int8_t *)at->v + (slot & ~(size_t)1) * at->head_dim;
            sum += pair[2 * i + (s & 1)] * w->codes[h][s];
        }
        out[h]->mixture[i].value = (float)sum * w->scale[h];
    }
}

/* out[h] (head_dim): the sum over slots of values times weights. */
INLINE void mix_codes(const int dtype, const int heads, const kv_chunk *at, const chunk_weights *weights, partial *const *out) {
    const int groups = dtype == LM_INT8 ? 1 : nibble_groups(at->head_dim), size = dtype == LM_INT8 ? at->head_dim : NIBBLE_GROUP;
    const int whole = PAIRS_OF_CODES(heads);
    for (int g = 0; g < groups; g++) {
        chunk_weights scaled;
        weight_codes w;
        scale_weights(dtype, heads, at, g, weights, &scaled);
        for (int h = 0; h < heads; h++) round_weights(at, h, scaled.of[h], &w);
        const size_t place = (size_t)g * NIBBLE_GROUP; /* two slots' */
        int part = 0, i = g * NIBBLE_GROUP;
#pragma GCC unroll 4
        for (; (part + whole) * PAIR_LANES <= size; part += whole, i += whole * PAIR_LANES)
            mix_some_codes(dtype, heads, whole, at, place, part, i, &w, out);
        for (; (part + 1) * PAIR_LANES <= size; part++, i += PAIR_LANES) mix_some_codes(dtype, heads, 1, at, place, part, i, &w, out);
        for (; dtype == LM_INT8 && i < at->head_dim; i++) mix_left(heads, at, i, &w, out);
    }
}

/* Prefetch the scales of all slots of a chunk. */
static void prefetch_scales(const kv_chunk *at) {
    const int groups = nibble_groups(at->head_dim);
    const size_t of_key = at->k_dtype == LM_INT8 ? sizeof(float) : groups * sizeof(uint16_t);
    const size_t of_value = at->v_dtype == LM_INT8 ? sizeof(float) : groups * sizeof(uint16_t);
    for (int slot = begin_of_strips(at); slot < at->slots; slot += STRIP) {
        const size_t place = slot_at(at, slot);
        for (size_t byte = 0; byte < STRIP * of_key; byte += 64) __builtin_prefetch((const char *)at->k_scales + place * of_key + byte, 0, 2);
        for (size_t byte = 0; byte < STRIP * of_value; byte += 64)
            __builtin_prefetch((const char *)at->v_scales + place * of_value + byte, 0, 2);
    }
}

/* For each number of heads. */
#define OF_HEADS(HEADS)                                                                                                                   \
    static __attribute__((noinline)) void score_##HEADS(const kv_chunk *at, const code_queries *q, chunk_weights *scores) {               \
        if (at->k_dtype == LM_INT8)                                                                                                       \
            score_strips(LM_INT8, HEADS, at, q, scores);                                                                                  \
        else                                                                                                                              \
            score_strips(LM_INT4, HEADS, at, q, scores);                                                                                  \
    }                                                                                                                                     \
    static __attribute__((noinline)) void mix_##HEADS(const kv_chunk *at, const chunk_weights *weights, partial *const *out) {            \
        if (at->v_dtype == LM_INT8)                                                                                                       \
            mix_codes(LM_INT8, HEADS, at, weights, out);                                                                                  \
        else                                                                                                                              \
            mix_codes(LM_INT4, HEADS, at, weights, out);                                                                                  \
    }
OF_HEADS(1) OF_HEADS(2) OF_HEADS(3) OF_HEADS(4)
#undef OF_HEADS

/* What the rows' heads see in a chunk, row by row: to multiply several rows with what is unpacked once does not pay. */
static void attend_codes(int heads, const kv_chunk *at, const row_run *rows) {
    static void (*const scores_of[])(const kv_chunk *, const code_queries *, chunk_weights *) = {score_1, score_2, score_3, score_4};
    static void (*const mixtures_of[])(const kv_chunk *, const chunk_weights *, partial *const *) = {mix_1, mix_2, mix_3, mix_4};
    chunk_weights weights;
    prefetch_scales(at);
    for (int m = 0; m < rows->count; m++) {
        const kv_chunk seen = seen_by(at, rows, m);
        if (seen.slots <= seen.first) continue;
        const code_queries queries = pair_queries(at, heads, rows->q + m * rows->stride, rows->scratch);
        scores_of[heads - 1](&seen, &queries, &weights);
        for (int h = 0; h < heads; h++) weigh_head(&seen, weights.of[h], rows->out[m][h]);
        mixtures_of[heads - 1](&seen, &weights, rows->out[m]);
    }
}

#endif
