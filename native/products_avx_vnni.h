/* The AVX-VNNI set: that of AVX2 with `vpdpbusd`, for processors with AVX-VNNI and without AVX-512. */
#include <immintrin.h>

#include "tiles.h"

#ifdef LM_EMULATE_AVX_VNNI /* in tests, on processors without AVX-VNNI */
#include "emulated_avx_vnni.h"
#else
/* Four unsigned bytes of `codes` times four signed ones of `inputs`, added to each 32 bits of `sum`. */
INLINE __m256i add_four_products(__m256i sum, __m256i codes, __m256i inputs) {
    return _mm256_dpbusd_avx_epi32(sum, codes, inputs);
}
#endif

#define HAS_FOUR_PRODUCTS 1

#include "products_avx2.h"
