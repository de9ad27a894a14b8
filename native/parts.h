/* The parts of a set of kernels that are compiled by themselves, since they are large: attention, over the cache and
 * over rows, what training computes between products, products of floats, and products of tiles. Sets that have one in
 * common share it. hatch_build.py says from which set each set takes them: LM_ATTENTION, LM_ROW_ATTENTION,
 * LM_POINTWISE, LM_FLOATS, LM_PRODUCTS.
 */
#ifndef LLAMARIUM_PARTS_H
#define LLAMARIUM_PARTS_H

#include "attention.h"
#include "inputs.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

/* attention.c: what `heads` query heads of one kv head see in a chunk, for each of some rows. */
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

/* floats.c: as `product` below, of rows of tokens from `m` on, a multiple of TOKENS. */
#define float_product JOIN(lm_float_product_, LM_FLOATS)
void float_product(const lm_matrix *w, int panel, int num_panels, inputs in, int m, int num_tokens, float *out);

typedef struct {
    /* Panel i of `num_panels` from `panel` on: out + i * PANEL_STRIDE (num_rows, 16) = its 16 rows times `num_rows` rows of inputs. `coming`,
     * if it is not NULL, is where as many panels begin that are multiplied next. */
    void (*product)(const lm_matrix *w, int panel, int num_panels, const uint8_t *coming, const lm_block *x, int num_rows, float *out);
    int prefetches_coming;   /* whether `coming` is prefetched */
    void (*leave_job)(void); /* gives back what a thread has taken, at the end of a job; NULL: nothing */
} tile_products;

/* products.c */
#define TILES JOIN(lm_products_, LM_PRODUCTS)
extern const tile_products TILES;

#endif
