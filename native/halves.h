/* Numbers in half precision: bfloat16 and float16 as bits, to and from float. */
#ifndef LLAMARIUM_HALVES_H
#define LLAMARIUM_HALVES_H

#include <stdint.h>
#include <string.h>

/* A float16 that may begin at any byte, as those in tiles and in GGUF's blocks do. */
typedef struct {
    uint8_t bytes[2];
} float16;

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float from_bf16(uint16_t bits) { return float_of((uint32_t)bits << 16); }

static inline uint16_t to_bf16(float value) { /* to nearest, ties to even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return (uint16_t)((value != value ? bits | 0x400000 : rounded) >> 16);
}

static inline float from_half(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff, wide;
    float value;
    if (rest < 0x400) { /* subnormal: rest * 2^-24 */
        value = (float)rest * 5.9604644775390625e-8f;
        memcpy(&wide, &value, 4);
    } else {
        wide = (rest << 13) + (rest >= 0x7c00 ? (uint32_t)(255 - 31) << 23 : (uint32_t)(127 - 15) << 23);
    }
    wide |= sign;
    memcpy(&value, &wide, 4);
    return value;
}

static inline uint16_t to_half(float value) { /* to nearest, ties to even */
    uint32_t bits, shifted;
    memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size >= 0x47800000) return (uint16_t)(sign | (size > 0x7f800000 ? 0x7e00 : 0x7c00)); /* NaN, or 2^16 and more */
    if (size >= 0x38800000) return (uint16_t)(sign | (size + 0xfff + (size >> 13 & 1) - ((uint32_t)(127 - 15) << 23)) >> 13);
    value = float_of(size) + 0.5f; /* subnormal: its last bit, 2^-24, becomes that of a float from 0.5 on */
    memcpy(&shifted, &value, 4);
    return (uint16_t)(sign | (shifted - 0x3f000000));
}

static inline float half_at(const float16 *halves, int i) {
    uint16_t bits;
    memcpy(&bits, &halves[i], 2);
    return from_half(bits);
}

#endif
