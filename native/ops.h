/* What each set of kernels offers to the rest. */
#ifndef LLAMARIUM_OPS_H
#define LLAMARIUM_OPS_H

#include "llamarium.h"

/* A group of 32 inputs as 8-bit integers: x = scale * q. */
typedef struct {
    int8_t q[LM_GROUP];
    float scale;
    float total;        /* of the inputs: scale * sum */
    int16_t sum, first; /* of q, and of its first half */
} lm_block;

typedef struct {
    const char *name;
    int (*run)(const lm_model *, const lm_cache *, const lm_batch *, const lm_taps *, float *logits);
    int (*product)(const lm_matrix *, const float *x, int32_t num_rows, int32_t input_bits, float *y);
    int (*lookup)(const lm_matrix *, const int64_t *rows, int32_t num_rows, float *out);
    int (*choose)(const float *logits, int32_t num_rows, int32_t count, const lm_choice *how, int32_t *ids);
} lm_ops;

/* Which of them there are depends on the compiler and the processor: LM_HAS_AVX2 and so on, for dispatch.c. */
extern const lm_ops lm_ops_portable, lm_ops_avx2, lm_ops_avx512_vnni, lm_ops_avx512_bf16, lm_ops_amx, lm_ops_neon_dotprod, lm_ops_neon_i8mm;

#endif
