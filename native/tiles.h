/* Where a tile's parts lie, and numbers in half precision. */
#ifndef LLAMARIUM_TILES_H
#define LLAMARIUM_TILES_H

#include <stddef.h>
#include <string.h>

#include "ops.h"

#define INLINE static inline __attribute__((always_inline))

static inline size_t tile_bytes(int kind) {
    return kind == LM_Q8 ? 512 + 32 : kind == LM_Q4_MIN ? 256 + 64 : 256 + 32;
}

/* What a weight is before its scale. */
static inline int code_at(const lm_matrix *w, const uint8_t *tile, int row, int col) {
    if (w->kind == LM_Q8) return tile[(col / 4) * 64 + row * 4 + col % 4] - 128;
    int byte = tile[(col % 16 / 4) * 64 + row * 4 + col % 4];
    int nibble = col < 16 ? byte & 15 : byte >> 4;
    return w->kind == LM_Q4 ? nibble - 8 : w->kind == LM_Q4_MIN ? nibble : w->codebook[nibble] - 128;
}

static inline float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

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

#endif
