/* Attention over the cache: what queries see in at most CHUNK slots, and how chunks are put together.
 *
 * Included by ops.c after its numbers, and compiled with it once for each set of instructions.
 */
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
    float largest = 0, poison = 0;
#pragma omp simd reduction(max : largest) reduction(+ : poison)
    for (int i = 0; i < head_dim; i++) {
        const float size = fabsf(values[i]);
        largest = size > largest ? size : largest;
        poison += values[i] * 0.0f;
    }
    const float scale = largest / 127 + poison;
    for (int i = 0; i < head_dim; i++) {
        float wanted = scale > 0 ? values[i] / scale : 0;
        wanted = wanted < 127 ? wanted : 127; /* beyond it where the scale is subnormal, and itself rounded */
        wanted = wanted > -127 ? wanted : -127;
        codes[i] = (int8_t)((wanted + 12582912.0f) - 12582912.0f);
    }
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

typedef int8_t wide_bytes __attribute__((vector_size(16)));

static inline wide load_wide(int dtype, const void *from, size_t place) {
    wide values;
    if (dtype == LM_FLOAT32) {
        memcpy(&values, (const float *)from + place, sizeof values);
    } else if (dtype == LM_INT8) {
        wide_bytes bytes;
        memcpy(&bytes, (const int8_t *)from + place, sizeof bytes);
        values = __builtin_convertvector(__builtin_convertvector(bytes, wide_ints), wide);
    } else {
        wide_halves halves;
        memcpy(&halves, (const uint16_t *)from + place, sizeof halves);
        const wide_bits bits = __builtin_convertvector(halves, wide_bits) << 16;
        memcpy(&values, &bits, sizeof values);
    }
    return values;
}

static inline float sum_of(wide values) {
    typedef float eight __attribute__((vector_size(32)));
    typedef float four __attribute__((vector_size(16)));
    eight low, high;
    memcpy(&low, &values, sizeof low);
    memcpy(&high, (const char *)&values + sizeof low, sizeof high);
    low += high;
    four a, b;
    memcpy(&a, &low, sizeof a);
    memcpy(&b, (const char *)&low + sizeof a, sizeof b);
    a += b;
    return (a[0] + a[2]) + (a[1] + a[3]);
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

/* scores[h][s] = q[h] (head_dim) times the key of slot s; `heads` is a constant, so that the sums stay in registers. */
INLINE void score_slots(const int dtype, const int heads, const void *k, size_t place, int head_dim, int slots,
                        const float *q, float scores[HEADS_AT_ONCE][CHUNK]) {
    for (int s = 0; s < slots; s++, place += head_dim) {
        wide sums[HEADS_AT_ONCE] = {{0}};
        int i = 0;
        for (; i + 16 <= head_dim; i += 16) {
            const wide key = load_wide(dtype, k, place + i);
            for (int h = 0; h < heads; h++) {
                wide other;
                memcpy(&other, q + (size_t)h * head_dim + i, sizeof other);
                sums[h] += key * other;
            }
        }
        for (int h = 0; h < heads; h++) scores[h][s] = sum_of(sums[h]);
        for (; i < head_dim; i++)
            for (int h = 0; h < heads; h++) scores[h][s] += kept_at(dtype, k, place + i) * q[(size_t)h * head_dim + i];
    }
}

/* out[h] (head_dim) = the sum over slots of the slot's value times weights[h][s]. */
INLINE void mix_slots(const int dtype, const int heads, const void *v, size_t place, int head_dim, int slots,
                      float weights[HEADS_AT_ONCE][CHUNK], part *const *out) {
    int i = 0;
    for (; i + 16 <= head_dim; i += 16) {
        wide sums[HEADS_AT_ONCE] = {{0}};
        for (int s = 0; s < slots; s++) {
            const wide value = load_wide(dtype, v, place + (size_t)s * head_dim + i);
            for (int h = 0; h < heads; h++) sums[h] += value * weights[h][s];
        }
        for (int h = 0; h < heads; h++) memcpy(out[h]->mixture + i, &sums[h], sizeof sums[h]);
    }
    for (; i < head_dim; i++)
        for (int h = 0; h < heads; h++) {
            float sum = 0;
            for (int s = 0; s < slots; s++) sum += kept_at(dtype, v, place + (size_t)s * head_dim + i) * weights[h][s];
            out[h]->mixture[i] = sum;
        }
}

/* At most CHUNK slots of one kv head. */
typedef struct {
    const void *k, *v;
    const float *k_scales, *v_scales; /* of LM_INT8 only */
    size_t place;                     /* of the first slot's first element */
    int head_dim, slots;
} stretch;

static inline void scale_slots(const stretch *at, const float *scales, float *numbers) {
    const float *first = scales + at->place / at->head_dim;
    for (int s = 0; s < at->slots; s++) numbers[s] *= first[s];
}

/* The softmax of one head's scores, which become its weights. */
static inline void weigh(float scores[CHUNK], int slots, part *out) {
    float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
    for (int s = 0; s < slots; s++) largest = scores[s] > largest ? scores[s] : largest;
    wide sums = {0};
    for (int s = slots; s % 16; s++) scores[s] = largest - 200; /* e^-87 is nothing beside the largest's 1 */
    for (int s = 0; s < slots; s += 16) {
        wide here;
        memcpy(&here, scores + s, sizeof here);
        here = exp_below_zero(here - largest);
        memcpy(scores + s, &here, sizeof here);
        sums += here;
    }
    out->largest = largest;
    out->sum = sum_of(sums);
}

/* What some query heads of one kv head see in a stretch. */
INLINE void attend_heads(const int dtype, const int heads, const stretch *at, const float *q, part *const *out) {
    float scores[HEADS_AT_ONCE][CHUNK];
    score_slots(dtype, heads, at->k, at->place, at->head_dim, at->slots, q, scores);
    for (int h = 0; h < heads; h++) {
        if (dtype == LM_INT8) scale_slots(at, at->k_scales, scores[h]);
        weigh(scores[h], at->slots, out[h]);
        if (dtype == LM_INT8) scale_slots(at, at->v_scales, scores[h]);
    }
    mix_slots(dtype, heads, at->v, at->place, at->head_dim, at->slots, scores, out);
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
