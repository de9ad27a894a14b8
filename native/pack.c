/* GGUF's blocks put into tiles, row by row; what a tile has of rows that there are not stays zero. */
#include <sys/mman.h>
#include <unistd.h>

#include "pool.h"
#include "tiles.h"

#define STRIPES_OF_A_PIECE 8

typedef struct {
    int kind, rows, cols;
    const uint8_t *blocks;
    uint8_t *tiles;
    atomic_int next;
} packing;

/* Row r of a tile whose groups have one scale; a block has its scale, its minimum and its codes as the tile does. */
static void pack_group(const uint8_t *block, int kind, int r, uint8_t *tile) {
    const int num_halves = kind == LM_Q4_1 ? 2 : 1;
    for (int i = 0; i < num_halves; i++) memcpy(tile + code_bytes(kind) + 32 * i + 2 * r, block + 2 * i, 2);
    for (size_t line = 0; line < code_bytes(kind) / 64; line++) {
        uint32_t codes;
        memcpy(&codes, block + 2 * num_halves + 4 * line, 4);
        if (kind == LM_Q8_0) codes ^= 0x80808080; /* signed, in a file */
        memcpy(tile + 64 * line + 4 * r, &codes, 4);
    }
}

/* --- the K formats ----------------------------------------------------------------------------------------------- */

/* Where a block's parts begin. Q4_K: d, dmin, 12 bytes of scales and minima, low bits. Q5_K: its fifth bits before the low
 * bits. Q6_K: low bits, two high bits each, 16 scales, d. */
enum { K_INTEGERS = 4, K_HIGH = 16, Q4_K_LOW = 16, Q5_K_LOW = 48, Q6_K_HIGH = 128, Q6_K_SCALES = 192, Q6_K_D = 208 };

static int super_code(const uint8_t *block, int kind, int col) {
    if (kind == LM_Q6_K) { /* fields of 64 columns, and of 32, side by side in each half */
        const int half = col / 128, at = col % 128;
        const int low = block[64 * half + at % 64] >> at / 64 * 4 & 15;
        return low | (block[Q6_K_HIGH + 32 * half + at % 32] >> at / 32 * 2 & 3) << 4;
    }
    const int group = col / 32, at = col % 32;
    if (kind == LM_Q4_K) return block[Q4_K_LOW + 32 * (group / 2) + at] >> group % 2 * 4 & 15;
    return (block[Q5_K_LOW + 32 * (group / 2) + at] >> group % 2 * 4 & 15) | (block[K_HIGH + at] >> group & 1) << 4;
}

/* The 6-bit scales and minima of row r: those of groups 0 to 3 are whole, those of 4 to 7 in two parts. */
static void pack_integers(const uint8_t *from, int r, uint8_t *tile) {
    for (int g = 0; g < 8; g++) {
        const int scale = g < 4 ? from[g] & 63 : (from[g + 4] & 15) | (from[g - 4] >> 2 & 48);
        const int minimum = g < 4 ? from[g + 4] & 63 : from[g + 4] >> 4 | (from[g] >> 2 & 48);
        const int at = g % 4 * 16 + r, late = g / 4;
        tile[64 + at] |= (uint8_t)((scale & 15) << 4 * late);
        tile[128 + at] |= (uint8_t)((minimum & 15) << 4 * late);
        tile[192 + at] |= (uint8_t)(scale >> 4 << 2 * late | minimum >> 4 << (4 + 2 * late));
    }
}

/* Row r of a tile of the K formats. */
static void pack_super(const uint8_t *block, int kind, int r, uint8_t *tile) {
    if (kind == LM_Q6_K) {
        memcpy(tile + 2 * r, block + Q6_K_D, 2);
        for (int s = 0; s < 16; s++) tile[32 + 16 * s + r] = block[Q6_K_SCALES + s];
    } else {
        for (int i = 0; i < 2; i++) memcpy(tile + 32 * i + 2 * r, block + 2 * i, 2);
        pack_integers(block + K_INTEGERS, r, tile);
    }
    uint8_t *codes = tile + head_bytes(kind) + 4 * r;
    for (int g = 0; g < LM_SUPER / LM_GROUP; g++, codes += code_bytes(kind))
        for (int c = 0; c < LM_GROUP; c++) {
            const int code = super_code(block, kind, g * LM_GROUP + c), line = c / 4, at = c % 4;
            codes[line % 4 * 64 + at] |= (uint8_t)((code & 15) << line / 4 * 4);
            if (kind == LM_Q5_K) codes[256 + at] |= (uint8_t)(code >> 4 << line);
            if (kind == LM_Q6_K) codes[256 + line / 4 * 64 + at] |= (uint8_t)(code >> 4 << 2 * (line % 4));
        }
}

/* --- all --------------------------------------------------------------------------------------------------------- */

static void pack_stripes(void *context, lm_team team) {
    (void)team;
    packing *p = context;
    const int num_tiles = p->cols / tile_cols(p->kind), stripes = (p->rows + LM_TILE_ROWS - 1) / LM_TILE_ROWS;
    const size_t size = tile_bytes(p->kind), block = size / LM_TILE_ROWS; /* a tile has no byte more than its blocks */
    for (int first; (first = lm_next(&p->next) * STRIPES_OF_A_PIECE) < stripes;)
        for (int stripe = first; stripe < stripes && stripe < first + STRIPES_OF_A_PIECE; stripe++)
            for (int t = 0; t < num_tiles; t++) {
                uint8_t *tile = p->tiles + ((size_t)stripe * num_tiles + t) * size;
                memset(tile, 0, size);
                for (int r = 0; r < LM_TILE_ROWS && stripe * LM_TILE_ROWS + r < p->rows; r++) {
                    const uint8_t *from = p->blocks + ((size_t)(stripe * LM_TILE_ROWS + r) * num_tiles + t) * block;
                    (is_super(p->kind) ? pack_super : pack_group)(from, p->kind, r, tile);
                }
            }
}

/* Pages of 2 MB, where the system has them: there are fewer to be made, and to be found when weights are read. */
static void use_huge_pages(uint8_t *memory, size_t bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = ((uintptr_t)memory + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)memory + bytes) / page * page;
    if (end > first) madvise((void *)first, end - first, MADV_HUGEPAGE); /* advice: nothing depends on it */
#else
    (void)memory, (void)bytes;
#endif
}

void lm_pack(int32_t kind, int32_t rows, int32_t cols, const uint8_t *blocks, uint8_t *tiles) {
    packing p = {.kind = kind, .rows = rows, .cols = cols, .blocks = blocks, .tiles = tiles};
    use_huge_pages(tiles, (size_t)((rows + LM_TILE_ROWS - 1) / LM_TILE_ROWS) * (cols / tile_cols(kind)) * tile_bytes(kind));
    lm_enter();
    lm_parallel(pack_stripes, &p);
    lm_leave();
}
