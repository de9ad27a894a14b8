/* `vpdpbusd` for the AVX-VNNI set on processors without AVX-VNNI: by AVX-512's encoding of it where there is one
 * (LM_EMULATE_BY_EVEX), else by what Intel's manual says, in AVX2: no sum of 16 bits, and nothing saturates. */
#ifndef EMULATED_AVX_VNNI_H
#define EMULATED_AVX_VNNI_H

static inline __attribute__((always_inline)) __m256i add_four_products(__m256i sum, __m256i codes, __m256i inputs) {
#ifdef LM_EMULATE_BY_EVEX
    __asm__("%{evex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(codes), "xm"(inputs));
    return sum;
#else
    /* The even bytes of each 32 bits, and the odd ones, as numbers of 16 bits: `vpmaddwd` adds two products in 32 bits. */
    const __m256i even_codes = _mm256_and_si256(codes, _mm256_set1_epi16(255)), odd_codes = _mm256_srli_epi16(codes, 8);
    const __m256i even_inputs = _mm256_srai_epi16(_mm256_slli_epi16(inputs, 8), 8), odd_inputs = _mm256_srai_epi16(inputs, 8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even_codes, even_inputs));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(odd_codes, odd_inputs));
#endif
}

#endif
