/* Pack GGUF blocks into tiles, row by row; rows past the end of the matrix are zero in the last tiles.
 *
 * The blocks come from memory or from a file. From a file, each thread reads a piece that fits into its cache, so that the weights are in memory
 * only once, as tiles. */
#include <stdlib.h>

#include "blocks.h"
#include "pool.h"
#include "system.h"

#define PANELS_OF_A_PIECE 8
#define BYTES_AT_ONCE (256 * 1024) /* read from a file at a time; stays in the L2 cache until it is packed */

/* A block with one byte per code and per small integer, the intermediate form of all formats that need repacking. */
typedef struct {
    float16 d, m;
    uint8_t codes[LM_SUPER];
    uint8_t s[2 * GROUPS_OF_SUPER], t[GROUPS_OF_SUPER];
} plain_block;

static void read_q5_0(const block_q5_0 *from, plain_block *to) {
    to->d = from->d;
    for (int i = 0; i < LM_GROUP; i++)
        to->codes[i] = (uint8_t)((from->low[i % 16] >> i / 16 * 4 & 15) | (from->high[i / 8] >> i % 8 & 1) << 4);
}

static void read_six_bits(const uint8_t *from, plain_block *to) {
    for (int g = 0; g < GROUPS_OF_SUPER; g++) {
        to->s[g] = (uint8_t)(g < 4 ? from[g] & 63 : (from[g + 4] & 15) | (from[g - 4] >> 2 & 48));
        to->t[g] = (uint8_t)(g < 4 ? from[g + 4] & 63 : from[g + 4] >> 4 | (from[g] >> 2 & 48));
    }
}

/* 32 bytes hold two groups: the first in the low halves, the second in the high ones. */
static void read_nibbles(const uint8_t *low, plain_block *to) {
    for (int pair = 0; pair < GROUPS_OF_SUPER / 2; pair++)
        for (int i = 0; i < LM_GROUP; i++) {
            to->codes[2 * pair * LM_GROUP + i] = low[pair * LM_GROUP + i] & 15;
            to->codes[(2 * pair + 1) * LM_GROUP + i] = low[pair * LM_GROUP + i] >> 4;
        }
}

static void read_q4_k(const block_q4_k *from, plain_block *to) {
    to->d = from->d, to->m = from->m;
    read_six_bits(from->small, to);
    read_nibbles(from->low, to);
}

static void read_q5_k(const block_q5_k *from, plain_block *to) {
    to->d = from->d, to->m = from->m;
    read_six_bits(from->small, to);
    read_nibbles(from->low, to);
    for (int g = 0; g < GROUPS_OF_SUPER; g++)
        for (int i = 0; i < LM_GROUP; i++) to->codes[g * LM_GROUP + i] |= (uint8_t)((from->high[i] >> g & 1) << 4);
}

/* Each half of 128 columns has its low bits in two fields of 64 columns, and its high bits in four fields of 32. */
static void read_q6_k(const block_q6_k *from, plain_block *to) {
    to->d = from->d;
    memcpy(to->s, from->s, sizeof from->s);
    for (int g = 0; g < GROUPS_OF_SUPER; g++) {
        const uint8_t *low = from->low + g / 4 * 64 + g % 2 * LM_GROUP, *high = from->high + g / 4 * LM_GROUP;
        for (int i = 0; i < LM_GROUP; i++)
            to->codes[g * LM_GROUP + i] = (uint8_t)((low[i] >> g / 2 % 2 * 4 & 15) | (high[i] >> g % 4 * 2 & 3) << 4);
    }
}

static void read_iq4_xs(const block_iq4_xs *from, plain_block *to) {
    to->d = from->d;
    for (int g = 0; g < GROUPS_OF_SUPER; g++)
        to->s[g] = (uint8_t)((from->low[g / 2] >> g % 2 * 4 & 15) | (from->high >> 2 * g & 3) << 4);
    for (int g = 0; g < GROUPS_OF_SUPER; g++)
        for (int i = 0; i < LM_GROUP / 2; i++) {
            to->codes[g * LM_GROUP + i] = from->q[g * LM_GROUP / 2 + i] & 15;
            to->codes[g * LM_GROUP + LM_GROUP / 2 + i] = from->q[g * LM_GROUP / 2 + i] >> 4;
        }
}

/* --- a row of a tile --------------------------------------------------------------------------------------------- */

static inline void put_word(uint32_t codes, code_line *line, int r) { memcpy(line->code[r], &codes, sizeof codes); }

/* Pack a block of 4-bit or 8-bit codes, which is already in the order of a tile's lines. */
INLINE void pack_in_order(const uint8_t *block, const int kind, int r, uint8_t *tile) {
    const tile_format *f = &FORMATS[kind];
    const int num_halves = f->has_minimum ? 2 : 1;
    memcpy(tile + f->d_at + 2 * r, block, 2);
    if (f->has_minimum) memcpy(tile + f->m_at + 2 * r, block + 2, 2);
    code_line *lines = (code_line *)(tile + f->codes_at);
    for (size_t j = 0; j < f->code_bytes / sizeof *lines; j++) {
        uint32_t codes;
        memcpy(&codes, block + 2 * num_halves + 4 * j, 4);
        if (f->code_bits == 8) codes ^= 0x80808080; /* signed in a file, offset by 128 in a tile */
        put_word(codes, &lines[j], r);
    }
}

/* Store a group's codes, four per word: low 4 bits in halves of a line's bytes, high bits in separate lines. */
static void put_codes(const uint8_t *codes, int kind, int r, code_line *lines) {
    const uint32_t low = 0x0f0f0f0f;
    uint32_t words[LM_GROUP / 4], high[2] = {0};
    memcpy(words, codes, sizeof words);
    for (int j = 0; j < 4; j++) put_word((words[j] & low) | (words[j + 4] & low) << 4, &lines[j], r);
    const int num_high = FORMATS[kind].code_bits - 4; /* number of high bits, and of lines for them */
    if (num_high == 0) return;
    for (int j = 0; j < LM_GROUP / 4; j++) high[high_line(kind, j) - 4] |= (words[j] >> 4 & low) << high_shift(kind, j);
    for (int i = 0; i < num_high; i++) put_word(high[i], &lines[4 + i], r);
}

static void put_six_bits(const plain_block *from, int r, six_bits *to) {
    for (int g = 0; g < GROUPS_OF_SUPER; g++) {
        const int s = from->s[g], t = from->t[g], late = g / 4;
        to->s[g % 4][r] |= (uint8_t)((s & 15) << 4 * late);
        to->t[g % 4][r] |= (uint8_t)((t & 15) << 4 * late);
        to->high[g % 4][r] |= (uint8_t)(s >> 4 << 2 * late | t >> 4 << (4 + 2 * late));
    }
}

static void put_signed(const plain_block *from, int r, tile_iq4_xs *to) {
    for (int g = 0; g < GROUPS_OF_SUPER; g++) {
        const int s = from->s[g], late = g / 4;
        to->s[g % 4][r] |= (uint8_t)((s & 15) << 4 * late);
        to->high[late][r] |= (uint8_t)(s >> 4 << 2 * (g % 4));
    }
}

static void put_block(const plain_block *from, int kind, int r, uint8_t *tile) {
    const tile_format *f = &FORMATS[kind];
    memcpy(tile + f->d_at + 2 * r, &from->d, 2);
    if (f->has_minimum) memcpy(tile + f->m_at + 2 * r, &from->m, 2);
    if (kind == LM_IQ4_XS)
        put_signed(from, r, (tile_iq4_xs *)tile);
    else if (f->small_scales == 1)
        put_six_bits(from, r, &((tile_q4_k *)tile)->small); /* at the same offset in Q5_K */
    for (int i = 0; f->small_scales == 2 && i < 2 * GROUPS_OF_SUPER; i++) ((tile_q6_k *)tile)->s[i][r] = (int8_t)from->s[i];
    for (int g = 0; g < f->cols / LM_GROUP; g++)
        put_codes(from->codes + g * LM_GROUP, kind, r, (code_line *)(tile + f->codes_at + g * f->code_bytes));
}

/* Write row r of a tile that is still zero. */
static void pack_block(const void *block, int kind, int r, uint8_t *tile) {
    plain_block plain;
    switch (kind) {
    case LM_Q5_0: read_q5_0(block, &plain); break;
    case LM_Q4_K: read_q4_k(block, &plain); break;
    case LM_Q5_K: read_q5_k(block, &plain); break;
    case LM_Q6_K: read_q6_k(block, &plain); break;
    case LM_IQ4_XS: read_iq4_xs(block, &plain); break;
    case LM_Q8_0: pack_in_order(block, LM_Q8_0, r, tile); return;
    case LM_Q4_1: pack_in_order(block, LM_Q4_1, r, tile); return;
    default: pack_in_order(block, LM_Q4_0, r, tile); return; /* IQ4_NL has the same layout */
    }
    put_block(&plain, kind, r, tile);
}

/* --- panels ------------------------------------------------------------------------------------------------------ */

static int panels_of(int rows) { return (rows + LM_TILE_ROWS - 1) / LM_TILE_ROWS; }

static size_t row_bytes(int kind, int cols) { /* tiles have the same size as their blocks */
    return (size_t)(cols / tile_cols(kind)) * tile_bytes(kind) / LM_TILE_ROWS;
}

/* Return the address of a panel's tiles. */
static uint8_t *tiles_at(uint8_t *tiles, int kind, int cols, int panel) {
    return tiles + (size_t)panel * LM_TILE_ROWS * row_bytes(kind, cols);
}

/* Pack up to 16 rows of blocks, each given by its address. */
static void pack_panel(const uint8_t *const *rows, int num_rows, int kind, int num_tiles, uint8_t *tiles) {
    const size_t size = tile_bytes(kind), block = size / LM_TILE_ROWS;
    for (int t = 0; t < num_tiles; t++, tiles += size) {
        memset(tiles, 0, size);
        for (int r = 0; r < num_rows; r++) pack_block(rows[r] + t * block, kind, r, tiles);
    }
}

/* --- from memory ------------------------------------------------------------------------------------------------- */

typedef struct {
    int kind, rows, cols;
    const uint8_t *blocks;
    uint8_t *tiles;
    atomic_int next;
} packing;

static void pack_panels(void *context, lm_team team) {
    (void)team;
    packing *p = context;
    const size_t stride = row_bytes(p->kind, p->cols);
    const int panels = panels_of(p->rows);
    for (int first; (first = lm_next(&p->next) * PANELS_OF_A_PIECE) < panels;)
        for (int panel = first; panel < panels && panel < first + PANELS_OF_A_PIECE; panel++) {
            const uint8_t *rows[LM_TILE_ROWS];
            int count = 0;
            for (; count < LM_TILE_ROWS && panel * LM_TILE_ROWS + count < p->rows; count++)
                rows[count] = p->blocks + (size_t)(panel * LM_TILE_ROWS + count) * stride;
            pack_panel(rows, count, p->kind, p->cols / tile_cols(p->kind), tiles_at(p->tiles, p->kind, p->cols, panel));
        }
}

void lm_pack(int32_t kind, int32_t rows, int32_t cols, const uint8_t *blocks, uint8_t *tiles) {
    packing p = {.kind = kind, .rows = rows, .cols = cols, .blocks = blocks, .tiles = tiles};
    /* fewer page faults while tiles are written, fewer TLB misses when they are read */
    lm_use_huge_pages(tiles, panels_of(rows) * LM_TILE_ROWS * row_bytes(kind, cols));
    lm_enter();
    lm_parallel(pack_panels, &p);
    lm_leave();
}

/* --- from files -------------------------------------------------------------------------------------------------- */

/* A thread's position among the matrices of a call, and its buffer. */
typedef struct {
    const lm_file_matrix *all;
    int count, at;   /* at: index of the last piece's matrix */
    int64_t first;   /* number of that matrix's first piece */
    uint8_t *memory; /* grows to the largest piece */
    size_t capacity;
} file_reader;

static int panels_at_once(const lm_file_matrix *w) {
    const size_t bytes = LM_TILE_ROWS * row_bytes(w->kind, w->cols);
    return bytes > BYTES_AT_ONCE ? 1 : (int)(BYTES_AT_ONCE / bytes);
}

/* Return the file's row of a matrix's row: if the file interleaves RoPE pairs, rows i and i + half of a head are its rows 2i and 2i + 1. */
static int stored_row(const lm_file_matrix *w, int row) {
    if (w->head_rows == 0) return row;
    const int half = w->head_rows / 2, i = row % w->head_rows, begin = row - i;
    return begin + (i < half ? 2 * i : 2 * (i - half) + 1);
}

/* Count the weights whose scale or minimum is NaN or infinite. */
static int64_t nonfinite_weights(const uint8_t *tiles, int kind, int num_tiles) {
    const tile_format *f = &FORMATS[kind];
    int64_t blocks = 0;
    for (int t = 0; t < num_tiles; t++, tiles += f->tile_bytes) {
        uint16_t d[LM_TILE_ROWS], m[LM_TILE_ROWS] = {0};
        memcpy(d, tiles + f->d_at, sizeof d);
        if (f->has_minimum) memcpy(m, tiles + f->m_at, sizeof m);
        for (int r = 0; r < LM_TILE_ROWS; r++) blocks += (d[r] & 0x7c00) == 0x7c00 || (m[r] & 0x7c00) == 0x7c00;
    }
    return blocks * f->cols;
}

/* Read the rows of some panels, extended to whole heads because RoPE pairs may be interleaved, and pack the panels. */
static int pack_piece(file_reader *reader, int first_panel, _Atomic int64_t *num_bytes) {
    const lm_file_matrix *w = &reader->all[reader->at];
    const int num_tiles = w->cols / tile_cols(w->kind), unit = w->head_rows ? w->head_rows : 1;
    const size_t stride = row_bytes(w->kind, w->cols);
    const int first = first_panel * LM_TILE_ROWS, wanted = first + panels_at_once(w) * LM_TILE_ROWS;
    const int end = wanted < w->rows ? wanted : w->rows, from = first / unit * unit, to = (end + unit - 1) / unit * unit;
    const size_t bytes = (size_t)(to - from) * stride;
    if (bytes > reader->capacity) {
        free(reader->memory);
        reader->memory = malloc(bytes);
        reader->capacity = reader->memory == NULL ? 0 : bytes;
        if (reader->memory == NULL) return LM_NO_MEMORY;
    }
    const int64_t begin = w->offset + (int64_t)from * (int64_t)stride;
    if (!lm_read_file(w->file, reader->memory, bytes, begin)) return LM_UNREADABLE;

    int64_t bad = 0;
    for (int row = first; row < end; row += LM_TILE_ROWS) {
        const uint8_t *rows[LM_TILE_ROWS];
        uint8_t *tiles = tiles_at(w->tiles, w->kind, w->cols, row / LM_TILE_ROWS);
        int count = 0;
        for (; count < LM_TILE_ROWS && row + count < end; count++)
            rows[count] = reader->memory + (size_t)(stored_row(w, row + count) - from) * stride;
        pack_panel(rows, count, w->kind, num_tiles, tiles);
        bad += nonfinite_weights(tiles, w->kind, num_tiles);
    }
    if (bad) atomic_fetch_add((_Atomic int64_t *)w->num_nonfinite, bad);
    atomic_fetch_add(num_bytes, (int64_t)(end - first) * (int64_t)stride);
    return LM_OK;
}

/* Advance the reader to the matrix of a piece and return the piece's first panel; -1 after the last piece. */
static int panel_of_piece(file_reader *reader, int64_t piece) {
    for (; reader->at < reader->count; reader->at++) {
        const lm_file_matrix *w = &reader->all[reader->at];
        const int step = panels_at_once(w), pieces = (panels_of(w->rows) + step - 1) / step;
        if (piece < reader->first + pieces) return (int)(piece - reader->first) * step;
        reader->first += pieces;
    }
    return -1;
}

int lm_pack_files(const lm_file_matrix *all, int32_t count, lm_packing *state) {
    _Atomic int64_t *next = (_Atomic int64_t *)&state->next, *num_bytes = (_Atomic int64_t *)&state->num_bytes;
    file_reader reader = {.all = all, .count = count};
    int code = LM_OK, panel;
    while (code == LM_OK && (panel = panel_of_piece(&reader, atomic_fetch_add(next, 1))) >= 0)
        code = pack_piece(&reader, panel, num_bytes);
    free(reader.memory);
    return code;
}

int lm_tile_of(int32_t kind, lm_tile *tile) {
    if (kind < 0 || kind >= (int)(sizeof FORMATS / sizeof *FORMATS) || FORMATS[kind].tile_bytes == 0) return LM_NO_TILES;
    const tile_format *f = &FORMATS[kind];
    *tile = (lm_tile){
        .columns = f->cols,
        .bytes = (int32_t)f->tile_bytes,
        .code_bytes = (int32_t)f->code_bytes,
        .codes_at = (int32_t)f->codes_at,
        .scales_at = (int32_t)f->d_at,
        .minima_at = f->has_minimum ? (int32_t)f->m_at : -1,
    };
    return LM_OK;
}
