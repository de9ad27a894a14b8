/* From weights to GGUF's blocks. src/llamarium/quant/ggml/encode.py and encode_k.py say how scales are found and why; this is
 * the same arithmetic, to the bit. So nothing is fused here (-ffp-contract=off), and sums have the order that they have there. */
#include <math.h>

#include "blocks.h"
#include "pool.h"

#define WEIGHTS_OF_A_PIECE 65536

/* --- blocks of 32 ------------------------------------------------------------------------------------------------ */

static float16 halved(float value) {
    const uint16_t bits = to_half(value);
    float16 half;
    memcpy(&half, &bits, 2);
    return half;
}

static float inverse_of(float step) { return step == 0 ? 0 : 1 / step; }

/* Cut down to a whole number from 0 to `high`; what is no number becomes 0. */
INLINE uint8_t whole(float value, float high) { return (uint8_t)(value > 0 ? value < high ? value : high : 0); }

INLINE void encode_q8_0(const float *x, void *out) {
    block_q8_0 *to = out;
    float largest = 0;
    for (int i = 0; i < LM_GROUP; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    const float step = largest / 127, inverse = inverse_of(step);
    to->d = halved(step);
    for (int i = 0; i < LM_GROUP; i++) { /* to the nearest, halves away from zero */
        const float scaled = x[i] * inverse, size = fabsf(scaled);
        const uint8_t down = whole(size, 127), code = (uint8_t)(down + whole(2 * (size - down), 1));
        to->q[i] = scaled < 0 ? (uint8_t)-code : code;
    }
}

/* The largest weight, of either sign, is the lowest of 2 `half` levels. */
INLINE float codes_around_zero(const float *x, int half, uint8_t *codes) {
    float largest = x[0];
    for (int i = 1; i < LM_GROUP; i++) largest = fabsf(x[i]) > fabsf(largest) ? x[i] : largest;
    const float step = largest / (float)-half, inverse = inverse_of(step);
    for (int i = 0; i < LM_GROUP; i++)
        codes[i] = whole(x[i] * inverse + ((float)half + 0.5f), (float)(2 * half - 1));
    return step;
}

INLINE void put_nibbles(const uint8_t *codes, uint8_t *to) {
    for (int i = 0; i < 16; i++) to[i] = (uint8_t)((codes[i] & 15) | codes[16 + i] << 4);
}

INLINE void encode_q4_0(const float *x, void *out) {
    block_q4_0 *to = out;
    uint8_t codes[LM_GROUP];
    to->d = halved(codes_around_zero(x, 8, codes));
    put_nibbles(codes, to->q);
}

INLINE void encode_q5_0(const float *x, void *out) {
    block_q5_0 *to = out;
    uint8_t codes[LM_GROUP];
    to->d = halved(codes_around_zero(x, 16, codes));
    memset(to->high, 0, sizeof to->high);
    for (int i = 0; i < LM_GROUP; i++) to->high[i / 8] |= (uint8_t)(codes[i] >> 4 << i % 8);
    put_nibbles(codes, to->low);
}

INLINE void encode_q4_1(const float *x, void *out) {
    block_q4_1 *to = out;
    uint8_t codes[LM_GROUP];
    float low = x[0], high = x[0];
    for (int i = 1; i < LM_GROUP; i++) low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
    const float step = (high - low) / 15, inverse = inverse_of(step);
    for (int i = 0; i < LM_GROUP; i++) codes[i] = whole((x[i] - low) * inverse + 0.5f, 15);
    to->d = halved(step), to->m = halved(low);
    put_nibbles(codes, to->q);
}

/* The levels of IQ4_NL that are nearest to `x` times `inverse`, and their codes. */
INLINE void nearest_levels(const float *x, float inverse, uint8_t *codes, float *levels) {
    static const float LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    int32_t counts[LM_GROUP];
    for (int i = 0; i < LM_GROUP; i++) counts[i] = 0;
    for (int k = 0; k < 15; k++) {
        const float midpoint = (LEVELS[k] + LEVELS[k + 1]) / 2;
        for (int i = 0; i < LM_GROUP; i++) counts[i] += x[i] * inverse > midpoint;
    }
    for (int i = 0; i < LM_GROUP; i++) codes[i] = (uint8_t)counts[i], levels[i] = LEVELS[counts[i]];
}

/* The step, of either sign, of least squared error; errors count by the weights' squares. */
INLINE void encode_iq4_nl(const float *x, void *out) {
    block_iq4_nl *to = out;
    uint8_t codes[LM_GROUP];
    float levels[LM_GROUP], largest = x[0];
    for (int i = 1; i < LM_GROUP; i++) largest = fabsf(x[i]) > fabsf(largest) ? x[i] : largest;
    const float inverse = inverse_of(largest);
    float step = largest / -127, best = -INFINITY;
    for (int shift = -7; shift <= 7; shift++) {
        nearest_levels(x, inverse * (-127 + (float)shift), codes, levels);
        float squares = 0, products = 0;
        for (int i = 0; i < LM_GROUP; i++) {
            const float weighted = x[i] * x[i] * levels[i];
            squares += weighted * levels[i], products += weighted * x[i];
        }
        const float gain = squares > 0 ? products * products / squares : 0;
        if (!(gain > best)) continue;
        best = gain;
        if (squares > 0) step = products / squares;
    }
    to->d = halved(step);
    nearest_levels(x, inverse_of(half_at(&to->d, 0)), codes, levels);
    put_nibbles(codes, to->q);
}

/* --- the K types: 16 lanes of 16 weights -------------------------------------------------------------------------- */

#define LANES 16
#define LANE 16
#define ONE_BY_ONE _Pragma("GCC unroll 1") /* before a loop around such lanes, of which compilers would write out all rounds */

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t masks __attribute__((vector_size(4 * LANES)));

#ifdef __clang__
#define OTHER_LANE(v) __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#else
#define OTHER_LANE(v) __builtin_shuffle(v, (masks){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14})
#endif

INLINE lanes all(float value) { return value - (lanes){0}; } /* less 0, which leaves the sign of a 0 */

INLINE lanes either(masks which, lanes yes, lanes no) { return (lanes)(((masks)yes & which) | ((masks)no & ~which)); }
INLINE lanes smaller(lanes a, lanes b) { return either(a < b, a, b); }
INLINE lanes larger(lanes a, lanes b) { return either(a > b, a, b); }
INLINE lanes size_of(lanes v) { return (lanes)((masks)v & INT32_MAX); }

/* The two lanes of a sub-block together, in both. */
INLINE lanes both(lanes v) { return v + OTHER_LANE(v); }

/* Round to whole numbers, halves to even; what is no number becomes `low`. From 2^23 on a float has no fraction. */
INLINE lanes between(lanes v, float low, float high) {
    const float shift = 12582912; /* 1.5 * 2^23 */
    return smaller(larger(v, all(low)), all(high)) + shift - shift;
}

INLINE lanes ratio(lanes v, lanes step) { return either(step == 0, all(0), v / step); }

/* One after the other. */
INLINE float sum_of(lanes v) {
    float total = v[0];
    for (int l = 1; l < LANES; l++) total += v[l];
    return total;
}

/* Weight i of lane l is weight 16 l + i of the block: x[i][l]. */
typedef struct {
    lanes x[LANE], w[LANE]; /* weights, and how much their errors count */
    lanes s, t;             /* x = d * s * q - m * t */
    float d, m;
} search;

INLINE void begin_search(const float *from, int has_offsets, search *b) {
    ONE_BY_ONE for (int i = 0; i < LANE; i++)
        for (int l = 0; l < LANES; l++) b->x[i][l] = from[l * LANE + i];
    lanes power = all(0), root;
    for (int i = 0; i < LANE; i++) power += b->x[i] * b->x[i];
    power = has_offsets ? both(power) / (2 * LANE) : power / LANE;
    for (int l = 0; l < LANES; l++) root[l] = sqrtf(power[l]);
    for (int i = 0; i < LANE; i++) b->w[i] = root + size_of(b->x[i]);
}

/* --- a step and an offset for each sub-block of two lanes */

typedef struct {
    lanes step, offset, gain; /* the best so far; how much of the sum of squares is no error */
} line;

/* Solve for the line of least squared error through codes times `inverse`, counted from `least`. */
INLINE void try_line(const search *b, lanes least, lanes inverse, float high, lanes sum_w, lanes sum_x, line *best) {
    lanes sum_q = all(0), sum_qq = all(0), sum_qx = all(0);
    for (int i = 0; i < LANE; i++) {
        const lanes q = between((b->x[i] - least) * inverse, 0, high), wq = b->w[i] * q;
        sum_q += wq, sum_qq += wq * q, sum_qx += wq * b->x[i];
    }
    sum_q = both(sum_q), sum_qq = both(sum_qq), sum_qx = both(sum_qx);
    const lanes spread = sum_w * sum_qq - sum_q * sum_q;
    lanes slope = (sum_w * sum_qx - sum_x * sum_q) / spread, start = (sum_qq * sum_x - sum_q * sum_qx) / spread;
    const masks above = start > 0; /* which a block cannot say; then the line goes through zero */
    slope = either(above, sum_qx / sum_qq, slope), start = either(above, all(0), start);
    const lanes gain = slope * sum_qx + start * sum_x;
    const masks better = (spread > 1e-5f * (sum_w * sum_qq)) & (slope > 0) & (gain > best->gain);
    best->step = either(better, slope, best->step);
    best->offset = either(better, -start, best->offset);
    best->gain = either(better, gain, best->gain);
}

INLINE void fit_lines(float high, search *b) {
    lanes least = b->x[0], most = b->x[0], sum_w = all(0), sum_x = all(0);
    for (int i = 0; i < LANE; i++) {
        least = smaller(least, b->x[i]), most = larger(most, b->x[i]);
        sum_w += b->w[i], sum_x += b->w[i] * b->x[i];
    }
    least = smaller(least, OTHER_LANE(least)), most = larger(most, OTHER_LANE(most));
    least = either(least < 0, least, all(0));
    sum_w = both(sum_w), sum_x = both(sum_x);
    const lanes inverse = ratio(all(1), most - least);
    line best = {(most - least) / high, -least, all(-INFINITY)};
    ONE_BY_ONE for (int k = -8; k < 7; k++) { /* and twice what is best so far */
        const lanes from = k < 5 ? least : -best.offset, by = k < 5 ? inverse * (high + (float)k / 4) : ratio(all(1), best.step);
        try_line(b, from, by, high, sum_w, sum_x, &best);
    }
    float step = best.step[0], offset = best.offset[0];
    for (int l = 0; l < LANES; l++) {
        step = best.step[l] > step ? best.step[l] : step;
        offset = best.offset[l] > offset ? best.offset[l] : offset;
    }
    b->d = step / 63, b->m = offset / 63;
    b->s = between(ratio(best.step, all(b->d)), 0, 63), b->t = between(ratio(best.offset, all(b->m)), 0, 63);
}

/* --- a step for each lane */

INLINE void fit_steps(search *b) {
    lanes largest = b->x[0], gain = all(0);
    for (int i = 1; i < LANE; i++) largest = either(size_of(b->x[i]) > size_of(largest), b->x[i], largest);
    lanes step = largest / -32;
    const lanes inverse = ratio(all(1), largest);
    ONE_BY_ONE for (int k = -2; k < 9; k++) {
        const lanes scale = inverse * ((float)k / 4 - 32);
        lanes sum_qq = all(0), sum_qx = all(0);
        for (int i = 0; i < LANE; i++) {
            const lanes q = between(b->x[i] * scale, -32, 31), wq = b->w[i] * q;
            sum_qq += wq * q, sum_qx += wq * b->x[i];
        }
        const lanes found = sum_qx * sum_qx / sum_qq;
        const masks better = found > gain;
        step = either(better, sum_qx / sum_qq, step), gain = either(better, found, gain);
    }
    float top = step[0];
    for (int l = 1; l < LANES; l++) top = fabsf(step[l]) > fabsf(top) ? step[l] : top;
    b->d = top / -128, b->m = 0;
    b->s = between(ratio(step, all(b->d)), -128, 127), b->t = all(0);
}

/* --- both */

INLINE void find_codes(const search *b, float low, float high, lanes *codes) {
    const lanes step = b->d * b->s, offset = b->m * b->t;
    for (int i = 0; i < LANE; i++) codes[i] = between(ratio(b->x[i] + offset, step), low, high);
}

/* Solve for the d and m of least squared error; where there are none, those that are there stay. */
INLINE void refit(const lanes *codes, search *b) {
    lanes sum_aa = all(0), sum_at = all(0), sum_tt = all(0), sum_ax = all(0), sum_tx = all(0);
    for (int i = 0; i < LANE; i++) {
        const lanes a = b->s * codes[i], wa = b->w[i] * a, wt = b->w[i] * b->t;
        sum_aa += wa * a, sum_at += wa * b->t, sum_tt += wt * b->t, sum_ax += wa * b->x[i], sum_tx += wt * b->x[i];
    }
    const float aa = sum_of(sum_aa), at = sum_of(sum_at), tt = sum_of(sum_tt), ax = sum_of(sum_ax), tx = sum_of(sum_tx);
    const float det = aa * tt - at * at;
    const float d = tt == 0 ? ax / aa : (ax * tt - tx * at) / det, m = tt == 0 ? b->m : (ax * at - tx * aa) / det;
    if ((tt == 0 || det > 1e-5f * (aa * tt)) && d * b->d > 0 && m >= 0) b->d = d, b->m = m;
}

/* Codes from 0 on, s and t, and the halves d and m. */
INLINE search encode_super(const float *from, int has_offsets, float low, float high, uint8_t *codes, float16 *d, float16 *m) {
    search b;
    lanes q[LANE];
    begin_search(from, has_offsets, &b);
    if (has_offsets) fit_lines(high, &b);
    else fit_steps(&b);
    ONE_BY_ONE for (int k = 0; k < 3; k++) {
        if (k == 2) {
            *d = halved(b.d + 0.0f), *m = halved(b.m + 0.0f); /* + 0: no zero has a sign */
            b.d = half_at(d, 0), b.m = half_at(m, 0);
        }
        find_codes(&b, low, high, q);
        if (k < 2) refit(q, &b);
    }
    ONE_BY_ONE for (int i = 0; i < LANE; i++)
        for (int l = 0; l < LANES; l++) codes[l * LANE + i] = (uint8_t)(q[i][l] - low);
    return b;
}

/* The first `run` of some fields are the lowest bits of `run` bytes, the next those above, and so on. */
INLINE void put_fields(const uint8_t *codes, int shift, int bits, int run, uint8_t *to) {
    const int fields = 8 / bits;
    for (int i = 0; i < LM_SUPER / fields; i++) {
        int byte = 0;
        for (int f = 0; f < fields; f++) byte |= (codes[(i / run * fields + f) * run + i % run] >> shift & ((1 << bits) - 1)) << f * bits;
        to[i] = (uint8_t)byte;
    }
}

INLINE void put_six_bits_of(const search *b, uint8_t *to) {
    for (int g = 0; g < 4; g++) {
        const int s = (int)b->s[2 * g], t = (int)b->t[2 * g], late_s = (int)b->s[2 * g + 8], late_t = (int)b->t[2 * g + 8];
        to[g] = (uint8_t)(s | late_s >> 4 << 6);
        to[4 + g] = (uint8_t)(t | late_t >> 4 << 6);
        to[8 + g] = (uint8_t)((late_s & 15) | (late_t & 15) << 4);
    }
}

INLINE void encode_q4_k(const float *x, void *out) {
    block_q4_k *to = out;
    uint8_t codes[LM_SUPER];
    const search b = encode_super(x, 1, 0, 15, codes, &to->d, &to->m);
    put_six_bits_of(&b, to->small);
    put_fields(codes, 0, 4, 32, to->low);
}

INLINE void encode_q5_k(const float *x, void *out) {
    block_q5_k *to = out;
    uint8_t codes[LM_SUPER];
    const search b = encode_super(x, 1, 0, 31, codes, &to->d, &to->m);
    put_six_bits_of(&b, to->small);
    put_fields(codes, 4, 1, 32, to->high);
    put_fields(codes, 0, 4, 32, to->low);
}

INLINE void encode_q6_k(const float *x, void *out) {
    block_q6_k *to = out;
    uint8_t codes[LM_SUPER];
    float16 none;
    const search b = encode_super(x, 0, -32, 31, codes, &to->d, &none);
    for (int l = 0; l < LANES; l++) to->s[l] = (int8_t)b.s[l];
    put_fields(codes, 0, 4, 64, to->low);
    put_fields(codes, 4, 2, 32, to->high);
}

/* --- all ---------------------------------------------------------------------------------------------------------- */

/* A function for each type and width of registers: the bytes are equal for all widths, and the time is not. All types in one function
 * would take a compiler twice as long. */
#define ENCODER(SET, TYPE, KIND)                                                                            \
    static void SET##_##TYPE(int64_t count, const float *x, uint8_t *blocks) {                              \
        const size_t bytes = tile_bytes(KIND) / LM_TILE_ROWS;                                               \
        for (int64_t i = 0; i < count; i++) encode_##TYPE(x + i * tile_cols(KIND), blocks + (size_t)i * bytes); \
    }
#define EACH_TYPE(DO, SET)                                                                              \
    DO(SET, q8_0, LM_Q8_0) DO(SET, q4_0, LM_Q4_0) DO(SET, q4_1, LM_Q4_1) DO(SET, q5_0, LM_Q5_0)          \
    DO(SET, iq4_nl, LM_IQ4_NL) DO(SET, q4_k, LM_Q4_K) DO(SET, q5_k, LM_Q5_K) DO(SET, q6_k, LM_Q6_K)
#define ENTRY(SET, TYPE, KIND) [KIND] = SET##_##TYPE,
#define TABLE(SET) static const encoder SET[] = {EACH_TYPE(ENTRY, SET)}

typedef void (*encoder)(int64_t count, const float *x, uint8_t *blocks);

#define ANYWHERE(SET, TYPE, KIND) FOR_OLD ENCODER(SET, TYPE, KIND)
#if defined __x86_64__ && !defined __clang__ /* for processors before AVX2: unrolled it takes four times the room */
#define FOR_OLD __attribute__((optimize("O2")))
#else
#define FOR_OLD
#endif
EACH_TYPE(ANYWHERE, anywhere)
TABLE(anywhere);

#ifdef __x86_64__
#define AVX2(SET, TYPE, KIND) __attribute__((target("avx2"))) ENCODER(SET, TYPE, KIND)
#define AVX512(SET, TYPE, KIND) __attribute__((target("avx512f,avx512bw,avx512dq"))) ENCODER(SET, TYPE, KIND)
EACH_TYPE(AVX2, avx2)
TABLE(avx2);
EACH_TYPE(AVX512, avx512)
TABLE(avx512);
#endif

typedef struct {
    encoder encode;
    int kind;
    int64_t count; /* blocks */
    const float *x;
    uint8_t *blocks;
    atomic_int next;
} encoding;

static void encode_pieces(void *context, lm_team team) {
    (void)team;
    encoding *e = context;
    const int cols = tile_cols(e->kind);
    const int64_t piece = WEIGHTS_OF_A_PIECE / cols;
    const size_t bytes = tile_bytes(e->kind) / LM_TILE_ROWS;
    for (int64_t first; (first = lm_next(&e->next) * piece) < e->count;) {
        const int64_t count = e->count - first < piece ? e->count - first : piece;
        e->encode(count, e->x + first * cols, e->blocks + (size_t)first * bytes);
    }
}

static int is_encoded(int kind) {
    switch (kind) {
    case LM_Q8_0: case LM_Q4_0: case LM_Q4_1: case LM_Q5_0: case LM_IQ4_NL: case LM_Q4_K: case LM_Q5_K: case LM_Q6_K: return 1;
    default: return 0;
    }
}

int lm_encode(int32_t kind, int64_t num_blocks, const float *x, uint8_t *blocks) {
    if (!is_encoded(kind)) return LM_NO_TILES;
    encoding e = {.encode = anywhere[kind], .kind = kind, .count = num_blocks, .x = x, .blocks = blocks};
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2")) e.encode = avx2[kind];
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
        e.encode = avx512[kind];
#endif
    lm_enter();
    lm_parallel(encode_pieces, &e);
    lm_leave();
    return LM_OK;
}
