/* What each set of kernels offers to the rest. */
#ifndef LLAMARIUM_OPS_H
#define LLAMARIUM_OPS_H

#include "llamarium.h"

/* A group of 32 inputs as integers: x = scale * code. Its outlier are the four inputs, 4 * outlier to 4 * outlier + 3, that the group's
 * largest one is among. They have codes of 16 bits, so that they do not make those of all others coarse, which have 8
 * (docs/decisions/0022). Of the scale's mantissa three bits are used, so that its product with a weight's scale is exact. */
typedef struct {
    int8_t q[LM_GROUP]; /* codes, of the outlier the low bits */
    int8_t high[4];     /* of the outlier: code = q + 256 * high */
    uint32_t outlier;
    float scale;
    float total;        /* of the inputs: scale * the sum of their codes */
    int32_t negated_sum, negated_halves[2]; /* of the codes, and of the first and the last 16: what a zero point of 1 adds */
} lm_block;

typedef struct {
    const char *name;
    int (*run)(const lm_model *, const lm_cache *, const lm_batch *, const lm_taps *, float *logits);
    int (*product)(const lm_matrix *, const float *x, int32_t num_rows, int32_t input_bits, float *y);
    int (*lookup)(const lm_matrix *, const int64_t *rows, int32_t num_rows, float *out);
    int (*choose)(const float *logits, int32_t num_rows, int32_t count, const lm_choice *how, int32_t *ids);
    int (*attend_rows)(const lm_row_attention *, int32_t backward);
    int (*compute_pointwise)(const lm_pointwise *);
    int (*clip)(float *const *grads, const int64_t *counts, int32_t num_grads, double max_norm, double *norm);
} lm_ops;

/* Which of them there are depends on the compiler and the processor: LM_HAS_AVX2 and so on, for dispatch.c. */
extern const lm_ops lm_ops_portable, lm_ops_avx2, lm_ops_avx_vnni, lm_ops_avx512_vnni, lm_ops_avx512_bf16, lm_ops_amx, lm_ops_neon_dotprod, lm_ops_neon_i8mm, lm_ops_simd128;

#endif
