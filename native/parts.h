/* The large parts of a set of kernels, which are compiled separately so that sets can share them: attention over the KV cache and within rows,
 * pointwise operations of training, float products and tile products. hatch_build.py defines from which set each set takes a part:
 * LM_ATTENTION, LM_ROW_ATTENTION, LM_POINTWISE, LM_FLOATS, LM_PRODUCTS.
 */
#ifndef LLAMARIUM_PARTS_H
#define LLAMARIUM_PARTS_H

#include "attention.h"
#include "inputs.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

/* attention.c: attention of `heads` query heads of one kv head over a chunk of the KV cache, for some rows. */
#define attend_chunk JOIN(lm_attend_, LM_ATTENTION)
void attend_chunk(int heads, const kv_chunk *at, const row_run *rows);

/* row_attention.c: see lm_attend_rows. */
#define attend_rows JOIN(lm_attend_rows_, LM_ROW_ATTENTION)
int attend_rows(const lm_row_attention *call, int32_t backward);

/* pointwise.c: see lm_compute_pointwise. */
#define compute_pointwise JOIN(lm_compute_pointwise_, LM_POINTWISE)
int compute_pointwise(const lm_pointwise *call);

/* pointwise.c: see lm_clip. */
#define clip JOIN(lm_clip_, LM_POINTWISE)
int clip(float *const *grads, const int64_t *counts, int32_t num_grads, double max_norm, double *norm);

/* floats.c: as `product` below, for the tokens from `m` on, a multiple of TOKENS. */
#define float_product JOIN(lm_float_product_, LM_FLOATS)
void float_product(const lm_matrix *w, int panel, int num_panels, inputs in, int m, int num_tokens, float *out);

typedef struct {
    /* For panel i of the `num_panels` from `panel` on: out + i * PANEL_STRIDE (num_rows, 16) = its 16 rows times `num_rows` rows of inputs.
     * `coming`, if not NULL, is the address of the panels that are multiplied next, for prefetching. */
    void (*product)(const lm_matrix *w, int panel, int num_panels, const uint8_t *coming, const lm_block *x, int num_rows, float *out);
    int prefetches_coming;   /* whether `coming` is used */
    void (*leave_job)(void); /* releases a thread's resources (AMX tiles) at the end of a job; or NULL */
} tile_products;

/* products.c */
#define TILES JOIN(lm_products_, LM_PRODUCTS)
extern const tile_products TILES;

#endif
