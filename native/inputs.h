/* What products take: rows of tokens, normalised if they are hidden states, and rounded to 8 bits in groups of 32.
 *
 * With 16 bits what that leaves out is rounded to 8 bits again, with a scale of its own. These residuals are a row of inputs like any
 * other: a token has two rows then, whose products are added, always the one to the other. */
#include "numbers.h"
#include "pool.h"

/* Round a group of 32 numbers to 8 bits each. NaN and infinities make the scale NaN, and with it every result. `residual`, if
 * it is not NULL, is what the codes leave out. */
static inline void quantize_group(const float *x, lm_block *block, float *residual) {
    enum { COUNT = LM_GROUP / LANES };
    lanes values[COUNT];
    memcpy(values, x, sizeof values);
    lane_ints sizes = {0}, sums[2] = {{0}}, codes[COUNT];
    for (int i = 0; i < COUNT; i++) {
        const lane_ints size = (lane_ints)values[i] & 0x7fffffff; /* floats without signs are ordered as their bits are */
        sizes = select_ints(size > sizes, size, sizes);
    }
    const float largest = float_of(largest_of(sizes)), inverse = largest > 0 ? 127 / largest : 0;
    for (int i = 0; i < COUNT; i++) {
        codes[i] = nearest_codes(values[i] * inverse);
        sums[i / (COUNT / 2)] += codes[i];
    }
    int32_t all[LM_GROUP];
    memcpy(all, codes, sizeof all);
    for (int i = 0; i < LM_GROUP; i++) block->q[i] = (int8_t)all[i];
    const int32_t first = sum_of(sums[0]);
    block->scale = largest < INFINITY ? largest / 127 : NAN;
    block->first = (int16_t)first;
    block->sum = (int16_t)(first + sum_of(sums[1]));
    block->total = (float)block->sum * block->scale;
    if (residual == NULL) return;
    for (int i = 0; i < COUNT; i++) values[i] -= __builtin_convertvector(codes[i], lanes) * block->scale;
    memcpy(residual, values, sizeof values);
}

/* What RMSNorm multiplies a row of hidden states with, its weights apart. */
static inline float norm_factor(const lm_model *model, const float *row) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < model->hidden; i++) squares += row[i] * row[i];
    return 1 / sqrtf(squares / model->hidden + model->norm_eps);
}

/* What BF16 weights are multiplied with, as a type of its own, so that nobody takes it for floats as they lie: rounded to BF16 where
 * the processor multiplies that, else floats in the order in which `load_pair` has the weights. */
#ifdef __AVX512BF16__
typedef uint16_t bf16_input;
#else
typedef float bf16_input;
#endif
typedef struct {
    bf16_input *at;
} bf16_inputs;

static inline void put_bf16_group(const float *group, bf16_input *to) {
#ifdef __AVX512BF16__
    const __m512bh rounded = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(group + 16), _mm512_loadu_ps(group));
    memcpy(to, &rounded, sizeof rounded);
#else
    memcpy(to, group, LM_GROUP * sizeof(float));
    into_pairs(LM_BFLOAT16, to, LM_GROUP);
#endif
}

/* One stage's inputs, as the matrices want them; what no matrix wants is NULL. */
typedef struct {
    int groups;          /* cols / 32 */
    int parts;           /* of a packed matrix's inputs: 1 with 8 bits, 2 with 16 */
    lm_block *blocks;    /* (num_rows, parts, groups), for packed matrices: codes, and those of what they leave out */
    bf16_inputs bf16;    /* (num_rows, cols), for BF16 */
    float *floats;       /* (num_rows, cols), for F32 */
} inputs;

/* How many blocks a group of a packed matrix's inputs becomes. */
static inline int parts_of(int input_bits) { return input_bits == 16 ? 2 : 1; }

static inline void put_group(const float *group, inputs in, size_t row, int g) {
    const size_t place = row * in.groups + g;
    if (in.floats != NULL) memcpy(in.floats + place * LM_GROUP, group, LM_GROUP * sizeof(float));
    if (in.bf16.at != NULL) put_bf16_group(group, in.bf16.at + place * LM_GROUP);
    if (in.blocks == NULL) return;
    lm_block *block = &in.blocks[row * in.parts * in.groups + g];
    float residual[LM_GROUP];
    quantize_group(group, block, in.parts == 2 ? residual : NULL);
    if (in.parts == 2) quantize_group(residual, block + in.groups, NULL);
}

/* out (hidden): a row of hidden states, normalised; they may be the same. */
static inline void normalise(const lm_model *model, const void *norm, const float *x, float *out) {
    const float factor = norm_factor(model, x);
    for (int i = 0; i < model->hidden; i++) out[i] = x[i] * (factor * number_at(model->norm_dtype, norm, i));
}

/* This thread's share of (num_rows, cols) as inputs: the rows of x that `rows` names, all if it is NULL, normalised by `norm` of
 * `model` if there is one. */
static void prepare_inputs(lm_team team, const float *x, const int32_t *rows, int num_rows, int cols, const lm_model *model,
                           const void *norm, inputs in) {
    const int groups = cols / LM_GROUP, pieces = num_rows * groups;
    const int first = (int)((int64_t)pieces * team.index / team.count);
    const int end = (int)((int64_t)pieces * (team.index + 1) / team.count);
    const float *from = x;
    float factor = 1;
    for (int piece = first, row = -1; piece < end; piece++) {
        if (piece / groups != row) {
            row = piece / groups;
            from = x + (size_t)(rows != NULL ? rows[row] : row) * cols;
            if (norm != NULL) factor = norm_factor(model, from);
        }
        const int place = piece % groups * LM_GROUP;
        float group[LM_GROUP];
        memcpy(group, from + place, sizeof group);
        if (norm != NULL)
            for (int i = 0; i < LM_GROUP; i++) group[i] *= factor * number_at(model->norm_dtype, norm, (size_t)place + i);
        put_group(group, in, row, piece % groups);
    }
}
