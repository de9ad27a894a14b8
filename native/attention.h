/* Attention over the cache: what queries see in at most CHUNK slots, and how chunks are put together. */
#include "numbers.h"

#define CHUNK 256 /* slots of the cache that one piece of attention looks at */

static inline void rotate(float *head, const float *turn, int half) {
    const float *cosine = turn, *sine = turn + half;
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cosine[i] - b * sine[i];
        head[i + half] = b * cosine[i] + a * sine[i];
    }
}

/* Round a key or value to 8 bits; returns its scale. NaN and infinities make that NaN. Each step is one operation that
 * IEEE rounds, so that `to_codes` in attention/cached.py gives the same codes. */
static inline float to_codes(const float *values, int head_dim, int8_t *codes) {
    float poison;
    const float scale = largest_size(values, head_dim, &poison) / 127 + poison;
    for (int i = 0; i < head_dim; i++) codes[i] = (int8_t)nearest_code(scale > 0 ? values[i] / scale : 0);
    return scale;
}

/* Put one head's key or value where it belongs; `place` is that of its first element. */
static inline void store(int dtype, void *to, float *scales, size_t place, const float *values, int head_dim) {
    if (dtype == LM_FLOAT32) {
        memcpy((float *)to + place, values, (size_t)head_dim * sizeof(float));
    } else if (dtype == LM_INT8) {
        scales[place / head_dim] = to_codes(values, head_dim, (int8_t *)to + place);
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
    float mixture[]; /* (head_dim) */
} part;

static inline part *part_at(float *parts, size_t index, int head_dim) {
    return (part *)(parts + index * (size_t)(head_dim + 2));
}

#define HEADS_AT_ONCE 4 /* that share each key and value that is loaded */

/* At most CHUNK slots of one kv head. */
typedef struct {
    const void *k, *v;
    const float *k_scales, *v_scales; /* of LM_INT8 only */
    size_t place;                     /* of the first slot's first element */
    int head_dim, slots;
} stretch;

/* scores[s][h] = q[h] (head_dim) times the key of slot s; `heads` is a constant, so that the sums stay in registers. */
INLINE void score_slots(const int dtype, const int heads, const stretch *at, const float *q, quad *scores) {
    const int head_dim = at->head_dim;
    const float *scales = dtype == LM_INT8 ? at->k_scales + at->place / head_dim : NULL;
    size_t place = at->place;
    for (int s = 0; s < at->slots; s++, place += head_dim) {
        lanes sums[HEADS_AT_ONCE] = {{0}};
        int i = 0;
        for (; i + LANES <= head_dim; i += LANES) {
            const lanes key = load_lanes(dtype, at->k, place + i);
            for (int h = 0; h < heads; h++) {
                lanes other;
                memcpy(&other, q + (size_t)h * head_dim + i, sizeof other);
                sums[h] += key * other;
            }
        }
        for (; i < head_dim; i++)
            for (int h = 0; h < heads; h++) sums[h][0] += kept_at(dtype, at->k, place + i) * q[(size_t)h * head_dim + i];
        scores[s] = sums_of(sums);
        if (dtype == LM_INT8) scores[s] *= scales[s];
    }
}

/* The softmax of four heads' scores, which become its weights. */
static inline void weigh(quad *scores, int slots, quad *largest, quad *sum) {
    const quad none = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    quad most = none;
    for (int s = 0; s < slots; s++) most = select_quad(scores[s] > most, scores[s], most);
    for (int s = slots; s % 4; s++) scores[s] = most - 200; /* e^-87 is nothing beside the largest's 1 */
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

/* out[h] (head_dim) from element `i` on, `count` registers of it: the sum over slots of value times weights[s][h]. */
INLINE void mix_lanes(const int dtype, const int heads, const int count, const stretch *at, int i, const quad *weights,
                      part *const *out) {
    lanes sums[HEADS_AT_ONCE][2] = {{{0}}};
    for (int s = 0; s < at->slots; s++)
        for (int j = 0; j < count; j++) {
            const lanes value = load_lanes(dtype, at->v, at->place + (size_t)s * at->head_dim + i + j * LANES);
            for (int h = 0; h < heads; h++) sums[h][j] += value * weights[s][h];
        }
    for (int h = 0; h < heads; h++) memcpy(out[h]->mixture + i, sums[h], count * sizeof(lanes));
}

INLINE void mix_slots(const int dtype, const int heads, const stretch *at, const quad *weights, part *const *out) {
    int i = 0;
    for (; i + 2 * LANES <= at->head_dim; i += 2 * LANES) mix_lanes(dtype, heads, 2, at, i, weights, out);
    for (; i + LANES <= at->head_dim; i += LANES) mix_lanes(dtype, heads, 1, at, i, weights, out);
    for (; i < at->head_dim; i++)
        for (int h = 0; h < heads; h++) {
            float sum = 0;
            for (int s = 0; s < at->slots; s++)
                sum += kept_at(dtype, at->v, at->place + (size_t)s * at->head_dim + i) * weights[s][h];
            out[h]->mixture[i] = sum;
        }
}

/* What some query heads of one kv head see in a stretch. */
INLINE void attend_heads(const int dtype, const int heads, const stretch *at, const float *q, part *const *out) {
    quad scores[CHUNK], largest, sum;
    score_slots(dtype, heads, at, q, scores);
    weigh(scores, at->slots, &largest, &sum);
    for (int h = 0; h < heads; h++) {
        out[h]->largest = largest[h];
        out[h]->sum = sum[h];
    }
    if (dtype == LM_INT8)
        for (int s = 0; s < at->slots; s++) scores[s] *= at->v_scales[at->place / at->head_dim + s];
    mix_slots(dtype, heads, at, scores, out);
}

static void attend_stretch(int dtype, int heads, const stretch *at, const float *q, part *const *out) {
#define ATTEND(DTYPE, HEADS)                    \
    if (dtype == DTYPE && heads == HEADS) {     \
        attend_heads(DTYPE, HEADS, at, q, out); \
        return;                                 \
    }
#define ATTEND_ANY(DTYPE) ATTEND(DTYPE, 4) ATTEND(DTYPE, 3) ATTEND(DTYPE, 2) ATTEND(DTYPE, 1)
    ATTEND_ANY(LM_BFLOAT16) ATTEND_ANY(LM_FLOAT32) ATTEND_ANY(LM_INT8)
#undef ATTEND_ANY
#undef ATTEND
}

/* Add a later chunk to what is known of the earlier ones; always in this order, so that the sum is always the same. */
static void fold(part *known, const part *next, int head_dim) {
    const float largest = known->largest > next->largest ? known->largest : next->largest;
    const float a = exp_of(known->largest - largest), b = exp_of(next->largest - largest);
    known->sum = known->sum * a + next->sum * b;
    known->largest = largest;
    for (int i = 0; i < head_dim; i++) known->mixture[i] = known->mixture[i] * a + next->mixture[i] * b;
}
