/* What products take: rows of tokens, normalised if they are hidden states, and rounded to 8 bits in groups of 32, outliers to 16.
 *
 * With 16 bits for all of them, what that leaves out is rounded once more, with a scale of its own. These residuals are a row of inputs
 * like any other: a token has two rows then, whose products are added, always the one to the other. */
#ifndef LLAMARIUM_INPUTS_H
#define LLAMARIUM_INPUTS_H

#include "numbers.h"
#include "pool.h"

#define MOST_CODE 127.0f
#define MOST_OUTLIER_CODE 32639.0f /* 127 + 256 * 127 */

/* Between these, a scale times a weight's, both of few bits, is rounded nowhere: products are neither subnormal nor infinite. */
#define LEAST_SCALE 0x1p-100f
#define MOST_SCALE 0x1p110f

enum { SIGNLESS = 0x7fffffff, FOUR_BITS = 7, BELOW_EIGHTHS = 0xfffff };

/* 7 - the number of the four that an input of a group is one of: so that of equal ones the first is found. */
static const int32_t FOUR_KEYS[LM_GROUP] = {
    7, 7, 7, 7, 6, 6, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4, 3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0};

/* How a group is rounded. */
typedef struct {
    float scale, inverse;  /* the scale is NaN if an input is NaN, infinite or too large */
    int outlier;           /* of lm_block */
} group_scale;

/* The scale in which the outlier has codes of 16 bits and all others of 8, rounded up to three bits of mantissa. Sizes are compared as
 * integers, since floats without signs are ordered as their bits are; a size's last three bits make room for its key. */
static inline group_scale scale_of(const lanes values[LM_GROUP / LANES]) {
    lane_ints keys[LM_GROUP / LANES];
    memcpy(keys, FOUR_KEYS, sizeof keys);
    for (int i = 0; i < LM_GROUP / LANES; i++) keys[i] |= (lane_ints)values[i] & (SIGNLESS - FOUR_BITS);
    const two_ints found = two_largest(keys);
    const float largest = float_of(found.first & (SIGNLESS - FOUR_BITS)), others = float_of(found.second & (SIGNLESS - FOUR_BITS));
    const float own = largest / MOST_OUTLIER_CODE, rest = others / MOST_CODE, needed = rest > own ? rest : own;
    if (!(needed <= MOST_SCALE)) return (group_scale){.scale = NAN};
    const uint32_t bits = (float_bits(needed > LEAST_SCALE ? needed : LEAST_SCALE) + BELOW_EIGHTHS) & ~BELOW_EIGHTHS;
    const float scale = float_of(bits);
    return (group_scale){scale, 1 / scale, FOUR_BITS - (found.first & FOUR_BITS)};
}

/* An outlier's codes. The low byte of none is -128, whose sign AVX2 cannot turn. */
static inline quad_ints outlier_codes(quad values, float inverse) {
    const quad_ints codes = nearest_four(values * inverse);
    return codes - ((codes & 255) == 128);
}

/* Round a group of 32 inputs. NaN and infinities make the scale NaN, and with it every result. `residual`, if it is not NULL, is what the
 * codes leave out. */
static inline void quantize_group(const float *x, lm_block *block, float *residual) {
    enum { COUNT = LM_GROUP / LANES };
    lanes values[COUNT];
    lane_ints keys[COUNT], codes[COUNT], sums[2] = {{0}};
    memcpy(values, x, sizeof values);
    memcpy(keys, FOUR_KEYS, sizeof keys);
    const group_scale s = scale_of(values);
    if (isnan(s.scale)) {
        *block = (lm_block){.scale = NAN, .total = NAN};
        if (residual != NULL) memset(residual, 0, LM_GROUP * sizeof(float));
        return;
    }
    for (int i = 0; i < COUNT; i++) { /* the outlier's places stay 0 here */
        values[i] = (lanes)((lane_ints)values[i] & (keys[i] != FOUR_BITS - s.outlier));
        codes[i] = nearest_ints(values[i] * s.inverse);
        sums[i / (COUNT / 2)] += codes[i];
        values[i] -= __builtin_convertvector(codes[i], lanes) * s.scale;
    }
    put_low_bytes(codes, block->q);
    if (residual != NULL) memcpy(residual, values, sizeof values);

    quad four;
    memcpy(&four, x + 4 * s.outlier, sizeof four);
    const quad_ints own = outlier_codes(four, s.inverse);
    const int32_t low = low_bytes_of(own), high = low_bytes_of((own + 128) >> 8);
    memcpy(block->q + 4 * s.outlier, &low, sizeof low);
    memcpy(block->high, &high, sizeof high);
    four -= __builtin_convertvector(own, quad) * s.scale;
    if (residual != NULL) memcpy(residual + 4 * s.outlier, &four, sizeof four);

    const int32_t sum = (own[0] + own[2]) + (own[1] + own[3]);
    const two_ints halves = sums_of_two(sums);
    block->outlier = (uint32_t)s.outlier;
    block->scale = s.scale;
    block->negated_halves[0] = -halves.first - (s.outlier < 4 ? sum : 0);
    block->negated_halves[1] = -halves.second - (s.outlier < 4 ? 0 : sum);
    block->negated_sum = block->negated_halves[0] + block->negated_halves[1];
    block->total = (float)-block->negated_sum * s.scale;
}

/* What RMSNorm multiplies a row with, its weights apart: 1 / the root of its mean square. In float64, in which squares are exact: what is
 * rounded here all numbers share, and attention's scores square it (docs/decisions/0044). NaN, not 0, if float32 cannot hold the squares. */
INLINE float inverse_root(const int dtype, const void *from, size_t place, int count, float eps) {
    double sums[16] = {0}, sum = 0;
    int i = 0;
    for (; i + 16 <= count; i += 16)
        for (int j = 0; j < 16; j++) sums[j] += (double)number_at(dtype, from, place + i + j) * number_at(dtype, from, place + i + j);
    for (; i < count; i++) sums[i % 16] += (double)number_at(dtype, from, place + i) * number_at(dtype, from, place + i);
    for (int j = 0; j < 16; j++) sum += sums[j];
    return (float)(1 / sqrt(sum / count + eps)) + 0 * (float)sum;
}

static inline float norm_factor(const lm_model *model, const float *row) {
    return inverse_root(LM_FLOAT32, row, 0, model->hidden, model->norm_eps);
}

/* What BF16 weights are multiplied with, as a type of its own, so that it is never read as plain floats: rounded to BF16 where
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

/* Tokens that a product of floats takes together: as many as there are registers for their totals. */
#if LANES == 16 || defined __ARM_NEON
#define TOKENS 6
#else
#define TOKENS 3
#endif

/* One stage's inputs, in the matrices' forms; one that no matrix takes is NULL. The last group is filled up with zeros. Inputs of
 * floats lie in panels of TOKENS rows, the last one of the rest: (groups, rows of the panel, 32) each. */
typedef struct {
    int num_rows, groups; /* (cols + 31) / 32 */
    int parts;            /* of a packed matrix's inputs: 1 with 8 bits, 2 with 16 */
    lm_block *blocks;     /* (num_rows, parts, groups), for packed matrices: codes, and those of what they leave out */
    bf16_inputs bf16;     /* in panels, for BF16 */
    float *floats;        /* in panels, for F32 and F16 */
    float *plain;         /* (num_rows, 32 * groups), for adapters */
} inputs;

/* What a matrix's numbers are. */
static inline int dtype_of(const lm_matrix *w) {
    return w->kind == LM_BF16 ? LM_BFLOAT16 : w->kind == LM_F16 ? LM_FLOAT16 : LM_FLOAT32;
}

static inline int is_float(const lm_matrix *w) { return w->kind == LM_BF16 || w->kind == LM_F16 || w->kind == LM_F32; }

static inline int groups_of(int cols) { return (cols + LM_GROUP - 1) / LM_GROUP; }

/* Where a row's group lies in panels. */
static inline size_t place_in_panels(const inputs *in, size_t row, int g) {
    const size_t first = row / TOKENS * TOKENS, left = in->num_rows - first, width = left < TOKENS ? left : TOKENS;
    return (first * in->groups + g * width + (row - first)) * LM_GROUP;
}

/* How many blocks a group of a packed matrix's inputs becomes. */
static inline int parts_of(int input_bits) { return input_bits == 16 ? 2 : 1; }

static inline void put_group(const float *group, inputs in, size_t row, int g) {
    if (in.plain != NULL) memcpy(in.plain + (row * in.groups + g) * LM_GROUP, group, LM_GROUP * sizeof(float));
    if (in.floats != NULL) memcpy(in.floats + place_in_panels(&in, row, g), group, LM_GROUP * sizeof(float));
    if (in.bf16.at != NULL) put_bf16_group(group, in.bf16.at + place_in_panels(&in, row, g));
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

/* A group, of which `count` are there, a constant where it is whole; normalised if there is a norm. */
INLINE void take_group(const float *from, const int count, const lm_model *model, const void *norm, size_t place, float factor, float *group) {
    memcpy(group, from, count * sizeof(float));
    if (norm != NULL)
        for (int i = 0; i < count; i++) group[i] *= factor * number_at(model->norm_dtype, norm, place + i);
    for (int i = count; i < LM_GROUP; i++) group[i] = 0;
}

/* This thread's share of (num_rows, cols) as inputs: the rows of x that `rows` names, all if it is NULL, normalised by `norm` of
 * `model` if there is one. */
static inline void prepare_inputs(lm_team team, const float *x, const int32_t *rows, int num_rows, int cols, const lm_model *model,
                           const void *norm, inputs in) {
    const int groups = groups_of(cols), pieces = num_rows * groups;
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
        if (place + LM_GROUP <= cols)
            take_group(from + place, LM_GROUP, model, norm, place, factor, group);
        else
            take_group(from + place, cols - place, model, norm, place, factor, group);
        put_group(group, in, row, piece % groups);
    }
}

#endif
