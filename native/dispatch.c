/* Run-time dispatch: find the best set of kernels that this machine can run, and forward every call to it.
 *
 * Each set is compiled from the same sources with other flags (hatch_build.py), and is one table of functions (ops.h). A set that the compiler
 * does not support is missing; LM_HAS_... says which are there. */
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "processor.h"
#include "tiles.h"

#ifdef LM_HAS_AMX
#include "amx.h"
static int has_amx(void) { return has_avx512_vnni() && may_use_amx(); }
#endif

static int always(void) { return 1; }

/* Return the kernels with this name, the best available ones for NULL; NULL if there are none or this machine cannot run them. */
static const lm_ops *find(const char *name) {
    static const struct {
        const lm_ops *ops;
        int (*runs_here)(void);
    } all[] = { /* best first */
#ifdef LM_HAS_AMX
        {&lm_ops_amx, has_amx},
#endif
#ifdef LM_HAS_AVX512_BF16
        {&lm_ops_avx512_bf16, has_avx512_bf16},
#endif
#ifdef LM_HAS_AVX512_VNNI
        {&lm_ops_avx512_vnni, has_avx512_vnni},
#endif
#ifdef LM_HAS_AVX_VNNI
        {&lm_ops_avx_vnni, has_avx_vnni},
#endif
#ifdef LM_HAS_AVX2
        {&lm_ops_avx2, has_avx2},
#endif
#ifdef LM_HAS_NEON_I8MM
        {&lm_ops_neon_i8mm, has_neon_i8mm},
#endif
#ifdef LM_HAS_NEON_DOTPROD
        {&lm_ops_neon_dotprod, has_neon_dotprod},
#endif
#ifdef LM_HAS_SIMD128 /* a WebAssembly module has exactly one set, as it cannot query the processor */
        {&lm_ops_simd128, always},
#else
        {&lm_ops_portable, always},
#endif
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if ((name == NULL || strcmp(name, all[i].ops->name) == 0) && all[i].runs_here()) return all[i].ops;
    return NULL;
}

static const lm_ops *_Atomic chosen; /* atomic, because several threads may make the first call */

int lm_use_kernels(const char *name) {
    const lm_ops *found = find(name);
    if (found == NULL) return 1;
    chosen = found;
    return 0;
}

static const lm_ops *ops(void) {
    if (chosen == NULL) lm_use_kernels(NULL);
    return chosen;
}

int32_t lm_interface(void) { return LM_INTERFACE; }

const char *lm_kernels(void) { return ops()->name; }

int lm_run(const lm_model *model, const lm_cache *cache, const lm_batch *batch, const lm_taps *taps, float *logits) {
    return ops()->run(model, cache, batch, taps, logits);
}

int lm_product(const lm_matrix *w, const float *x, int32_t num_rows, int32_t input_bits, float *y) {
    return ops()->product(w, x, num_rows, input_bits, y);
}

int lm_lookup(const lm_matrix *w, const int64_t *rows, int32_t num_rows, float *out) {
    return ops()->lookup(w, rows, num_rows, out);
}

int lm_choose(const float *logits, int32_t num_rows, int32_t count, const lm_choice *how, int32_t *ids) {
    return ops()->choose(logits, num_rows, count, how, ids);
}

int lm_attend_rows(const lm_row_attention *call, int32_t backward) { return ops()->attend_rows(call, backward); }

int lm_clip(float *const *grads, const int64_t *counts, int32_t num_grads, double max_norm, double *norm) {
    return ops()->clip(grads, counts, num_grads, max_norm, norm);
}

int lm_compute_pointwise(const lm_pointwise *call) { return ops()->compute_pointwise(call); }
