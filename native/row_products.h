/* Products of training's own: of floats or, where the processor multiplies bfloat16 and that is what comes, of words: two numbers that are
 * neighbours in the direction of the sum lie in the place of a float. */
#ifndef LLAMARIUM_ROW_PRODUCTS_H
#define LLAMARIUM_ROW_PRODUCTS_H

#include "numbers.h"

#ifdef __AVX512BF16__
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

#if LANES == 16
#define ROWS 8 /* of a product that are summed at once, times as many registers: as many as give the multipliers enough to do */
#define REGISTERS 2
#elif defined __ARM_NEON
#define ROWS 4
#define REGISTERS 4
#else
#define ROWS 4
#define REGISTERS 2
#endif

/* `store_lanes`, sooner where the processor rounds to bfloat16; `dtype` is a constant. */
INLINE void put_lanes(const int dtype, void *to, size_t place, lanes values) {
#if HAS_PAIRS
    if (dtype == LM_BFLOAT16) { /* numbers below 2^-126 become zero */
        const __m256bh halves = _mm512_cvtneps_pbh((__m512)values);
        memcpy((uint16_t *)to + place, &halves, sizeof halves);
        return;
    }
#endif
    store_lanes(dtype, to, place, values);
}

INLINE lanes repeat(float x) {
#if HAS_PAIRS
    return (lanes)_mm512_set1_ps(x);
#endif
    return x - (lanes){0};
}

INLINE lanes add_product(const int of_words, lanes sum, lanes left, lanes right) {
#if HAS_PAIRS
    if (of_words) return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
#endif
    (void)of_words;
    return sum + left * right;
}

INLINE void multiply_some(const int of_words, const int registers, const float *a, ptrdiff_t a_row, ptrdiff_t a_step, const float *b, ptrdiff_t b_step,
                          float *c, ptrdiff_t c_row, int depth, int adds) {
    lanes sums[ROWS][REGISTERS];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < registers; i++) sums[r][i] = (lanes){0};
    for (int step = 0; step < depth; step++, a += a_step, b += b_step) {
        lanes right[REGISTERS];
        for (int i = 0; i < registers; i++) right[i] = load_floats(b + i * LANES);
        for (int r = 0; r < ROWS; r++) {
            const lanes left = repeat(a[r * a_row]);
            for (int i = 0; i < registers; i++) sums[r][i] = add_product(of_words, sums[r][i], left, right[i]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < registers; i++) {
            float *to = c + r * c_row + i * LANES;
            if (adds) sums[r][i] += load_floats(to); /* last: sums of parts round less than one long sum */
            memcpy(to, &sums[r][i], sizeof(lanes));
        }
}

#define NO_TRIANGLE -(1 << 20), 1 << 20

/* c (rows, columns) = or += a (rows, depth) b (depth, columns). Neighbours of `a` in a column are a_row apart, in a row a_step. `rows` is a
 * multiple of ROWS, `columns` of 16. Row r of `a` is zero before `begin` + r, and from `end` + r on, for r up to a multiple of ROWS. Of words
 * `depth`, `begin` and `end` count numbers, and steps words. */
INLINE void multiply_any(const int of_words, const float *a, ptrdiff_t a_row, ptrdiff_t a_step, const float *b, ptrdiff_t b_step, float *c, ptrdiff_t c_row,
                     int rows, int columns, int depth, int adds, int begin, int end) {
    int column = 0;
#define MULTIPLY(COUNT)                                                                                                                   \
    for (; column + (COUNT) * LANES <= columns; column += (COUNT) * LANES)                                                                \
        for (int r = 0; r < rows; r += ROWS) {                                                                                            \
            const int from = begin + r > 0 ? begin + r : 0, last = end + r + ROWS - 1, to = last < depth ? last : depth;                  \
            const int first = from >> of_words, count = ((to + of_words) >> of_words) - first;                                            \
            multiply_some(of_words, COUNT, a + r * a_row + first * a_step, a_row, a_step, b + first * b_step + column, b_step,            \
                          c + r * c_row + column, c_row, count, adds);                                                                    \
        }
    MULTIPLY(REGISTERS)
#if REGISTERS * LANES > 16
    MULTIPLY(1)
#endif
#undef MULTIPLY
}

static void multiply(int of_words, const float *a, ptrdiff_t a_row, ptrdiff_t a_step, const float *b, ptrdiff_t b_step, float *c,
                     ptrdiff_t c_row, int rows, int columns, int depth, int adds, int begin, int end) {
    if (HAS_PAIRS && of_words)
        multiply_any(1, a, a_row, a_step, b, b_step, c, c_row, rows, columns, depth, adds, begin, end);
    else
        multiply_any(0, a, a_row, a_step, b, b_step, c, c_row, rows, columns, depth, adds, begin, end);
}

#endif
