/* Several numbers at once: `lanes` is as many as one register holds, and `quad` is four. Wider types are none: compilers compare their
 * numbers one by one (docs/decisions/0045). */
#ifndef LLAMARIUM_NUMBERS_H
#define LLAMARIUM_NUMBERS_H

#include <math.h>

#include "tiles.h"
#if defined __SSE2__
#include <immintrin.h>
#elif defined __ARM_NEON
#include <arm_neon.h>
#endif

/* Before a loop all of whose rounds are to be written out: what it indexes are registers. */
#if defined __clang__
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 8")
#endif

/* As many numbers as a register holds. */
#if defined __AVX512F__
#define LANES 16
#elif defined __AVX2__
#define LANES 8
#else
#define LANES 4
#endif
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t lane_ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t lane_bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t lane_halves __attribute__((vector_size(2 * LANES)));
typedef int16_t lane_shorts __attribute__((vector_size(2 * LANES)));
typedef int16_t short_pairs __attribute__((vector_size(4 * LANES))); /* two in each lane */

/* Keep compilers from loading a number anew for each product that it is a factor of. */
#if defined __x86_64__
#define IN_REGISTER(VALUE) __asm__("" : "+v"(VALUE))
#elif defined __ARM_NEON
#define IN_REGISTER(VALUE) __asm__("" : "+w"(VALUE))
#else
#define IN_REGISTER(VALUE) ((void)(VALUE))
#endif

/* 0, 1, 2, ... */
static inline lane_ints lane_numbers(void) {
    static const int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    lane_ints found;
    memcpy(&found, numbers, sizeof found);
    return found;
}

/* a where `mask` is all ones, b where it is 0. */
static inline lanes select_lanes(lane_ints mask, lanes a, lanes b) {
    return (lanes)((mask & (lane_ints)a) | (~mask & (lane_ints)b));
}

/* a where it is larger, else b, also where one is NaN. */
static inline lanes larger_lanes(lanes a, lanes b) {
#if defined __AVX512F__
    return (lanes)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined __AVX2__ /* one instruction, of the same meaning */
    return (lanes)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select_lanes(a > b, a, b);
#endif
}

/* total + a * b, rounded once where the processor can. Written out: of a sum with a product a compiler decides itself whether it fuses
 * both, and differently from place to place, while a product has the same bits wherever it is computed. */
static inline lanes fused_lanes(lanes total, lanes a, lanes b) {
#if defined __AVX512F__
    return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)total);
#elif defined __FMA__
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)total);
#elif defined __aarch64__
    return (lanes)vfmaq_f32((float32x4_t)total, (float32x4_t)a, (float32x4_t)b);
#else
    return total + a * b;
#endif
}

/* The same of single numbers. */
static inline float fused(float total, float a, float b) {
#if defined __FMA__ || defined __aarch64__
    return __builtin_fmaf(a, b, total);
#else
    return total + a * b;
#endif
}

static inline lanes all_lanes(float x) { return (lanes){0} + x; }

/* e^x for x <= 87, within 2e-7 of it; NaN stays NaN. */
static inline lanes exp_of_lanes(lanes given) {
    const lanes x = larger_lanes((lanes){0} - 87.0f, given);
    const lanes n = fused_lanes(all_lanes(12582912.0f), x, all_lanes(1.44269504f)) - 12582912.0f; /* rounded to a whole number */
    const lanes r = fused_lanes(fused_lanes(x, -n, all_lanes(0.693359375f)), n, all_lanes(2.12194440e-4f));
    lanes y = fused_lanes(all_lanes(1.3981999507e-3f), r, all_lanes(1.9875691500e-4f));
    y = fused_lanes(all_lanes(8.3334519073e-3f), y, r);
    y = fused_lanes(all_lanes(4.1665795894e-2f), y, r);
    y = fused_lanes(all_lanes(1.6666665459e-1f), y, r);
    y = fused_lanes(all_lanes(5.0000001201e-1f), y, r);
    y = fused_lanes(r, y * r, r) + 1.0f;
#if defined __AVX512F__
    return (lanes)_mm512_scalef_ps((__m512)y, (__m512)n); /* the same bits by fewer instructions */
#else
    return y * (lanes)((__builtin_convertvector(n, lane_ints) + 127) << 23);
#endif
}

/* e^-x, at most e^87: beside it 1 is nothing. */
static inline lanes exp_of_minus(lanes x) {
    const lanes most = (lanes){0} + 87;
    return exp_of_lanes(select_lanes(-x > most, most, -x));
}

static inline lanes silu(lanes x) { return x / (exp_of_minus(x) + 1); }

static inline float exp_of(float x) { return exp_of_lanes((lanes){x})[0]; }

/* The largest of some numbers without their signs; `poison` is NaN if one of them is NaN or infinite, else 0. */
INLINE float largest_size(const float *x, int count, float *poison) {
    float largest = 0, bad = 0;
#pragma omp simd reduction(max : largest) reduction(+ : bad)
    for (int i = 0; i < count; i++) {
        const float size = fabsf(x[i]);
        largest = size > largest ? size : largest;
        bad += x[i] * 0.0f;
    }
    *poison = bad;
    return largest;
}

/* The nearest whole number, ties to even, limited to -127 to 127: what is divided by a subnormal scale, which is rounded itself, may be
 * larger. */
static inline float nearest_code(float wanted) {
    wanted = wanted < 127 ? wanted : 127;
    wanted = wanted > -127 ? wanted : -127;
    return (wanted + 12582912.0f) - 12582912.0f;
}

static inline float number_at(int dtype, const void *from, size_t place) {
    return dtype == LM_FLOAT32 ? ((const float *)from)[place] : from_bf16(((const uint16_t *)from)[place]);
}

typedef float quad __attribute__((vector_size(16)));
typedef int32_t quad_ints __attribute__((vector_size(16)));

/* Not left to compilers, which take twice as many instructions to make floats of bytes. */
#if defined __AVX512F__
static inline lanes load_bytes(const void *from) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from))); }
#elif defined __AVX2__
static inline lanes load_bytes(const void *from) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from))); }
#else
static inline lanes load_bytes(const void *from) {
    const int8_t *codes = from;
    return (lanes){codes[0], codes[1], codes[2], codes[3]};
}
#endif

/* --- codes of 8 and 4 bits --------------------------------------------------------------------------------------- */

static inline short_pairs load_bytes_as_shorts(const void *from) {
#if LANES == 16
    return (short_pairs)_mm512_cvtepi8_epi16(_mm256_loadu_si256(from));
#elif LANES == 8
    return (short_pairs)_mm256_cvtepi8_epi16(_mm_loadu_si128(from));
#else
    int8_t __attribute__((vector_size(2 * LANES))) bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, short_pairs);
#endif
}

/* Sixteen numbers of 16 bits to memory. */
static inline void put_shorts(const lane_ints values[16 / LANES], int16_t *to) {
#if LANES == 8
    const __m256i quads = _mm256_packs_epi32((__m256i)values[0], (__m256i)values[1]); /* in the order 0 2 1 3 */
    _mm256_storeu_si256((__m256i *)to, _mm256_permute4x64_epi64(quads, 0xd8));
#else
    for (int i = 0; i < 16 / LANES; i++) {
        const lane_shorts own = __builtin_convertvector(values[i], lane_shorts);
        memcpy(to + i * LANES, &own, sizeof own);
    }
#endif
}

/* Two codes of 16 bits, in each lane. */
static inline short_pairs repeat_pair(const int16_t *from) {
    int32_t word;
    memcpy(&word, from, sizeof word);
    return (short_pairs)((lane_ints){0} + word);
}

/* sums + each lane's two products. */
static inline lane_ints add_products(lane_ints sums, short_pairs a, short_pairs b) {
#if LANES == 16
    return (lane_ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif LANES == 8
    return sums + (lane_ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined __SSE2__
    return sums + (lane_ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined __ARM_NEON
    const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_s16(vget_high_s16(x), vget_high_s16(y));
    return sums + (lane_ints)vpaddq_s32(low, high);
#else
    for (int i = 0; i < LANES; i++) sums[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return sums;
#endif
}

static inline lane_ints larger_ints(lane_ints a, lane_ints b) {
#if LANES == 8
    return (lane_ints)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    const lane_ints mask = a > b;
    return (mask & a) | (~mask & b);
#endif
}

/* Pairs of codes of 4 bits, plus 8: `part` of those that are in some words of 32 bits. */
static inline short_pairs nibble_pairs(lane_bits words, int part) { return (short_pairs)(words >> 4 * part & 0x000f000f); }

/* Codes of two values side by side: as many pairs of 16 bits as an instruction multiplies. Sums of AVX-512 are those of AVX2, by one
 * instruction instead of two. */
#define PAIR_LANES (LANES == 4 ? 4 : 8)
typedef int32_t pair_ints __attribute__((vector_size(4 * PAIR_LANES)));
typedef float pair_floats __attribute__((vector_size(4 * PAIR_LANES)));

static inline pair_ints add_pairs(pair_ints sums, pair_ints a, pair_ints b) {
#if LANES == 16
    return (pair_ints)_mm256_dpwssd_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#else
    return (pair_ints)add_products((lane_ints)sums, (short_pairs)a, (short_pairs)b);
#endif
}

/* Pairs of codes of 8 bits, which follow each other. */
static inline pair_ints load_byte_pairs(const uint8_t *from) {
#if LANES >= 8
    return (pair_ints)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
#else
    return (pair_ints)load_bytes_as_shorts(from);
#endif
}

/* As `nibble_pairs`, of words in memory. */
static inline pair_ints load_nibble_pairs(const uint8_t *from, int part) {
    pair_ints words;
    memcpy(&words, from, sizeof words);
    return words >> 4 * part & 0x000f000f;
}

#if defined __AVX512F__
static inline lanes load_halves(const void *from) { return (lanes)_mm512_cvtph_ps(_mm256_loadu_si256(from)); }
#elif defined __AVX2__
static inline lanes load_halves(const void *from) { return (lanes)_mm256_cvtph_ps(_mm_loadu_si128(from)); }
#elif defined __ARM_NEON
static inline lanes load_halves(const void *from) { return (lanes)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
#else
static inline lanes load_halves(const void *from) {
    uint16_t __attribute__((vector_size(2 * LANES))) halves;
    memcpy(&halves, from, sizeof halves);
    const lane_ints bits = __builtin_convertvector(halves, lane_ints), size = (bits & 0x7fff) << 13;
    const lane_ints endless = (size >= 0x7c00 << 13) & 0x7f800000; /* infinities and NaN */
    const lanes value = (lanes)size * 0x1p112f;                    /* by the difference of the exponents; exact */
    return (lanes)((lane_ints)value | endless | (bits & 0x8000) << 16);
}
#endif

static inline lanes load_floats(const float *from) {
    lanes values;
    memcpy(&values, from, sizeof values);
    return values;
}

/* Less than a register of them, and zeros. */
static inline lanes load_some(const float *from, int count) {
#if defined __AVX512F__
    return (lanes)_mm512_maskz_loadu_ps((__mmask16)((1 << count) - 1), from);
#endif
    lanes values = {0};
    memcpy(&values, from, count * sizeof(float));
    return values;
}

/* --- pairs ------------------------------------------------------------------------------------------------------- */

/* Two registers' numbers are loaded at a time. A word of memory holds two of LM_BFLOAT16, and each becomes a float by one mask or
 * shift: the first register gets those at even places, the second those at odd ones. What they are multiplied with, or what
 * becomes of them, is put into that order too; a rest of less than PAIR numbers stays as it is. */
#define PAIR (2 * LANES)
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a word's low half is the number at the even place");

INLINE void load_pair(const int dtype, const void *from, size_t place, lanes values[2]) {
    if (dtype == LM_BFLOAT16) {
        lane_bits words;
        memcpy(&words, (const uint16_t *)from + place, sizeof words);
        values[0] = (lanes)(words << 16);
        values[1] = (lanes)(words & 0xffff0000);
        return;
    }
    for (int i = 0; i < 2; i++)
        values[i] = dtype == LM_INT8      ? load_bytes((const int8_t *)from + place + i * LANES)
                    : dtype == LM_FLOAT16 ? load_halves((const uint16_t *)from + place + i * LANES)
                                          : load_floats((const float *)from + place + i * LANES);
}

/* A register of a rest, as it lies. */
INLINE lanes load_lanes(const int dtype, const void *from, size_t place) {
    if (dtype == LM_INT8) return load_bytes((const int8_t *)from + place);
    if (dtype == LM_FLOAT32) return load_floats((const float *)from + place);
#if defined __AVX512F__ /* compilers convert two halves of it */
    return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)((const uint16_t *)from + place))), 16);
#endif
    uint16_t __attribute__((vector_size(2 * LANES))) halves;
    memcpy(&halves, (const uint16_t *)from + place, sizeof halves);
    return (lanes)(__builtin_convertvector(halves, lane_bits) << 16);
}

/* A register to memory; of LM_BFLOAT16 to nearest, ties to even, NaN stays NaN. */
INLINE void store_lanes(const int dtype, void *to, size_t place, lanes values) {
    if (dtype == LM_FLOAT32) {
        memcpy((float *)to + place, &values, sizeof values);
        return;
    }
    const lane_bits bits = (lane_bits)values, is_nan = (lane_bits)(values != values);
    const lane_bits words = ((bits + 0x7fff + (bits >> 16 & 1)) & ~is_nan) | ((bits | 0x400000) & is_nan);
    const lane_halves halves = __builtin_convertvector(words >> 16, lane_halves);
    memcpy((uint16_t *)to + place, &halves, sizeof halves);
}

/* A float in the order of `load_pair`: a type of its own, so that it is never read as one in its natural order. */
typedef struct {
    float value;
} paired;

static inline lanes load_paired(const paired *from) {
    lanes values;
    memcpy(&values, from, sizeof values);
    return values;
}

/* Put what is multiplied with numbers of `dtype` into the order in which `load_pair` has them, where it lies: `paired` from
 * then on. */
static inline void into_pairs(int dtype, float *values, int count) {
    for (; dtype == LM_BFLOAT16 && count >= PAIR; values += PAIR, count -= PAIR) {
        float given[PAIR];
        memcpy(given, values, sizeof given);
        for (int i = 0; i < LANES; i++) {
            values[i] = given[2 * i];
            values[LANES + i] = given[2 * i + 1];
        }
    }
}

/* Put what has become of such numbers back into their own order, where it lies. */
static inline float *out_of_pairs(int dtype, paired *all, int count) {
    for (float *values = (float *)all; dtype == LM_BFLOAT16 && count >= PAIR; values += PAIR, count -= PAIR) {
        float given[PAIR];
        memcpy(given, values, sizeof given);
        for (int i = 0; i < LANES; i++) {
            values[2 * i] = given[i];
            values[2 * i + 1] = given[LANES + i];
        }
    }
    return (float *)all;
}

#if defined __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (quad_ints){__VA_ARGS__})
#endif

/* Transpose four of them. */
static inline void transpose_quads(quad v[4]) {
    const quad a = SHUFFLE(v[0], v[1], 0, 4, 1, 5), b = SHUFFLE(v[0], v[1], 2, 6, 3, 7);
    const quad c = SHUFFLE(v[2], v[3], 0, 4, 1, 5), d = SHUFFLE(v[2], v[3], 2, 6, 3, 7);
    v[0] = SHUFFLE(a, c, 0, 1, 4, 5), v[1] = SHUFFLE(a, c, 2, 3, 6, 7);
    v[2] = SHUFFLE(b, d, 0, 1, 4, 5), v[3] = SHUFFLE(b, d, 2, 3, 6, 7);
}

/* Transpose as many registers as they have numbers. */
INLINE void transpose_lanes(lanes v[LANES]) {
#if LANES == 16
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_ps((__m512)v[i], (__m512)v[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps((__m512)v[i], (__m512)v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = (__m512)_mm512_unpacklo_pd((__m512d)a[i + j], (__m512d)a[i + j + 2]);
            b[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd((__m512d)a[i + j], (__m512d)a[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) { /* now each quad is transposed */
        const __m512 ab = _mm512_shuffle_f32x4(b[i], b[4 + i], 0x44), cd = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0x44);
        const __m512 ef = _mm512_shuffle_f32x4(b[i], b[4 + i], 0xee), gh = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0xee);
        v[i] = (lanes)_mm512_shuffle_f32x4(ab, cd, 0x88);
        v[4 + i] = (lanes)_mm512_shuffle_f32x4(ab, cd, 0xdd);
        v[8 + i] = (lanes)_mm512_shuffle_f32x4(ef, gh, 0x88);
        v[12 + i] = (lanes)_mm512_shuffle_f32x4(ef, gh, 0xdd);
    }
#elif LANES == 8
    for (int i = 0; i < 4; i++) {
        const lanes a = v[i], b = v[4 + i];
        v[i] = (lanes)_mm256_permute2f128_ps((__m256)a, (__m256)b, 0x20);
        v[4 + i] = (lanes)_mm256_permute2f128_ps((__m256)a, (__m256)b, 0x31);
    }
    for (int i = 0; i < 8; i += 4) {
        const __m256 a = _mm256_unpacklo_ps((__m256)v[i], (__m256)v[i + 1]), b = _mm256_unpackhi_ps((__m256)v[i], (__m256)v[i + 1]);
        const __m256 c = _mm256_unpacklo_ps((__m256)v[i + 2], (__m256)v[i + 3]), d = _mm256_unpackhi_ps((__m256)v[i + 2], (__m256)v[i + 3]);
        v[i] = (lanes)_mm256_shuffle_ps(a, c, 0x44), v[i + 1] = (lanes)_mm256_shuffle_ps(a, c, 0xee);
        v[i + 2] = (lanes)_mm256_shuffle_ps(b, d, 0x44), v[i + 3] = (lanes)_mm256_shuffle_ps(b, d, 0xee);
    }
#else
    transpose_quads(v);
#endif
}

/* a where `mask` is all ones, b where it is 0. */
static inline quad select_quad(quad_ints mask, quad a, quad b) {
    return (quad)((mask & (quad_ints)a) | (~mask & (quad_ints)b));
}

typedef struct {
    int32_t first, second;
} two_ints;

/* Three things of 32 numbers, written out since compilers take twice as many instructions. `two_largest`, of numbers that are not
 * negative: the largest one, and the largest one outside the four that it is among. `sums_of_two`: of two registers. `put_low_bytes`. */
#if LANES >= 8
static inline two_ints last_two_largest(__m256i most, __m256i rest) {
    const __m128i a = _mm256_castsi256_si128(most), b = _mm256_extracti128_si256(most, 1);
    const __m128i less = _mm_max_epi32(_mm256_castsi256_si128(rest), _mm256_extracti128_si256(rest, 1));
    return (two_ints){_mm_cvtsi128_si32(_mm_max_epi32(a, b)), _mm_cvtsi128_si32(_mm_max_epi32(_mm_min_epi32(a, b), less))};
}

static inline two_ints sums_of_halves(__m256i first, __m256i second) {
    const __m256i pairs = _mm256_hadd_epi32(first, second);
    const __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    const __m128i both = _mm_hadd_epi32(sums, sums);
    return (two_ints){_mm_cvtsi128_si32(both), _mm_extract_epi32(both, 1)};
}
#endif

#if LANES == 16
static inline two_ints two_largest(const lane_ints values[2]) {
    __m512i a = (__m512i)values[0], b = (__m512i)values[1];
    a = _mm512_max_epi32(a, _mm512_shuffle_epi32(a, _MM_PERM_CDAB)), b = _mm512_max_epi32(b, _mm512_shuffle_epi32(b, _MM_PERM_CDAB));
    a = _mm512_max_epi32(a, _mm512_shuffle_epi32(a, _MM_PERM_BADC)), b = _mm512_max_epi32(b, _mm512_shuffle_epi32(b, _MM_PERM_BADC));
    const __m512i more = _mm512_max_epi32(a, b), less = _mm512_min_epi32(a, b);
    const __m256i c = _mm512_castsi512_si256(more), d = _mm512_extracti64x4_epi64(more, 1);
    const __m256i left = _mm256_max_epi32(_mm512_castsi512_si256(less), _mm512_extracti64x4_epi64(less, 1));
    const __m256i most = _mm256_max_epi32(c, d), rest = _mm256_max_epi32(_mm256_min_epi32(c, d), left);
    return last_two_largest(most, rest);
}

static inline two_ints sums_of_two(const lane_ints values[2]) {
    __m256i halves[2];
    for (int i = 0; i < 2; i++)
        halves[i] = _mm256_add_epi32(_mm512_castsi512_si256((__m512i)values[i]), _mm512_extracti64x4_epi64((__m512i)values[i], 1));
    return sums_of_halves(halves[0], halves[1]);
}

static inline void put_low_bytes(const lane_ints values[2], int8_t *to) {
    for (int i = 0; i < 2; i++) _mm_storeu_si128((__m128i *)(to + 16 * i), _mm512_cvtepi32_epi8((__m512i)values[i]));
}
#elif LANES == 8
static inline two_ints two_largest(const lane_ints values[4]) {
    __m256i most = _mm256_setzero_si256(), rest = most;
    for (int i = 0; i < 4; i++) {
        __m256i a = _mm256_max_epi32((__m256i)values[i], _mm256_shuffle_epi32((__m256i)values[i], 0xb1));
        a = _mm256_max_epi32(a, _mm256_shuffle_epi32(a, 0x4e));
        rest = _mm256_max_epi32(rest, _mm256_min_epi32(most, a));
        most = _mm256_max_epi32(most, a);
    }
    return last_two_largest(most, rest);
}

static inline two_ints sums_of_two(const lane_ints values[2]) {
    return sums_of_halves((__m256i)values[0], (__m256i)values[1]);
}

static inline void put_low_bytes(const lane_ints values[4], int8_t *to) {
    const __m256i low = _mm256_set1_epi32(255);
    __m256i halves[2]; /* packing goes by 16 bytes: its quads of codes come in the order 0 2 4 6 1 3 5 7 */
    for (int i = 0; i < 2; i++)
        halves[i] = _mm256_packus_epi32(
            _mm256_and_si256((__m256i)values[2 * i], low), _mm256_and_si256((__m256i)values[2 * i + 1], low));
    const __m256i bytes = _mm256_packus_epi16(halves[0], halves[1]);
    _mm256_storeu_si256((__m256i *)to, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}
#else
static inline two_ints two_largest(const lane_ints values[8]) {
    two_ints found = {0, 0};
    for (int i = 0; i < 8; i++) {
        const lane_ints v = values[i];
        const int32_t a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3], most = a > b ? a : b;
        const int32_t less = most < found.first ? most : found.first;
        found.second = less > found.second ? less : found.second;
        found.first = most > found.first ? most : found.first;
    }
    return found;
}

static inline int32_t sum_of(lane_ints values) { return (values[0] + values[2]) + (values[1] + values[3]); }

static inline two_ints sums_of_two(const lane_ints values[2]) { return (two_ints){sum_of(values[0]), sum_of(values[1])}; }

static inline void put_low_bytes(const lane_ints values[8], int8_t *to) {
    int32_t all[LM_GROUP];
    memcpy(all, values, sizeof all);
    for (int i = 0; i < LM_GROUP; i++) to[i] = (int8_t)all[i];
}
#endif

/* The low bytes of four numbers as they lie in memory. */
static inline int32_t low_bytes_of(quad_ints values) {
#if defined __AVX2__
    return _mm_cvtsi128_si32(_mm_shuffle_epi8((__m128i)values, _mm_set1_epi32(0x0c080400)));
#else
    return (int32_t)((values[0] & 255) | (values[1] & 255) << 8 | (values[2] & 255) << 16 | (uint32_t)values[3] << 24);
#endif
}

/* The nearest whole numbers of floats below 2^22, ties to even. */
static inline quad_ints nearest_four(quad x) {
#if defined __SSE2__
    return (quad_ints)_mm_cvtps_epi32((__m128)x);
#elif defined __ARM_NEON
    return (quad_ints)vcvtnq_s32_f32((float32x4_t)x);
#else
    return (quad_ints)(x + 12582912.0f) - 0x4b400000; /* 1.5 * 2^23 and its bits: the sum's low ones are the whole number */
#endif
}

#if LANES == 16
static inline lane_ints nearest_ints(lanes x) { return (lane_ints)_mm512_cvtps_epi32((__m512)x); }
#elif LANES == 8
static inline lane_ints nearest_ints(lanes x) { return (lane_ints)_mm256_cvtps_epi32((__m256)x); }
#else
static inline lane_ints nearest_ints(lanes x) { return nearest_four(x); }
#endif

/* The sum of a register's quads. */
static inline quad fold_lanes(lanes values) {
    quad parts[LANES / 4];
    memcpy(parts, &values, sizeof parts);
    for (int count = LANES / 8; count > 0; count /= 2)
        for (int i = 0; i < count; i++) parts[i] += parts[i + count];
    return parts[0];
}

/* The sum of each of four registers. */
static inline quad sums_of(const lanes *values) {
    const quad a = fold_lanes(values[0]), b = fold_lanes(values[1]), c = fold_lanes(values[2]), d = fold_lanes(values[3]);
    const quad ab = SHUFFLE(a, b, 0, 4, 1, 5) + SHUFFLE(a, b, 2, 6, 3, 7);
    const quad cd = SHUFFLE(c, d, 0, 4, 1, 5) + SHUFFLE(c, d, 2, 6, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

#if LANES == 16
/* The sum of each of sixteen registers, in the order of `sums_of`. Each step puts halves side by side and adds them: first halves of
 * registers, then of quads. */
static inline lanes sums_of_16(const lanes *v) {
    __m512 four[4]; /* one of each four that are four apart: their quads */
    for (int h = 0; h < 4; h++) {
        const __m512 a = (__m512)v[h], b = (__m512)v[4 + h], c = (__m512)v[8 + h], d = (__m512)v[12 + h];
        const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
        four[h] = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    }
    const __m512 left = _mm512_add_ps(_mm512_shuffle_ps(four[0], four[1], 0x44), _mm512_shuffle_ps(four[0], four[1], 0xee));
    const __m512 right = _mm512_add_ps(_mm512_shuffle_ps(four[2], four[3], 0x44), _mm512_shuffle_ps(four[2], four[3], 0xee));
    return (lanes)_mm512_add_ps(_mm512_shuffle_ps(left, right, 0x88), _mm512_shuffle_ps(left, right, 0xdd));
}
#endif

#endif
