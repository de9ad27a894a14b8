/* Multiply-adds from registers alone, as many as a core gives: what bench/floats.py compares with. */
#include <stdint.h>
#include <time.h>

#if defined __AVX512F__
#define LANES 16
#define CHAINS 24
#elif defined __AVX__
#define LANES 8
#define CHAINS 12
#else
#define LANES 4
#define CHAINS 12
#endif
typedef float lanes __attribute__((vector_size(4 * LANES)));

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#if defined __x86_64__
#define OPAQUE(VALUE) __asm__ volatile("" : "+v"(VALUE))
#else
#define OPAQUE(VALUE) __asm__ volatile("" : "+w"(VALUE))
#endif

/* Billions of multiply-adds a second in one thread, of float32, or of pairs of bfloat16 where the processor multiplies those. */
double peak(int of_bfloat16) {
    lanes totals[CHAINS] = {{0}}, a = {0}, b = {0};
    struct timespec begin, end;
    const int64_t rounds = 2000000;
    for (int k = 0; k < CHAINS; k++) OPAQUE(totals[k]); /* no two are the same */
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
    for (int64_t i = 0; i < rounds; i++) {
        OPAQUE(a);
        OPAQUE(b);
#pragma GCC unroll 24
        for (int k = 0; k < CHAINS; k++) {
#ifdef __AVX512BF16__
            if (of_bfloat16) {
                totals[k] = (lanes)_mm512_dpbf16_ps((__m512)totals[k], (__m512bh)a, (__m512bh)b);
                continue;
            }
#endif
            totals[k] = totals[k] * a + b;
        }
    }
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
    for (int k = 0; k < CHAINS; k++) OPAQUE(totals[k]);
    const double seconds = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
#ifdef __AVX512BF16__
    const int pairs = of_bfloat16 ? 2 : 1;
#else
    const int pairs = 1;
    (void)of_bfloat16;
#endif
    return (double)rounds * CHAINS * LANES * pairs / seconds * 1e-9;
}
