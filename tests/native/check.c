/* Holds every set of kernels that this machine has to the portable one, over odd shapes and extreme values.
 *
 * Meant to run under sanitizers: each array is exactly as large as the kernels may touch. Results must be the same to
 * the bit for every number of threads, and for rows that come together or one by one. Prints a line for each set; ends
 * with a message and exit code 1 at the first difference.
 *
 *   check              everything
 *   check --no-fork    for emulators, which cannot fork beside threads
 *   check --races      only what several threads do, for a sanitizer that slows each access and looks for races alone
 *   check --list       only names the sets that this machine has
 *   check SET          only this set
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifndef _WIN32
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "llamarium.h"
#include "system.h"
#include "tiles.h"
#ifdef LM_EMULATE_AMX
#include "emulated_amx.h"
#endif

#define LENGTH(array) (int)(sizeof array / sizeof *array)

static const char *const SETS[] = {"portable", "avx2", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx", "neon_dotprod", "neon_i8mm"};
static const char *const KINDS[] = {"BF16", "Q8_0", "Q4_0", "Q4_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "F32", "Q5_0", "F16", "IQ4_XS"};
enum { MIXED = LM_INT4 + 1 }; /* a cache of keys in 8 bits and values in 4 */
static const char *const DTYPES[] = {"float32", "bfloat16", "int8", "float16", "int4", "int8-k/int4-v"};

static void *allocate(size_t bytes) {
    void *memory = malloc(bytes);
    if (memory == NULL) abort();
    return memory;
}

#define ARRAY(type, count) ((type *)allocate((size_t)(count) * sizeof(type)))

/* The set whose results are a set's own, to the bit; the set itself if there is none. */
static const char *twin_of(const char *set) {
    if (strcmp(set, "avx_vnni") == 0) return "avx2";
    return strcmp(set, "amx") == 0 ? "avx512_vnni" : strcmp(set, "neon_i8mm") == 0 ? "neon_dotprod" : set;
}

/* Whether a set is the one that others are held to: what it gives is not computed twice. */
static int is_portable(const char *set) { return strcmp(set, "portable") == 0; }

/* Whether a set has a twin: one that has none would be compared with itself. */
static int has_twin(const char *set) { return strcmp(set, twin_of(set)) != 0; }

/* Whether a set rounds the inputs of a kind's products to BF16. */
static int rounds_to_bf16(const char *set, int kind) { return kind == LM_BF16 && strcmp(set, "avx512_bf16") == 0; }

/* Whether a kind's weights are numbers, not packed. */
static int is_float(int kind) { return kind == LM_BF16 || kind == LM_F16 || kind == LM_F32; }

/* --- random things ---------------------------------------------------------------------------------------------- */

static uint64_t state = 88172645463325252u;

static uint32_t random_bits(void) { /* Marsaglia's xorshift64* */
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (uint32_t)((state * 2685821657736338717u) >> 32);
}

static float random_float(void) { return (float)(random_bits() >> 8) / 8388608 - 1; } /* from -1 to 1 */

static uint16_t random_half(int kind) { /* so that weights are of size 0.1; one in 16 is smaller than normal numbers are */
    const uint32_t bits = random_bits(), sign = bits & 0x8000;
    const uint32_t least = is_super(kind) ? 0x0c00 : kind == LM_Q4_0 || kind == LM_Q4_1 ? 0x2400 : 0x1400; /* 2^-12, 2^-6, 2^-10 */
    return (uint16_t)(sign | (bits % 16 == 0 ? (bits >> 16) & 0x3ff : least + (bits >> 16) % 0x800));
}

static float *random_floats(size_t count) {
    float *values = ARRAY(float, count);
    for (size_t i = 0; i < count; i++) values[i] = random_float();
    return values;
}

static uint8_t codebook[16] = {255, 1, 2, 54, 79, 93, 106, 118, 128, 129, 140, 153, 166, 181, 197, 217};

enum { RANDOM_CODES = -1 };

/* A matrix whose codes are random, or all of them the byte `codes`, as are the small integers of the K types; its scales
 * are random, and zero past its rows. */
static lm_matrix random_matrix(int kind, int rows, int cols, int codes) {
    lm_matrix w = {kind, rows, cols, NULL, kind == LM_IQ4_NL || kind == LM_IQ4_XS ? codebook : NULL, NULL};
    if (kind == LM_F32) {
        w.data = random_floats((size_t)rows * cols);
        return w;
    }
    if (is_float(kind)) {
        uint16_t *weights = ARRAY(uint16_t, (size_t)rows * cols);
        for (size_t i = 0; i < (size_t)rows * cols; i++)
            weights[i] = kind == LM_BF16 ? to_bf16(random_float() * 0.2f) : to_half(random_float() * 0.2f);
        w.data = weights;
        return w;
    }
    const size_t panels = ((size_t)rows + 15) / 16, num_tiles = (size_t)tiles_of(&w), size = tile_bytes(kind);
    const size_t num_halves = kind == LM_Q4_1 || kind == LM_Q4_K || kind == LM_Q5_K ? 32 : 16;
    const size_t halves_at = FORMATS[kind].d_at;
    uint8_t *tiles = ARRAY(uint8_t, panels * num_tiles * size);
    for (size_t tile = 0; tile < panels * num_tiles; tile++) {
        uint8_t *bytes = tiles + tile * size;
        for (size_t i = 0; i < size; i++) bytes[i] = (uint8_t)(codes == RANDOM_CODES ? random_bits() : (unsigned)codes);
        for (size_t i = 0; i < num_halves; i++) {
            const uint16_t half = tile / num_tiles * 16 + i % 16 < (size_t)rows ? random_half(kind) : 0;
            memcpy(bytes + halves_at + 2 * i, &half, 2);
        }
    }
    w.data = tiles;
    return w;
}

/* --- comparing -------------------------------------------------------------------------------------------------- */

static char doing[200]; /* what is being compared, for messages */

static void fail(const char *what) {
    printf("%s: %s\n", doing, what);
    exit(1);
}

static void expect_same(const void *found, const void *expected, size_t bytes, const char *what) {
    if (memcmp(found, expected, bytes) != 0) fail(what);
}

static void use(const char *set) {
    if (lm_use_kernels(set) != 0 || strcmp(lm_kernels(), set) != 0) fail("a set that was there is not");
}

static float worst; /* the largest difference of this set so far, relative to the largest value expected */

static void expect_close(const float *found, const float *expected, size_t count, float bound) {
    float largest = 0, difference = 0;
    for (size_t i = 0; i < count; i++) {
        if (!isfinite(found[i]) || !isfinite(expected[i])) fail("not finite");
        largest = fmaxf(largest, fabsf(expected[i]));
        difference = fmaxf(difference, fabsf(found[i] - expected[i]));
    }
    if (difference > bound * largest) {
        printf("largest difference %g of %g; ", difference, largest);
        fail("differs from the portable kernels");
    }
    if (largest > 0) worst = fmaxf(worst, difference / largest);
}

/* --- products --------------------------------------------------------------------------------------------------- */

static int input_bits = 16; /* of products and passes */
static int only_races;      /* whether what one thread does by itself is left out */

static void multiply(const lm_matrix *w, const float *x, int num_rows, float *y) {
    if (lm_product(w, x, num_rows, input_bits, y) != LM_OK) fail("no memory");
#ifdef LM_EMULATE_AMX
    if (amx_is_in_use()) fail("the tiles' registers are kept after the job");
#endif
}

/* `extreme` inputs are all of one size, so that their 8-bit codes are 127 and -127. */
static void check_product(const char *set, int kind, int rows, int cols, int num_rows, int codes, int extreme) {
    snprintf(doing, sizeof doing, "%s, %s (%d, %d), codes %d, %d%s inputs", set, KINDS[kind], rows, cols, codes, num_rows,
             extreme ? " extreme" : "");
    const lm_matrix w = random_matrix(kind, rows, cols, codes);
    float *x = random_floats((size_t)num_rows * cols);
    for (int i = 0; extreme && i < num_rows * cols; i++) x[i] = x[i] < 0 ? -0.7f : 0.7f;
    float *expected = ARRAY(float, num_rows * rows), *y = ARRAY(float, num_rows * rows), *again = ARRAY(float, num_rows * rows);
    const size_t bytes = (size_t)num_rows * rows * sizeof(float);

    float *taken = ARRAY(float, num_rows * cols); /* inputs as the set multiplies them */
    for (int i = 0; i < num_rows * cols; i++) taken[i] = rounds_to_bf16(set, kind) ? from_bf16(to_bf16(x[i])) : x[i];

    lm_set_threads(1);
    use("portable");
    multiply(&w, taken, num_rows, expected);
    use(set);
    if (is_portable(set))
        memcpy(y, expected, bytes);
    else
        multiply(&w, x, num_rows, y);
    expect_close(y, expected, (size_t)num_rows * rows, 1e-4f);
    if (has_twin(set)) {
        use(twin_of(set));
        multiply(&w, x, num_rows, again);
        expect_same(again, y, bytes, "its twin gives other results");
        use(set);
    }
    if (!only_races) {
        for (int row = 0; row < num_rows; row++) multiply(&w, x + (size_t)row * cols, 1, again + (size_t)row * rows);
        expect_same(again, y, bytes, "rows one by one give other results");
    }
    for (int threads = 2; threads <= 3; threads++) {
        lm_set_threads(threads);
        multiply(&w, x, num_rows, again);
        expect_same(again, y, bytes, "other results with more threads");
    }
    free((void *)w.data);
    free(x);
    free(taken);
    free(expected);
    free(y);
    free(again);
}

/* Floats, whose products all sets compile from one source, against sums of doubles. */
static float weight_at(const lm_matrix *w, int place) {
    if (w->kind == LM_F32) return ((const float *)w->data)[place];
    const uint16_t bits = ((const uint16_t *)w->data)[place];
    return w->kind == LM_F16 ? from_half(bits) : from_bf16(bits);
}

/* Of one token, of some, and of so many that columns are multiplied in blocks; with columns that are no whole groups, or blocks. */
static void check_float_product(const char *set, int kind, int cols) {
    enum { HEIGHT = 50, COUNT = 67 };
    snprintf(doing, sizeof doing, "%s, %s of %d columns against doubles", set, KINDS[kind], cols);
    const lm_matrix w = random_matrix(kind, HEIGHT, cols, RANDOM_CODES);
    float *x = random_floats(COUNT * cols), *expected = ARRAY(float, COUNT * HEIGHT), *y = ARRAY(float, COUNT * HEIGHT);
    for (int m = 0; m < COUNT; m++)
        for (int r = 0; r < HEIGHT; r++) {
            double sum = 0;
            for (int c = 0; c < cols; c++) sum += (double)weight_at(&w, r * cols + c) * x[m * cols + c];
            expected[m * HEIGHT + r] = (float)sum;
        }
    lm_set_threads(1);
    use(set);
    const int counts[] = {1, 7, COUNT};
    for (int i = 0; i < LENGTH(counts); i++) {
        multiply(&w, x, counts[i], y);
        expect_close(y, expected, counts[i] * HEIGHT, rounds_to_bf16(set, kind) ? 1e-2f : 1e-5f);
    }
    free((void *)w.data);
    free(x);
    free(expected);
    free(y);
}

/* Whether this many rows of inputs are worth a product of their own. The portable set takes packed weights' rows one after another,
 * so of them only those count that are close to the edges of what is multiplied at once. */
static int is_a_case(const char *set, int kind, int num_rows) {
    const int edge = ROWS_IN_CACHE / 2;
    return !is_portable(set) || is_float(kind) || (num_rows + 3) % edge <= 6;
}

/* Every number of rows, up to two more than what a product takes at once, against one row by the twin. */
static void check_row_counts(const char *set, int kind) {
    enum { MOST = 70, ROWS = 33 };
    const int cols = 2 * tile_cols(kind);
    const lm_matrix w = random_matrix(kind, ROWS, cols, RANDOM_CODES);
    float *x = random_floats(MOST * cols), *expected = ARRAY(float, MOST * ROWS);
    lm_set_threads(1);
    use(twin_of(set));
    for (int row = 0; row < MOST; row++) multiply(&w, x + row * cols, 1, expected + row * ROWS);
    use(set);
    for (int num_rows = 1; num_rows <= MOST; num_rows++) {
        if (!is_a_case(set, kind, num_rows)) continue;
        float *some = ARRAY(float, num_rows * cols), *y = ARRAY(float, num_rows * ROWS);
        memcpy(some, x, (size_t)num_rows * cols * sizeof(float));
        snprintf(doing, sizeof doing, "%s, %s, %d rows of inputs", set, KINDS[kind], num_rows);
        multiply(&w, some, num_rows, y);
        expect_same(y, expected, (size_t)num_rows * ROWS * sizeof(float), "other results than one by one");
        free(some);
        free(y);
    }
    free((void *)w.data);
    free(x);
    free(expected);
}

/* NaN and infinity in a row make all of its results NaN (infinite or NaN for floats), and leave other rows alone. */
static void check_poison(const char *set, int kind, float poison) {
    snprintf(doing, sizeof doing, "%s, %s, %g in the inputs", set, KINDS[kind], poison);
    const int cols = 2 * tile_cols(kind);
    const lm_matrix w = random_matrix(kind, 17, cols, RANDOM_CODES);
    float *x = random_floats(2 * (size_t)cols), *y = ARRAY(float, 2 * 17);
    x[40] = poison;
    multiply(&w, x, 2, y);
    for (int r = 0; r < 2 * 17; r++)
        if (isfinite(y[r]) != (r >= 17)) fail("a result is finite that should not be, or the other way round");
    free((void *)w.data);
    free(x);
    free(y);
}

/* Rows as they are looked up, by one thread and by several, are what the products with unit vectors say. */
static void check_lookup(const char *set, int kind) {
    enum { MANY = 35, TIMES = 20, MOST = 256 };
    const int cols = is_super(kind) ? MOST : 96;
    snprintf(doing, sizeof doing, "%s, rows of %s", set, KINDS[kind]);
    const lm_matrix w = random_matrix(kind, MANY, cols, RANDOM_CODES);
    static float unit[MOST * MOST], columns[MOST * MANY], expected[MANY * MOST];
    float *found = ARRAY(float, TIMES * MANY * cols);
    int64_t rows[TIMES * MANY];
    memset(unit, 0, sizeof unit);
    for (int i = 0; i < cols; i++) unit[i * cols + i] = 1;
    multiply(&w, unit, cols, columns);
    for (int n = 0; n < TIMES * MANY; n++) rows[n] = MANY - 1 - n % MANY;
    for (int n = 0; n < MANY; n++)
        for (int i = 0; i < cols; i++) expected[n * cols + i] = columns[i * MANY + rows[n]];
    lm_lookup(&w, rows, MANY, found);
    expect_close(found, expected, (size_t)MANY * cols, 1e-6f);
    lm_lookup(&w, rows, TIMES * MANY, found);
    for (int i = 0; i < TIMES; i++) expect_close(found + (size_t)i * MANY * cols, expected, (size_t)MANY * cols, 1e-6f);
    free((void *)w.data);
    free(found);
}

/* Whether threads divide a kind's product as that of no kind before it: numbers, tiles and super tiles. */
static int divides_alone(int kind) { return kind == LM_BF16 || kind == LM_Q8_0 || kind == LM_Q4_K; }

static void check_products(const char *set) {
    const int shapes[][2] = {{1, 1}, {16, 1}, {33, 2}, {77, 3}, {209, 1}}; /* rows, tiles of columns; 14 panels: 8, 4 and 2 */
    const int counts[] = {1, 5, 14};
    const int odd[] = {1, 31, 33, 96, 131, 2100};
    for (int kind = 0; kind < LENGTH(KINDS) && !only_races; kind++)
        for (int i = 0; i < LENGTH(odd) && is_float(kind); i++) check_float_product(set, kind, odd[i]);
    for (int kind = 0; kind < LENGTH(KINDS); kind++) {
        if (only_races && !divides_alone(kind)) continue;
        const int cols = tile_cols(kind);
        for (int bits = 8; bits <= 16; bits += 8) {
            input_bits = bits;
            if (!only_races) check_row_counts(set, kind);
            check_product(set, kind, 17, 2 * cols, 67, RANDOM_CODES, 0);
        }
        if (is_float(kind)) check_product(set, kind, 21, 2 * cols + 5, 67, RANDOM_CODES, 0);
        if (cols == LM_GROUP) check_product(set, kind, 17, 67 * cols, 9, RANDOM_CODES, 0); /* more than are prepared at once */
        for (int shape = 0; shape < LENGTH(shapes); shape++)
            for (int i = 0; i < LENGTH(counts); i++)
                check_product(set, kind, shapes[shape][0], shapes[shape][1] * cols, counts[i], RANDOM_CODES, 0);
        for (int extreme = 0; extreme <= 1; extreme++) {
            check_product(set, kind, 19, 2 * cols, 9, 0, extreme);
            check_product(set, kind, 19, 2 * cols, 9, 255, extreme);
        }
        check_lookup(set, kind);
        check_poison(set, kind, NAN);
        check_poison(set, kind, -INFINITY);
    }
}

/* --- runs ------------------------------------------------------------------------------------------------------- */

enum { LAYERS = 2, HIDDEN = 64, INTERMEDIATE = 96, KV_HEADS = 2, VOCAB = 77 };
enum { SEQUENCES = 2, POSITIONS = 600, VECTORS = SEQUENCES * KV_HEADS * POSITIONS, MOST_BLOCKS = SEQUENCES * (POSITIONS / 16 + 1) };

/* Each kind whose tiles fit into a small model, each dtype of the cache and each size of heads; how one is computed does not hang on
 * the others. Heads are whole groups of 32, as most models have; with AVX-512 four registers and a rest of eight; four, one more, and
 * no rest. One to four of them share a kv head, and one more than are computed at once. Windows begin within a chunk, a few tokens
 * before the last, and at a chunk's edge. */
static const struct {
    int kind, dtype, heads, head_dim, window;
} MODELS[] = {{LM_BF16, LM_BFLOAT16, 4, 64, 0},   {LM_Q8_0, LM_INT8, 8, 72, 0},     {LM_Q4_0, LM_FLOAT32, 6, 80, 0}, {LM_Q4_1, LM_INT8, 2, 64, 0},
              {LM_IQ4_NL, LM_BFLOAT16, 6, 80, 0}, {LM_F32, LM_FLOAT32, 4, 72, 0},   {LM_Q5_0, LM_FLOAT32, 2, 64, 0}, {LM_F16, LM_FLOAT32, 10, 80, 0},
              {LM_F32, LM_FLOAT32, 4, 72, 300},   {LM_BF16, LM_BFLOAT16, 6, 64, 7}, {LM_Q8_0, LM_INT8, 8, 72, 256},
              {LM_Q8_0, LM_INT4, 8, 80, 0},       {LM_F32, MIXED, 6, 128, 0},           {LM_Q4_0, LM_INT4, 2, 64, 7},    {LM_F32, LM_INT4, 10, 96, 300},
              {LM_F32, LM_INT4, 8, 24, 0},        {LM_BF16, MIXED, 4, 48, 0}};

/* A token's place. */
typedef struct {
    int32_t sequence, position;
} place;

/* Tokens of one sequence come together: a prompt and both sequences at the edges of chunks; one token of each; rows that are taken
 * together, over such an edge and at the end of the cache. */
static const place PLACES[] = {
    {0, 0},   {0, 1},   {0, 2},   {0, 255}, {0, 256}, {1, 3},   {1, 511}, {1, 512}, {0, 599}, {1, 599}, {0, 251}, {0, 252},
    {0, 253}, {0, 254}, {0, 255}, {0, 256}, {0, 257}, {0, 258}, {0, 259}, {1, 40},  {1, 591}, {1, 592}, {1, 593}, {1, 594},
    {1, 595}, {1, 596}, {1, 597}, {1, 598}, {1, 599}};
static const int CALLS[] = {8, 2, 19};
enum { ROWS = LENGTH(PLACES) };

typedef struct {
    lm_layer layers[LAYERS];
    lm_matrix head;
    float *norm, *frequencies;
    lm_model model;
} tiny;

static void make_tiny(tiny *t, int kind, int heads, int head_dim, int window) {
    const int q = heads * head_dim, kv = KV_HEADS * head_dim;
    t->norm = random_floats(HIDDEN);
    t->frequencies = ARRAY(float, head_dim / 2);
    for (int i = 0; i < head_dim / 2; i++) t->frequencies[i] = powf(500000, -2.0f * i / head_dim);
    for (int i = 0; i < LAYERS; i++)
        t->layers[i] = (lm_layer){
            .attention_norm = t->norm,
            .mlp_norm = t->norm,
            .q = random_matrix(kind, q, HIDDEN, RANDOM_CODES),
            .k = random_matrix(kind, kv, HIDDEN, RANDOM_CODES),
            .v = random_matrix(kind, kv, HIDDEN, RANDOM_CODES),
            .o = random_matrix(kind, HIDDEN, q, RANDOM_CODES),
            .gate = random_matrix(kind, INTERMEDIATE, HIDDEN, RANDOM_CODES),
            .up = random_matrix(kind, INTERMEDIATE, HIDDEN, RANDOM_CODES),
            .down = random_matrix(kind, HIDDEN, INTERMEDIATE, RANDOM_CODES),
        };
    t->head = random_matrix(kind, VOCAB, HIDDEN, RANDOM_CODES);
    t->model = (lm_model){LAYERS, HIDDEN, INTERMEDIATE, heads, KV_HEADS, head_dim,
                          1e-5f, LM_FLOAT32, t->frequencies, 1, t->norm, t->layers, t->head, t->head, 0, NULL, input_bits, window};
}

static void free_tiny(tiny *t) {
    for (int i = 0; i < LAYERS; i++) {
        const lm_layer *l = &t->layers[i];
        const lm_matrix *all[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down};
        for (int j = 0; j < LENGTH(all); j++) free((void *)all[j]->data);
    }
    free((void *)t->head.data);
    free(t->norm);
    free(t->frequencies);
}

/* Keys and values in blocks, whose order is random. */
typedef struct {
    void *k[LAYERS], *v[LAYERS];
    void *k_scales[LAYERS], *v_scales[LAYERS];
    int32_t tables[MOST_BLOCKS];
    lm_cache cache;
} tiny_cache;

static void shuffle(int32_t *values, int count) {
    for (int i = 0; i < count; i++) values[i] = i;
    for (int i = count - 1; i > 0; i--) {
        const int j = (int)(random_bits() % (unsigned)(i + 1)), value = values[i];
        values[i] = values[j];
        values[j] = value;
    }
}

static size_t bytes_of(int dtype) { return dtype == LM_FLOAT32 ? 4 : dtype == LM_BFLOAT16 ? 2 : 1; }

static int k_dtype_of(int dtype) { return dtype == MIXED ? LM_INT8 : dtype; }
static int v_dtype_of(int dtype) { return dtype == MIXED ? LM_INT4 : dtype; }

/* Of a vector, scales apart; and of its scales. */
static size_t vector_size(int dtype, int head_dim) {
    return dtype == LM_INT4 ? (size_t)(head_dim + 31) / 32 * 16 : head_dim * bytes_of(dtype);
}
static size_t scales_size(int dtype, int head_dim) { return dtype == LM_INT4 ? (head_dim + 31) / 32 * 2 : 4; }

/* Numbers in a cache's dtype, and all of them once more behind the last, so that they can be read in a circle. */
static char *encode(const float *filled, size_t count, int dtype) {
    const size_t item = bytes_of(dtype);
    char *codes = ARRAY(char, 2 * count * item);
    for (size_t i = 0; i < count; i++)
        switch (dtype) {
        case LM_FLOAT32: ((float *)codes)[i] = filled[i]; break;
        case LM_BFLOAT16: ((uint16_t *)codes)[i] = to_bf16(filled[i]); break;
        default: ((int8_t *)codes)[i] = (int8_t)(filled[i] * 127);
        }
    memcpy(codes + count * item, codes, count * item);
    return codes;
}

/* A vector of `bytes` for each sequence, kv head and position, those of `codes` one after another, whatever the blocks' size and
 * order; of each 16 positions the first `unit` bytes lie together, then the next. Where no position lies all bits are set, which is NaN
 * for floats. */
static void *fill_blocks(const tiny_cache *c, size_t bytes, size_t unit, const char *codes) {
    const int size = c->cache.block_size, of_each = c->cache.num_blocks / SEQUENCES;
    const size_t whole = (size_t)c->cache.num_blocks * KV_HEADS * size * bytes;
    char *memory = ARRAY(char, whole);
    memset(memory, 0xff, whole);
    for (int vector = 0; vector < VECTORS; vector++) {
        const int position = vector % POSITIONS, head = vector / POSITIONS % KV_HEADS, sequence = vector / POSITIONS / KV_HEADS;
        const size_t block = c->tables[sequence * of_each + position / size];
        char *strip = memory + ((block * KV_HEADS + head) * size + position % size / 16 * 16) * bytes;
        for (size_t byte = 0; byte < bytes; byte += unit)
            memcpy(strip + 16 * byte + position % 16 * unit, codes + vector * bytes + byte, unit);
    }
    return memory;
}

/* A cache in which `filled`, VECTORS * head_dim numbers, lies; each layer begins elsewhere in them. */
static void make_cache(tiny_cache *c, int dtype, int block_size, int head_dim, const float *filled) {
    const int num_blocks = SEQUENCES * ((POSITIONS + block_size - 1) / block_size);
    const int dtypes[] = {k_dtype_of(dtype), v_dtype_of(dtype)};
    void **kept[] = {c->k, c->v}, **scales[] = {c->k_scales, c->v_scales};
    shuffle(c->tables, num_blocks);
    c->cache = (lm_cache){dtypes[0], dtypes[1], num_blocks, block_size, c->k, c->v, c->k_scales, c->v_scales};
    for (int part = 0; part < 2; part++) {
        const int own = dtypes[part];
        const size_t apart = 7919 * bytes_of(own), count = scales_size(own, head_dim) / (own == LM_INT4 ? 2 : 4);
        char *codes = encode(filled, (size_t)VECTORS * head_dim, own), *numbers = ARRAY(char, (VECTORS + 2 * LAYERS) * 4 * count);
        for (size_t i = 0; i < (VECTORS + 2 * LAYERS) * count; i++) {
            const float scale = (filled[i] + 1) / (own == LM_INT4 ? 7 : 127);
            if (own == LM_INT4)
                ((uint16_t *)numbers)[i] = to_bf16(scale);
            else
                ((float *)numbers)[i] = scale;
        }
        for (int i = 0; i < LAYERS; i++) {
            const int place = part * LAYERS + i;
            const size_t bytes = vector_size(own, head_dim), of_scales = scales_size(own, head_dim);
            const int in_strips = part == 0 && (own == LM_INT8 || own == LM_INT4);
            kept[part][i] = fill_blocks(c, bytes, !in_strips ? bytes : own == LM_INT8 ? 2 : 4, codes + place * apart);
            scales[part][i] = fill_blocks(c, of_scales, own == LM_INT4 ? 2 : of_scales, numbers + place * of_scales);
        }
        free(codes);
        free(numbers);
    }
}

static void free_cache(tiny_cache *c) {
    for (int i = 0; i < LAYERS; i++) {
        free(c->k[i]);
        free(c->v[i]);
        free(c->k_scales[i]);
        free(c->v_scales[i]);
    }
}

/* logits (rows, VOCAB) of the tokens at the places from `row` on, and what lies before and behind the layers (rows, HIDDEN). */
static int run_rows(const tiny *t, const tiny_cache *c, const int64_t *ids, int row, int rows, lm_taps taps, float *logits) {
    int32_t *positions = ARRAY(int32_t, rows), *sequences = ARRAY(int32_t, rows), *wanted = ARRAY(int32_t, rows);
    for (int i = 0; i < rows; i++) {
        positions[i] = PLACES[row + i].position;
        sequences[i] = PLACES[row + i].sequence;
        wanted[i] = i;
    }
    const lm_batch batch = {rows, SEQUENCES, c->cache.num_blocks / SEQUENCES, rows, ids + row, positions, sequences, c->tables, wanted,
                            NULL, NULL};
    const int code = lm_run(&t->model, &c->cache, &batch, taps.embed == NULL ? NULL : &taps, logits);
    free(positions);
    free(sequences);
    free(wanted);
    return code;
}

/* logits (ROWS, VOCAB) of all calls, or of each token alone. */
static void run_all(const tiny *t, const float *filled, int dtype, int block_size, const int64_t *ids, int one_by_one, float *logits) {
    tiny_cache c;
    make_cache(&c, dtype, block_size, t->model.head_dim, filled);
    for (int call = 0, row = 0, rows; row < ROWS; row += rows) {
        rows = one_by_one ? 1 : CALLS[call++];
        if (run_rows(t, &c, ids, row, rows, (lm_taps){0}, logits + row * VOCAB) != LM_OK) fail("not run");
    }
    free_cache(&c);
}

/* A run is a lookup, the layers, and a product of the last norm; a token that there is not touches nothing. */
static void check_parts(const tiny *t, const float *filled, int dtype, const int64_t *ids, const float *expected) {
    static float embedded[ROWS * HIDDEN], normed[ROWS * HIDDEN], looked_up[ROWS * HIDDEN], logits[ROWS * VOCAB], of_parts[ROWS * VOCAB];
    const int rows = CALLS[0];
    const size_t bytes = (size_t)rows * VOCAB * sizeof(float);
    int64_t wrong[ROWS];
    memcpy(wrong, ids, sizeof wrong);
    wrong[rows - 1] = VOCAB;
    tiny_cache c;
    make_cache(&c, dtype, 64, t->model.head_dim, filled);
    if (run_rows(t, &c, wrong, 0, rows, (lm_taps){0}, logits) != LM_NO_SUCH_ROW) fail("a token past the last one is taken");
    if (run_rows(t, &c, ids, 0, rows, (lm_taps){.embed = embedded, .final_norm = normed}, logits) != LM_OK) fail("not run");
    expect_same(logits, expected, bytes, "other logits after a token that there is not, or with taps");
    if (lm_lookup(&t->head, ids, rows, looked_up) != LM_OK) fail("no such row");
    expect_same(embedded, looked_up, (size_t)rows * HIDDEN * sizeof(float), "other embeddings than are looked up");
    multiply(&t->head, normed, rows, of_parts);
    expect_same(of_parts, expected, bytes, "other logits than the product of the last norm");
    free_cache(&c);
}

/* Tokens that are run once more, each as a sequence of its own over one table, store what others of them read: the same bits. */
static void check_again(const tiny *t, const float *filled, int dtype, const int64_t *ids, const float *expected) {
    enum { FIRST = 10, AGAIN = 9, MOST_OF_EACH = MOST_BLOCKS / SEQUENCES };
    static float logits[ROWS * VOCAB];
    int32_t positions[AGAIN], sequences[AGAIN], wanted[AGAIN], tables[AGAIN * MOST_OF_EACH];
    tiny_cache c;
    make_cache(&c, dtype, 128, t->model.head_dim, filled);
    const int of_each = c.cache.num_blocks / SEQUENCES;
    for (int call = 0, row = 0; row < ROWS; row += CALLS[call++])
        if (run_rows(t, &c, ids, row, CALLS[call], (lm_taps){0}, logits) != LM_OK) fail("not run");
    for (int i = 0; i < AGAIN; i++) {
        positions[i] = PLACES[FIRST + i].position;
        sequences[i] = wanted[i] = i;
        memcpy(tables + i * of_each, c.tables, of_each * sizeof *tables);
    }
    const lm_batch batch = {AGAIN, AGAIN, of_each, AGAIN, ids + FIRST, positions, sequences, tables, wanted, NULL, NULL};
    if (lm_run(&t->model, &c.cache, &batch, NULL, logits) != LM_OK) fail("not run");
    expect_same(logits, expected + FIRST * VOCAB, AGAIN * VOCAB * sizeof(float), "rows that are run once more give other results");
    free_cache(&c);
}

/* Close to the portable set; the same bits as its twin, whatever the blocks' size and order, whoever comes along, and on any number
 * of threads. */
static void check_run(const char *set, int kind, int dtype, int heads, int head_dim, int window) {
    static float expected[ROWS * VOCAB], logits[ROWS * VOCAB], again[ROWS * VOCAB];
    static const struct {
        int block_size, threads, one_by_one;
    } ways[] = {{16, 1, 1}, {64, 2, 0}, {256, 3, 0}, {256, 3, 1}};
    snprintf(doing, sizeof doing, "%s, a model in %s, %d heads of %d, window %d, %s cache", set, KINDS[kind], heads, head_dim, window,
             DTYPES[dtype]);
    int64_t ids[ROWS];
    for (int i = 0; i < ROWS; i++) ids[i] = random_bits() % VOCAB;
    tiny t;
    make_tiny(&t, kind, heads, head_dim, window);
    float *filled = random_floats((size_t)VECTORS * head_dim);
    lm_set_threads(1);
    use("portable");
    run_all(&t, filled, dtype, 16, ids, 0, expected);
    use(set);
    if (is_portable(set))
        memcpy(logits, expected, sizeof logits);
    else
        run_all(&t, filled, dtype, 16, ids, 0, logits);
    /* Where inputs or keys are rounded, a last bit decides at times between neighbours, which lie 1/127 apart. */
    const int is_rounded = !is_float(kind) || dtype != LM_FLOAT32 || rounds_to_bf16(set, kind);
    expect_close(logits, expected, ROWS * VOCAB, is_rounded ? 5e-2f : 1e-4f);

    if (has_twin(set)) {
        use(twin_of(set));
        run_all(&t, filled, dtype, 16, ids, 0, again);
        expect_same(again, logits, sizeof logits, "its twin gives other results");
        use(set);
    }
    check_parts(&t, filled, dtype, ids, logits);
    for (int i = 0; i < LENGTH(ways); i++) {
        if (only_races && ways[i].threads == 1) continue;
        lm_set_threads(ways[i].threads);
        run_all(&t, filled, dtype, ways[i].block_size, ids, ways[i].one_by_one, again);
        expect_same(again, logits, sizeof logits, ways[i].one_by_one ? "rows one by one give other results"
                                                                     : "other results in other blocks, on more threads");
    }
    check_again(&t, filled, dtype, ids, logits);
    free(filled);
    free_tiny(&t);
}

/* --- choices ---------------------------------------------------------------------------------------------------- */

/* Greedy choices are those of a plain loop; these draws are the same for every set and any number of threads, and only what the
 * filters leave is drawn. */
static void check_choices(const char *set) {
    enum { MANY = 6 };
    const int counts[] = {1, 15, 64, 65, 1000, 20011};
    for (int i = 0; i < LENGTH(counts); i++) {
        const int count = counts[i];
        snprintf(doing, sizeof doing, "%s, choices among %d", set, count);
        float *logits = random_floats((size_t)MANY * count);
        for (int j = 0; j < MANY * count; j++) logits[j] = roundf(logits[j] * 99) / 9; /* with many equals */
        for (int j = 0; j + 1 < count; j += 3) logits[j] = -INFINITY;
        uint32_t *mask = ARRAY(uint32_t, (count + 31) / 32);
        for (int j = 0; j < (count + 31) / 32; j++) mask[j] = 0x9d3b76a5u + (uint32_t)j;
        mask[(count - 1) / 32] |= 1u << (count - 1) % 32; /* one that is finite */
        const lm_choice how[MANY] = {{0, 0, 0, 1, 0, 0, NULL},   {0.7f, 0, 0, 1, 3, 0, NULL}, {1, 0, 7, 1, UINT64_MAX, 9, NULL},
                                     {1, 0, 0, 0.4, 5, 1, mask}, {2, 0.5f, 0, 1, 1, 2, NULL}, {1, 0.1f, 3000, 0.9, 7, UINT64_MAX, NULL}};
        int32_t *expected = ARRAY(int32_t, MANY), *ids = ARRAY(int32_t, MANY);
        for (int threads = 1; threads <= 3; threads++) {
            lm_set_threads(threads);
            use("portable");
            if (lm_choose(logits, MANY, count, how, expected) != LM_OK) fail("no memory");
            use(set);
            if (lm_choose(logits, MANY, count, how, ids) != LM_OK) fail("no memory");
            expect_same(ids, expected, MANY * sizeof *ids, "other choices");
        }
        int best = 0;
        for (int j = 0; j < count; j++) best = logits[j] > logits[best] ? j : best;
        if (ids[0] != best) fail("that is not the first of the largest");
        for (int row = 0; row < MANY; row++) {
            int larger = 0;
            const float *own = logits + (size_t)row * count;
            if (ids[row] < 0 || ids[row] >= count) fail("no token");
            for (int j = 0; j < count; j++) larger += own[j] > own[ids[row]];
            if (how[row].mask && !(mask[ids[row] / 32] >> ids[row] % 32 & 1)) fail("a token that the mask forbids");
            if (how[row].top_k > 0 && larger >= how[row].top_k) fail("a token outside of top-k");
        }
        const float bad[] = {NAN, INFINITY};
        for (int j = 0; j < LENGTH(bad); j++) {
            logits[count - 1] = bad[j];
            lm_choose(logits, 1, count, &how[j], ids);
            if (ids[0] != LM_NO_ID) fail("a choice without a finite maximum");
        }
        free(logits);
        free(mask);
        free(expected);
        free(ids);
    }
}

/* --- attention over rows ------------------------------------------------------------------------------------------ */

#define ROW_TOKENS 75
#define ROW_HEADS 4
#define ROW_KV_HEADS 2
static int row_dim;

static float kept_as(int dtype, float x) { return dtype == LM_BFLOAT16 ? from_bf16(to_bf16(x)) : x; }

/* Numbers of `dtype`, each as large as it may be touched, and the same as floats. */
static void *random_kept(int dtype, size_t count, float *floats) {
    void *kept = allocate(count * bytes_of(dtype));
    for (size_t i = 0; i < count; i++) {
        floats[i] = kept_as(dtype, random_float());
        if (dtype == LM_BFLOAT16)
            ((uint16_t *)kept)[i] = to_bf16(floats[i]);
        else
            ((float *)kept)[i] = floats[i];
    }
    return kept;
}

static float *as_floats(int dtype, const void *kept, size_t count) {
    float *floats = ARRAY(float, count);
    for (size_t i = 0; i < count; i++) floats[i] = dtype == LM_BFLOAT16 ? from_bf16(((const uint16_t *)kept)[i]) : ((const float *)kept)[i];
    return floats;
}

/* One query's output and its part of all gradients, by the definition, in doubles. */
static void attend_one(const lm_row_attention *c, const float *q, const float *k, const float *v, const float *grad, int token, int head,
                       double *out, double *grad_q, double *grad_k, double *grad_v) {
    double p[ROW_TOKENS], grad_p[ROW_TOKENS], sum = 0, share = 0;
    const double factor = 1 / sqrt((double)row_dim);
    const int own = (token * ROW_HEADS + head) * row_dim, kv_head = head * ROW_KV_HEADS / ROW_HEADS;
    for (int s = 0; s < ROW_TOKENS; s++) {
        const int other = (s * ROW_KV_HEADS + kv_head) * row_dim;
        double score = grad_p[s] = 0;
        for (int i = 0; i < row_dim; i++) score += (double)q[own + i] * k[other + i], grad_p[s] += (double)grad[own + i] * v[other + i];
        const int sees = (!c->causal || s <= token) && (c->window == 0 || s > token - c->window) && (c->segments == NULL || c->segments[s] == c->segments[token]);
        sum += p[s] = sees ? exp(score * factor) : 0;
    }
    for (int s = 0; s < ROW_TOKENS; s++) share += (p[s] /= sum) * grad_p[s];
    for (int s = 0; s < ROW_TOKENS; s++) {
        const int other = (s * ROW_KV_HEADS + kv_head) * row_dim;
        const double grad_score = p[s] * (grad_p[s] - share) * factor;
        for (int i = 0; i < row_dim; i++) {
            out[own + i] += p[s] * v[other + i];
            grad_v[other + i] += p[s] * grad[own + i];
            grad_q[own + i] += grad_score * k[other + i];
            grad_k[other + i] += grad_score * q[own + i];
        }
    }
}

/* Close to the definition, and the same bits on one thread and on three. */
static void check_row_attention(const char *set, int dtype, int causal, int window, int has_segments, int as_pass) {
    const int Q = ROW_TOKENS * ROW_HEADS * row_dim, K = ROW_TOKENS * ROW_KV_HEADS * row_dim;
    snprintf(doing, sizeof doing, "%s: attention over a row of %s, heads of %d, causal %d, window %d, segments %d, as a pass %d", set,
             DTYPES[dtype], row_dim, causal, window, has_segments, as_pass);
    float *floats[4] = {ARRAY(float, Q), ARRAY(float, K), ARRAY(float, K), ARRAY(float, Q)};
    void *given[4], *results[2][4];
    for (int i = 0; i < 4; i++) given[i] = random_kept(dtype, i % 3 ? K : Q, floats[i]);
    int32_t *segments = ARRAY(int32_t, ROW_TOKENS);
    for (int i = 0; i < ROW_TOKENS; i++) segments[i] = i < 20 ? 3 : i < 60 ? (int)(random_bits() % 2) : -1;
    for (int run = 0; run < 2; run++) {
        void **found = results[run];
        for (int i = 0; i < 4; i++) found[i] = allocate((i % 3 == 0 ? Q : K) * bytes_of(dtype));
        float *log_sums = ARRAY(float, ROW_TOKENS * ROW_HEADS);
        const lm_row_attention call = {dtype, 1, ROW_TOKENS, ROW_HEADS, ROW_KV_HEADS, row_dim, causal, window, as_pass,
                                       has_segments ? segments : NULL, given[0], given[1], given[2], found[3], log_sums, given[3], found[0], found[1], found[2]};
        lm_set_threads(run ? 3 : 1);
        if (lm_attend_rows(&call, 0) != LM_OK || lm_attend_rows(&call, 1) != LM_OK) fail("there is no memory");
        double *sums[4];
        for (int i = 0; i < 4; i++) sums[i] = calloc(i % 3 == 0 ? Q : K, sizeof(double));
        for (int i = 0; i < ROW_TOKENS * ROW_HEADS && run == 0; i++)
            attend_one(&call, floats[0], floats[1], floats[2], floats[3], i / ROW_HEADS, i % ROW_HEADS, sums[3], sums[0], sums[1], sums[2]);
        for (int i = 0; i < 4; i++) {
            const size_t count = i % 3 == 0 ? Q : K;
            float *expected = ARRAY(float, count), *values = as_floats(dtype, found[i], count);
            for (size_t j = 0; j < count; j++) expected[j] = (float)sums[i][j];
            if (run == 0) expect_close(values, expected, count, dtype == LM_BFLOAT16 ? 1e-2f : 2e-6f);
            if (run == 1) expect_same(found[i], results[0][i], count * bytes_of(dtype), "other bits on three threads");
            free(expected);
            free(values);
            free(sums[i]);
        }
        free(log_sums);
    }
    for (int i = 0; i < 4; i++) free(floats[i]), free(given[i]), free(results[0][i]), free(results[1][i]);
    free(segments);
}

static void check_rows_of_attention(const char *set) {
    for (row_dim = 64; row_dim >= 48; row_dim -= 16) /* pairs of bfloat16 fill a register, or do not */
        for (int dtype = LM_FLOAT32; dtype <= LM_BFLOAT16; dtype++)
            for (int how = 0; how < (only_races ? 1 : 4); how++) check_row_attention(set, dtype, how % 2 == 0, 0, how / 2, 0);
    row_dim = 48;
    for (int dtype = LM_FLOAT32; dtype <= LM_BFLOAT16; dtype++)
        for (int window = 1; window < ROW_TOKENS; window += 33) check_row_attention(set, dtype, 1, window, window > 30, 0);
    for (int window = 0; window < ROW_TOKENS; window += 29) check_row_attention(set, LM_FLOAT32, 1, window, 0, 1);
}

/* --- what a training step computes between its products ----------------------------------------------------------- */

#define POINT_ROWS 100 /* of more than one task, so that threads share them */
#define POINT_COLUMNS 192
#define POINT_DIM 96
#define POINT_ANGLES 15

/* Arrays that operations take and give: all numbers, of the dtype of x or of products, y; a weight's, one of each row, or angles, float32.
 * Norms also with what may be NULL. */
static const struct {
    int op;
    const char *takes, *gives;
} POINTWISE[] = {
    {LM_RMS_NORM, "xw", "yr"},    {LM_RMS_NORM, "xwy", "yrx"},     {LM_RMS_NORM_BACKWARD, "xwry", "xw"}, {LM_RMS_NORM_BACKWARD, "xwryx", "xwy"},
    {LM_SWIGLU, "yy", "y"},       {LM_SWIGLU_BACKWARD, "yyy", "yy"}, {LM_ROTATE, "yaa", "y"},            {LM_ROTATE_BACKWARD, "aay", "y"},
};

static size_t point_count(char what) {
    return what == 'w' ? POINT_COLUMNS : what == 'r' ? POINT_ROWS : what == 'a' ? POINT_ANGLES * POINT_DIM : POINT_ROWS * POINT_COLUMNS;
}

static int kept_in(char what, int dtype, int x_dtype) { return what == 'x' ? x_dtype : what == 'y' ? dtype : LM_FLOAT32; }

/* Close to the portable kernels, and the same bits on one thread and on three. */
static void check_pointwise(const char *set, int which, int dtype, int x_dtype) {
    const int op = POINTWISE[which].op;
    const char *takes = POINTWISE[which].takes, *gives = POINTWISE[which].gives;
    snprintf(doing, sizeof doing, "%s: pointwise operation %d of \"%s\", %s beside %s", set, op, takes, DTYPES[dtype], DTYPES[x_dtype]);
    lm_pointwise call = {op, dtype, x_dtype, POINT_ROWS, POINT_COLUMNS, POINT_DIM, POINT_ANGLES, 1e-5f, {NULL}, {NULL}};
    void *given[5], *results[3][3];
    for (int i = 0; takes[i]; i++) {
        float *floats = ARRAY(float, point_count(takes[i]));
        call.in[i] = given[i] = random_kept(kept_in(takes[i], dtype, x_dtype), point_count(takes[i]), floats);
        free(floats);
    }
    for (int run = 0; run < 3; run++) {
        use(run == 0 ? "portable" : set);
        lm_set_threads(run == 2 ? 3 : 1);
        for (int i = 0; gives[i]; i++) call.out[i] = results[run][i] = allocate(point_count(gives[i]) * bytes_of(kept_in(gives[i], dtype, x_dtype)));
        if (lm_compute_pointwise(&call) != LM_OK) fail("there is no memory");
    }
    for (int i = 0; gives[i]; i++) {
        const int kept = kept_in(gives[i], dtype, x_dtype);
        const size_t count = point_count(gives[i]);
        float *expected = as_floats(kept, results[0][i], count), *found = as_floats(kept, results[1][i], count);
        expect_close(found, expected, count, kept == LM_BFLOAT16 ? 8e-3f : 2e-6f);
        expect_same(results[2][i], results[1][i], count * bytes_of(kept), "other bits on three threads");
        free(expected);
        free(found);
        for (int run = 0; run < 3; run++) free(results[run][i]);
    }
    for (int i = 0; takes[i]; i++) free(given[i]);
}

/* A parameter of one number, of several tasks, and of less than a register; the norm is larger than allowed. */
static void check_clip(const char *set) {
    enum { GRADS = 3 };
    static const int64_t COUNTS[GRADS] = {1, 140001, 13};
    snprintf(doing, sizeof doing, "%s: clipping", set);
    float *given[GRADS], *grads[GRADS];
    double sum = 0, norm;
    for (int n = 0; n < GRADS; n++) {
        given[n] = random_floats((int)COUNTS[n]);
        grads[n] = ARRAY(float, COUNTS[n]);
        memcpy(grads[n], given[n], COUNTS[n] * sizeof(float));
        for (int i = 0; i < COUNTS[n]; i++) sum += (double)given[n][i] * given[n][i];
    }
    use(set);
    if (lm_clip(grads, COUNTS, GRADS, 0.5, &norm) != LM_OK) fail("there is no memory");
    expect_close((float[]){(float)norm}, (float[]){(float)sqrt(sum)}, 1, 1e-6f);
    for (int n = 0; n < GRADS; n++) {
        for (int i = 0; i < COUNTS[n]; i++) given[n][i] *= (float)(0.5 / (sqrt(sum) + 1e-6));
        expect_close(grads[n], given[n], COUNTS[n], 1e-6f);
        free(given[n]);
        free(grads[n]);
    }
}

static void check_all_pointwise(const char *set) {
    for (int which = 0; which < LENGTH(POINTWISE); which++)
        for (int dtype = LM_FLOAT32; dtype <= LM_BFLOAT16; dtype++)
            for (int x_dtype = LM_FLOAT32; x_dtype <= dtype; x_dtype++) check_pointwise(set, which, dtype, x_dtype);
}

/* --- the pool --------------------------------------------------------------------------------------------------- */

static lm_matrix shared_matrix;
static float *shared_x, *shared_y;

static void call_often(void *unused) {
    float y[77 * 3];
    (void)unused;
    for (int i = 0; i < 50; i++) {
        multiply(&shared_matrix, shared_x, 3, y);
        expect_same(y, shared_y, sizeof y, "other results for two callers at once");
    }
}

/* Lose the core for a while. */
static void pause_briefly(void) {
    for (const int64_t until = lm_now_ns() + 300000; lm_now_ns() < until;) lm_yield();
}

/* Call from a forked child, which has lost the threads; Windows has none. */
static void check_fork(void) {
#ifndef _WIN32
    const pid_t child = fork();
    if (child == 0) {
        call_often(NULL);
        _exit(0);
    }
    int status;
    if (waitpid(child, &status, 0) != child || status != 0) fail("the forked child failed");
#endif
}

/* Two callers at once while the number of threads changes; then a forked child. */
static void check_pool(int can_fork) {
    snprintf(doing, sizeof doing, "two callers and a fork");
    shared_matrix = random_matrix(LM_Q4_0, 77, 96, RANDOM_CODES);
    shared_x = random_floats(3 * 96);
    shared_y = ARRAY(float, 3 * 77);
    multiply(&shared_matrix, shared_x, 3, shared_y);
    lm_thread callers[2];
    for (int i = 0; i < 2; i++)
        if (!lm_start_thread(&callers[i], call_often, NULL)) fail("no thread");
    for (int i = 0; i < 60; i++) {
        lm_set_threads(1 + i % 3);
        if (lm_threads() < 1 || lm_kernels() == NULL) fail("no threads, or no kernels");
        pause_briefly();
    }
    for (int i = 0; i < 2; i++) lm_join_thread(callers[i]);

    lm_set_threads(3);
    call_often(NULL);
    if (can_fork) {
        check_fork();
        call_often(NULL);
    }
    free((void *)shared_matrix.data);
    free(shared_x);
    free(shared_y);
}

/* Packing touches no byte past its blocks and tiles, gives the same on any number of threads, and zeros past the last row. */
static void check_packing(void) {
    const int shapes[][2] = {{1, 256}, {16, 512}, {150, 256}};
    for (int kind = 0; kind < LENGTH(KINDS); kind++)
        for (int i = 0; i < LENGTH(shapes); i++) {
            const int rows = shapes[i][0], cols = shapes[i][1];
            if (tile_bytes(kind) == 0) continue; /* as the file has them */
            snprintf(doing, sizeof doing, "packing %d x %d of %s", rows, cols, KINDS[kind]);
            const size_t panels = (rows + LM_TILE_ROWS - 1) / LM_TILE_ROWS;
            const size_t row_bytes = cols / tile_cols(kind) * tile_bytes(kind) / LM_TILE_ROWS;
            const size_t bytes = panels * LM_TILE_ROWS * row_bytes;
            uint8_t *blocks = ARRAY(uint8_t, rows * row_bytes), *one = ARRAY(uint8_t, bytes), *three = ARRAY(uint8_t, bytes);
            for (size_t j = 0; j < rows * row_bytes; j++) blocks[j] = (uint8_t)random_bits();
            memset(three, 0xff, bytes);
            lm_set_threads(1);
            lm_pack(kind, rows, cols, blocks, one);
            lm_set_threads(3);
            lm_pack(kind, rows, cols, blocks, three);
            expect_same(three, one, bytes, "other tiles on three threads");
            const lm_matrix w = {kind, rows, cols, three, kind == LM_IQ4_NL || kind == LM_IQ4_XS ? codebook : NULL, NULL};
            float *values = ARRAY(float, cols);
            for (size_t row = rows; row < panels * LM_TILE_ROWS; row++) {
                unpack_row(&w, row / LM_TILE_ROWS, row % LM_TILE_ROWS, values);
                for (int j = 0; j < cols; j++)
                    if (values[j] != 0) fail("rows that there are not are not zero");
            }
            free(blocks);
            free(one);
            free(three);
            free(values);
        }
}

/* Reading touches no byte past the end, and its time is counted. */
static void check_clocks(void) {
    snprintf(doing, sizeof doing, "reading memory");
    const size_t bytes = 37 * 32768 + 5;
    char *memory = ARRAY(char, bytes);
    memset(memory, 1, bytes);
    const int64_t before = lm_busy_ns(), taken = lm_read_ns(memory, bytes);
    if (taken <= 0 || lm_busy_ns() <= before || lm_busy_ns() - before > taken) fail("the clocks disagree");
    free(memory);
}

static void check_set(const char *set) {
    worst = 0;
    check_products(set);
    check_choices(set);
    const float products = worst;
    worst = 0;
    check_rows_of_attention(set);
    const float rows = worst;
    worst = 0;
    check_all_pointwise(set);
    check_clip(set);
    const float pointwise = worst;
    worst = 0;
    const int num_models = only_races ? 3 : LENGTH(MODELS); /* the first have a cache of each dtype */
    for (int i = 0; i < num_models; i++)
        check_run(set, MODELS[i].kind, MODELS[i].dtype, MODELS[i].heads, MODELS[i].head_dim, MODELS[i].window);
    printf("%s: products within %.1e, attention over rows within %.1e, pointwise within %.1e, models within %.1e\n", set, products, rows, pointwise, worst);
#ifdef LM_EMULATE_AMX
    if (strcmp(set, "amx") == 0) printf("%d products of tiles were emulated\n", amx_num_products());
#endif
}

int main(int argc, char **argv) {
    const char *option = argc > 1 ? argv[1] : "";
    only_races = strcmp(option, "--races") == 0;
    const int only_names = strcmp(option, "--list") == 0, is_set = *option != 0 && *option != '-';
    if (!only_names && !is_set) {
        check_clocks();
        check_packing();
        check_pool(strcmp(option, "--no-fork") != 0);
    }
    for (int i = 0; i < LENGTH(SETS); i++) {
        if (lm_use_kernels(SETS[i]) != 0 || (is_set && strcmp(option, SETS[i]) != 0)) continue;
        if (only_names)
            puts(SETS[i]);
        else
            check_set(SETS[i]);
    }
    lm_set_threads(1); /* with the next call the others end */
    multiply(&(lm_matrix){LM_Q8_0, 0, 32, NULL, NULL, NULL}, NULL, 0, NULL);
    return 0;
}
