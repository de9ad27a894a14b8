/* Which kernels this machine can run. */
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "ops.h"

#if defined(__x86_64__)
#include <cpuid.h>
#define CPU_HAS(feature) (__builtin_cpu_supports(feature) != 0)
#ifdef LM_HAS_AVX2
static int cpu_has_f16c(void) { /* a name that clang and older versions of gcc do not know */
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
#endif
#elif defined(__linux__)
#include <sys/auxv.h>
#define CPU_HAS_DOTPROD ((getauxval(AT_HWCAP) >> 20) & 1) /* HWCAP_ASIMDDP */
#else
#define CPU_HAS_DOTPROD 1 /* every Mac with an Arm processor */
#endif

/* The kernels of this name, or the best there are for NULL; NULL if this machine has no such kernels. */
static const lm_ops *find(const char *name) {
    const struct {
        const lm_ops *ops;
        int runs_here;
    } all[] = { /* the best first, of those that the compiler knew */
#ifdef LM_HAS_AVX512_VNNI
        {&lm_ops_avx512_vnni, CPU_HAS("avx512f") && CPU_HAS("avx512bw") && CPU_HAS("avx512vl") && CPU_HAS("avx512dq") &&
                                  CPU_HAS("avx512vnni")},
#endif
#ifdef LM_HAS_AVX2
        {&lm_ops_avx2, CPU_HAS("avx2") && CPU_HAS("fma") && cpu_has_f16c()},
#endif
#ifdef LM_HAS_NEON_DOTPROD
        {&lm_ops_neon_dotprod, CPU_HAS_DOTPROD},
#endif
        {&lm_ops_portable, 1},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].runs_here && (name == NULL || strcmp(name, all[i].ops->name) == 0)) return all[i].ops;
    return NULL;
}

static const lm_ops *_Atomic chosen; /* several threads may be the first to ask */

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

int lm_forward(const lm_model *model, const lm_cache *cache, const lm_place *places, int32_t num_rows, float *hidden) {
    return ops()->forward(model, cache, places, num_rows, hidden);
}

int lm_product(const lm_matrix *w, const float *x, int32_t num_rows, float *y) {
    return ops()->product(w, x, num_rows, y);
}

int lm_lookup(const lm_matrix *w, const int64_t *rows, int32_t num_rows, float *out) {
    return ops()->lookup(w, rows, num_rows, out);
}
