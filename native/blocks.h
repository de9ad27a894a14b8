/* GGUF's blocks, as files have them: what is encoded, and what is put into tiles. */
#ifndef LLAMARIUM_BLOCKS_H
#define LLAMARIUM_BLOCKS_H

#include "tiles.h"

typedef struct {
    float16 d;
    uint8_t q[32]; /* signed */
} block_q8_0;

typedef struct {
    float16 d;
    uint8_t q[16]; /* column i in the low half of byte i, 16 + i in the high one */
} block_q4_0, block_iq4_nl;

typedef struct {
    float16 d, m;
    uint8_t q[16];
} block_q4_1;

/* Bit i of `high` is the fifth bit of column i. */
typedef struct {
    float16 d;
    uint8_t high[4], low[16];
} block_q5_0;

/* `small` has eight s and eight t of 6 bits. Those of groups 0 to 3 are whole, those of 4 to 7 in two parts. */
typedef struct {
    float16 d, m;
    uint8_t small[12], low[128];
} block_q4_k;

typedef struct {
    float16 d, m;
    uint8_t small[12], high[32], low[128];
} block_q5_k;

typedef struct {
    uint8_t low[128], high[64];
    int8_t s[16];
    float16 d;
} block_q6_k;

/* Bits 2g and 2g + 1 of `high` are the high bits of s[g]; `low` has s[2i] in the low half of byte i. */
typedef struct {
    float16 d;
    uint16_t high;
    uint8_t low[4], q[128];
} block_iq4_xs;

#define IS_SIXTEENTH(BLOCK, TILE) _Static_assert(sizeof(BLOCK) * LM_TILE_ROWS == sizeof(TILE), "a tile has no byte more")
IS_SIXTEENTH(block_q8_0, tile_q8_0);
IS_SIXTEENTH(block_q4_0, tile_q4_0);
IS_SIXTEENTH(block_q4_1, tile_q4_1);
IS_SIXTEENTH(block_q5_0, tile_q5_0);
IS_SIXTEENTH(block_q4_k, tile_q4_k);
IS_SIXTEENTH(block_q5_k, tile_q5_k);
IS_SIXTEENTH(block_q6_k, tile_q6_k);
IS_SIXTEENTH(block_iq4_xs, tile_iq4_xs);

#endif
