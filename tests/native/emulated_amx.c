#include "emulated_amx.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TILES 8
#define MAX_ROWS 16
#define MAX_ROW_BYTES 64

typedef struct {
    int rows, row_bytes;
    uint8_t data[MAX_ROWS][MAX_ROW_BYTES];
} tile;

static _Thread_local int in_use;
static _Thread_local tile tiles[TILES];
static atomic_int num_products;

static void expect(int holds, const char *what) {
    if (holds) return;
    printf("AMX: %s\n", what);
    exit(1);
}

static tile *get(int number) {
    expect(in_use, "the tiles have no shapes");
    expect(number >= 0 && number < TILES, "there is no such tile");
    expect(tiles[number].rows > 0, "this tile has no shape");
    return &tiles[number];
}

void amx_load_config(const void *shapes) {
    const uint8_t *bytes = shapes;
    expect(bytes[0] == 1 && bytes[1] == 0, "palette 1 and start row 0 are expected");
    for (int i = 2; i < 16; i++) expect(bytes[i] == 0, "a reserved byte is not 0");
    memset(tiles, 0, sizeof tiles);
    for (int i = 0; i < 16; i++) {
        uint16_t row_bytes;
        memcpy(&row_bytes, bytes + 16 + 2 * i, 2);
        const int rows = bytes[48 + i];
        expect((rows == 0) == (row_bytes == 0), "a tile has rows and no columns, or columns and no rows");
        expect(rows <= MAX_ROWS && row_bytes <= MAX_ROW_BYTES, "a tile is too large");
        expect(i < TILES || rows == 0, "there are 8 tiles");
        if (rows == 0) continue;
        tiles[i].rows = rows;
        tiles[i].row_bytes = row_bytes;
    }
    in_use = 1;
}

void amx_release(void) {
    memset(tiles, 0, sizeof tiles);
    in_use = 0;
}

int amx_is_in_use(void) { return in_use; }

int amx_num_products(void) { return num_products; }

void amx_zero(int number) {
    tile *t = get(number);
    memset(t->data, 0, sizeof t->data);
}

void amx_load(int number, const void *from, ptrdiff_t stride) {
    tile *t = get(number);
    memset(t->data, 0, sizeof t->data);
    for (int r = 0; r < t->rows; r++) memcpy(t->data[r], (const uint8_t *)from + r * stride, t->row_bytes);
}

void amx_store(int number, void *to, ptrdiff_t stride) {
    const tile *t = get(number);
    for (int r = 0; r < t->rows; r++) memcpy((uint8_t *)to + r * stride, t->data[r], t->row_bytes);
}

static void expect_shapes(const tile *sums, const tile *a, const tile *b) {
    expect(sums != a && sums != b && a != b, "a tile is used twice");
    expect(sums->row_bytes % 4 == 0 && a->row_bytes % 4 == 0 && b->row_bytes % 4 == 0, "a row is not made of four bytes each");
    expect(sums->rows == a->rows && sums->row_bytes == b->row_bytes && a->row_bytes / 4 == b->rows, "shapes differ");
    num_products++;
}

void amx_multiply_bytes(int to, int first, int second) {
    tile *sums = get(to);
    const tile *a = get(first), *b = get(second);
    expect_shapes(sums, a, b);
    for (int m = 0; m < sums->rows; m++)
        for (int n = 0; n < sums->row_bytes / 4; n++) {
            uint32_t sum; /* it wraps around */
            memcpy(&sum, &sums->data[m][4 * n], 4);
            for (int k = 0; k < a->row_bytes; k++)
                sum += (uint32_t)((int8_t)a->data[m][k] * (int8_t)b->data[k / 4][4 * n + k % 4]);
            memcpy(&sums->data[m][4 * n], &sum, 4);
        }
}
