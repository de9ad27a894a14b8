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

static inline float half_at(const float16 *halves, int i) {
    uint16_t bits;
    memcpy(&bits, &halves[i], 2);
    return from_half(bits);
}

#endif
