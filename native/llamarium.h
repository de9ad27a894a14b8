/* The CPU kernels of Llamarium: one plain C interface, called through ctypes.
 *
 * Everything here works on rows of tokens. A decode step is one row, a batch is several, a prompt is many; the
 * arithmetic of a row does not depend on how many there are, nor on the number of threads.
 *
 * Weights are rows of BF16, F16 or F32 as a file has them, or they are packed: they lie in tiles, in the order in which a product
 * reads them. native/tiles.h is the layout.
 */
#ifndef LLAMARIUM_H
#define LLAMARIUM_H

#include <stdint.h>

#define LM_EXPORT __attribute__((visibility("default")))

#define LM_TILE_ROWS 16
#define LM_GROUP 32
#define LM_SUPER 256 /* columns of a tile of the K types */

/* How a matrix is stored, under GGUF's names. */
enum {
    LM_BF16 = 0, LM_Q8_0 = 1, LM_Q4_0 = 2, LM_Q4_1 = 3, LM_IQ4_NL = 4, LM_Q4_K = 5, LM_Q5_K = 6, LM_Q6_K = 7, LM_F32 = 8,
    LM_Q5_0 = 9, LM_F16 = 10, LM_IQ4_XS = 11
};
enum { LM_FLOAT32 = 0, LM_BFLOAT16 = 1, LM_INT8 = 2, LM_FLOAT16 = 3, LM_INT4 = 4 }; /* no cache and no norm is LM_FLOAT16 */
enum { LM_OK = 0, LM_NO_MEMORY = 1, LM_NO_SUCH_ROW = 2, LM_BAD_BATCH = 3, LM_NO_TILES = 4, LM_UNREADABLE = 5 };

typedef struct {
    int32_t kind;
    int32_t rows;
    int32_t cols;            /* a multiple of 32, and of 256 for the K types */
    const void *data;
    const uint8_t *codebook; /* 16 entries of -127 to 127, plus 128, or NULL */
    const float *bias;       /* (rows), added to each product; NULL: none */
} lm_matrix;

typedef struct {
    const void *attention_norm, *mlp_norm; /* (hidden), of norm_dtype */
    lm_matrix q, k, v, o, gate, up, down;
} lm_layer;

/* y += b (scale * a x), then y *= gain, beside a product y = w x, before its bias is added. Nothing of x is rounded. */
typedef struct {
    int32_t rank;      /* 0: none */
    float scale;
    const float *a;    /* (rank, w.cols) */
    const float *b;    /* (w.rows, rank) */
    const float *gain; /* (w.rows): DoRA's magnitude over the norm of the merged row; NULL: none */
} lm_lora;

typedef struct {
    lm_lora q, k, v, o, gate, up, down;
} lm_lora_layer;

typedef struct {
    const lm_lora_layer *layers;
    lm_lora head;
} lm_adapter;

typedef struct {
    int32_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim;
    float norm_eps;
    int32_t norm_dtype;
    const float *frequencies; /* (head_dim / 2), radians a position */
    float attention_factor;   /* what cosines and sines are multiplied with, after YaRN; 1 otherwise */
    const void *final_norm;   /* (hidden), of norm_dtype */
    const lm_layer *layers;
    lm_matrix table, head;    /* embeddings (vocabulary, hidden); logits are the head times hidden states */
    int32_t num_adapters;
    const lm_adapter *adapters;
    int32_t input_bits; /* 8 or 16: what packed matrices' inputs are rounded to, but for outliers (docs/decisions/0022) */
    int32_t window; /* how many positions a token sees, the last one its own; 0: all up to its own */
} lm_model;

/* Keys and values in blocks of positions: (num_blocks, num_kv_heads, block_size, head_dim), one pointer a layer.
 *
 * As codes, x = scale * code, they are vectors that a Hadamard matrix has rotated, if head_dim is a power of two from 4 on:
 * outliers are spread over all numbers before these are rounded (docs/decisions/0058). LM_INT8: codes of -127 to 127, and one scale, float32,
 * a vector. LM_INT4: codes of -8 to 7 in groups of 32, the last one perhaps fewer, each of 16 bytes and a scale, the bits of a bfloat16.
 * Either both of k_dtype and v_dtype are codes, or they are equal.
 *
 * The keys of 16 slots that follow each other, a strip, lie together, so that a register has several slots' numbers. In 8 bits: codes 0
 * and 1 of the first slot, of the second and so on, then codes 2 and 3 of each. In 4: a word of 32 bits of each slot, then the next
 * word of each. Bits 4p to 4p + 3 of word w have code 8w + 2p, plus 8, and those 16 bits above code 8w + 2p + 1. The values of two
 * slots, an even one and the next, lie together, so that both are multiplied at once. In 8 bits: code i of the first one, then of
 * the second. In 4: a group has eight words of 32 bits, whose low half has codes j, 8 + j, 16 + j and 24 + j of the first one, plus 8,
 * the lowest bits first, and whose high half has those of the second. Scales of groups: of a strip's 16 slots the first group's, then
 * the second one's. */
typedef struct {
    int32_t k_dtype, v_dtype, num_blocks;
    int32_t block_size; /* a power of two from 16 to 256 */
    void **k, **v;
    void **k_scales, **v_scales; /* (num_blocks, num_kv_heads, block_size, scales of a vector), by strips in 4 bits; read where there are codes */
} lm_cache;

/* What a part of the model computes for a token, x, becomes factor * x + add. */
enum { LM_EDIT_EMBED, LM_EDIT_ATTENTION, LM_EDIT_HEAD, LM_EDIT_MLP, LM_EDIT_RESIDUAL, LM_EDITED_PARTS };
typedef struct {
    int32_t part;
    int32_t layer, head;      /* 0 where the part has none; of a head, what it mixes before it is multiplied with o */
    float factor;             /* 0 is zero, whatever x is */
    const float *add;         /* (hidden), of a head (head_dim); NULL: nothing */
    int32_t num_positions;    /* 0: all */
    const int32_t *positions; /* (num_positions), of the tokens where it is applied */
} lm_edit;

/* Those of one sequence, applied in order. The bits of other sequences do not depend on them. */
typedef struct {
    int32_t count;
    const lm_edit *all;
} lm_edits;

/* Tokens of some sequences. Those of one sequence follow each other, their positions ascending. A token sees its sequence's
 * positions up to its own, of a model with a window the last ones of these: those kept before, and those of the batch. Position p of a sequence lies in block
 * block_tables[sequence][p / block_size]. */
typedef struct {
    int32_t num_tokens, num_sequences, table_stride, num_logits;
    const int64_t *token_ids;    /* (num_tokens) */
    const int32_t *positions;    /* (num_tokens) */
    const int32_t *sequences;    /* (num_tokens), rows of block_tables */
    const int32_t *block_tables; /* (num_sequences, table_stride) */
    const int32_t *logit_rows;   /* (num_logits), the tokens whose logits are wanted, ascending */
    const int32_t *adapters;     /* (num_sequences), which of the model's adapters each uses, -1 for none; or NULL */
    const lm_edits *edits;       /* (num_sequences); or NULL: none */
} lm_batch;

/* What the pass computes on the way, float32, a row for each of the batch's tokens. Where a pointer is NULL nothing is handed out,
 * and nothing is spent on it. N query heads, K kv heads, H head_dim, F intermediate, D hidden. */
enum {
    LM_TAP_ATTN_NORM, /* D: the layer's input, normalised */
    LM_TAP_Q,         /* N * H: before the rotation */
    LM_TAP_K,         /* K * H: before the rotation */
    LM_TAP_V,         /* K * H */
    LM_TAP_Q_ROT,     /* N * H: after it, before the scaling by 1 / sqrt(H) */
    LM_TAP_HEAD_OUT,  /* N * H: the values that each head has mixed */
    LM_TAP_ATTN_OUT,  /* D: o times those */
    LM_TAP_RESID_MID, /* D: the layer's input + ATTN_OUT */
    LM_TAP_MLP_NORM,  /* D: that, normalised */
    LM_TAP_GATE,      /* F */
    LM_TAP_UP,        /* F */
    LM_TAP_ACT,       /* F: silu(GATE) */
    LM_TAP_GATED,     /* F: ACT * UP */
    LM_TAP_MLP_OUT,   /* D: down times that */
    LM_TAP_RESID,     /* D: the layer's output, RESID_MID + MLP_OUT */
    LM_TAPS_OF_A_LAYER
};
typedef struct {
    float *embed, *final_norm; /* (num_tokens, hidden) */
    float *const *layers;      /* (num_layers, LM_TAPS_OF_A_LAYER); NULL where none is wanted of any */
} lm_taps;

/* From tokens to logits (num_logits, head.rows): embeddings are looked up, run through all layers and the last norm, and multiplied
 * with the head; keys and values are kept. All numbers between the products are float32. A token's bits depend on its sequence
 * alone: not on the batch it comes in, nor on where a prompt is cut. LM_NO_SUCH_ROW: a token is outside of the vocabulary.
 * LM_BAD_BATCH: a position, block, sequence, adapter, edit's part or row of logits does not exist or is out of order. In both cases nothing is
 * computed. `taps` may be NULL. */
LM_EXPORT int lm_run(const lm_model *model, const lm_cache *cache, const lm_batch *batch, const lm_taps *taps, float *logits);

/* --- parts -------------------------------------------------------------------------------------------------------- */

/* y (num_rows, w.rows) = x (num_rows, w.cols) w^T + w.bias; x is rounded if w is packed, as lm_model's `input_bits` says. */
LM_EXPORT int lm_product(const lm_matrix *w, const float *x, int32_t num_rows, int32_t input_bits, float *y);

/* out (num_rows, w.cols): some rows of a matrix, as an embedding looks them up. */
LM_EXPORT int lm_lookup(const lm_matrix *w, const int64_t *rows, int32_t num_rows, float *out);

/* How a token is chosen from its logits. */
typedef struct {
    float temperature; /* 0: the largest logit, the first of equals */
    float min_p;
    int32_t top_k;     /* 0: all */
    double top_p;      /* 1: all */
    uint64_t seed, step; /* which of those that are left: a draw is a function of both */
    const uint32_t *mask; /* (count + 31) / 32: a token may come if its bit is set, the lowest bit first; NULL: any may */
} lm_choice;

enum { LM_NO_ID = -1 };

/* ids (num_rows): a token for each row of logits (num_rows, count); LM_NO_ID where those of
 * tokens that may come are NaN or have no finite maximum. */
LM_EXPORT int lm_choose(const float *logits, int32_t num_rows, int32_t count, const lm_choice *how, int32_t *ids);

/* Attention of every token over its own row, and its gradients: arrays (rows, tokens, heads, head_dim) of `dtype`, all
 * sums in float32. Query head n reads kv head n / (num_heads / num_kv_heads). */
typedef struct {
    int32_t dtype; /* LM_FLOAT32 or LM_BFLOAT16 */
    int32_t num_rows, num_tokens, num_heads, num_kv_heads;
    int32_t head_dim;        /* a multiple of 16 */
    int32_t causal;          /* a token sees none after it */
    int32_t window;          /* how many tokens one sees, the last one itself; 0: all up to itself; only if causal */
    int32_t as_pass;         /* forward with the bits of lm_run over a cache of LM_FLOAT32; float32, causal, no segments */
    const int32_t *segments; /* (rows, tokens): tokens of different numbers do not see each other; NULL: all are of one */
    const void *q, *k, *v;
    void *out;
    float *log_sums;      /* (rows, num_heads, tokens): the logarithm of each query's sum of exponentials */
    const void *grad_out; /* from here on of the backward pass only */
    void *grad_q, *grad_k, *grad_v;
} lm_row_attention;

/* Compute `out` and `log_sums`; or, `backward`, of those the three gradients. The same bits for every number of
 * threads. */
LM_EXPORT int lm_attend_rows(const lm_row_attention *call, int32_t backward);

/* What a training step computes between its products: arrays (num_rows, columns) in C's order, all sums in float32.
 * `dtype` is that of what a product takes or gives; a norm's x and its gradient are of `x_dtype`, and x / sqrt(...) is
 * rounded to it; its weight is float32. Backward passes take the output's gradient last. What stands in brackets may be NULL.
 *
 *     LM_RMS_NORM           x, weight, [added to x first] -> weight x / sqrt(mean(x^2) + eps), the divisor's inverse of each
 *                           row, [the sum]
 *     LM_RMS_NORM_BACKWARD  x, weight, the inverses, grad, [what x's is added to] -> of x, of weight, [of x, of `dtype`]
 *     LM_SWIGLU             gate, up -> silu(gate) up
 *     LM_SWIGLU_BACKWARD    gate, up, grad -> of gate, of up
 *     LM_ROTATE             x, cosines, sines (table_rows, head_dim), each row's partner's sign included -> rotated;
 *                           row r by angles r % table_rows
 *     LM_ROTATE_BACKWARD    cosines, sines, grad -> of x */
enum { LM_RMS_NORM, LM_RMS_NORM_BACKWARD, LM_SWIGLU, LM_SWIGLU_BACKWARD, LM_ROTATE, LM_ROTATE_BACKWARD };

typedef struct {
    int32_t op, dtype;         /* LM_FLOAT32 or LM_BFLOAT16 */
    int32_t x_dtype;           /* of a norm */
    int32_t num_rows, columns; /* a multiple of 16 */
    int32_t head_dim;          /* a multiple of 32 */
    int32_t table_rows;
    float eps;
    const void *in[5];
    void *out[3];
} lm_pointwise;

/* The same bits for every number of threads. */
LM_EXPORT int lm_compute_pointwise(const lm_pointwise *call);

/* Find the norm of all gradients together, array i of `counts[i]` numbers, infinite where float32 does not hold its square, and scale them
 * down to `max_norm` where it is finite and larger. The same bits for every number of threads. */
LM_EXPORT int lm_clip(float *const *grads, const int64_t *counts, int32_t num_grads, double max_norm, double *norm);

/* Put a matrix of GGUF's blocks, (rows, cols / 32 or 256 of them), into tiles of the same type. Nothing is lost. */
LM_EXPORT void lm_pack(int32_t kind, int32_t rows, int32_t cols, const uint8_t *blocks, uint8_t *tiles);

/* A matrix of GGUF's blocks in a file, and where its tiles go. */
typedef struct {
    int32_t kind, rows, cols;
    int32_t head_rows; /* 0, or of each head of so many rows i and i + head_rows / 2 are the file's rows 2i and 2i + 1; it divides `rows` */
    int32_t file;      /* open for reading, its place in it not used */
    int64_t offset;
    uint8_t *tiles;
    int64_t *num_nonfinite; /* what is counted here: weights whose scale or minimum is NaN or infinite; 0 before */
} lm_file_matrix;

typedef struct {
    int64_t next;      /* the piece that is packed next; whoever sets it to 2^62 ends the calls */
    int64_t num_bytes; /* read so far */
} lm_packing;

/* Put matrices into tiles, in this thread and in all that call this with the same `state`, which was 0; it returns when no piece is left to
 * begin, so when all calls have returned, all is there. LM_UNREADABLE: a file ended early, or cannot be read; then, and without memory, the
 * calls of other threads go on. */
LM_EXPORT int lm_pack_files(const lm_file_matrix *all, int32_t count, lm_packing *state);

/* Find GGUF's blocks for weights: x has `num_blocks` times 32 or 256 of them, row after row. LM_NO_TILES for kinds that are not
 * written: BF16, F16 and F32. The bytes depend neither on the processor nor on the number of threads. */
LM_EXPORT int lm_encode(int32_t kind, int64_t num_blocks, const float *x, uint8_t *blocks);

/* A SentencePiece vocabulary. Types are the numbers of its file's format; pieces of other types than these are in no text. */
enum { LM_PIECE_NORMAL = 1, LM_PIECE_USER_DEFINED = 4, LM_PIECE_UNUSED = 5 };
enum { LM_BPE = 0, LM_UNIGRAM = 1 };

typedef struct {
    int32_t kind, num_pieces;
    const uint8_t *text;  /* of all pieces, one behind the other, in UTF-8; none is empty, and none is there twice */
    const int64_t *ends;  /* where each piece ends */
    const uint8_t *types;
    const int32_t *ranks;    /* BPE: the order of their scores, 0 the highest; equal scores have one rank */
    const float *scores;     /* Unigram */
    const int32_t *byte_ids; /* 256, which unknown characters become; NULL: they become `unknown_id` */
    int32_t unknown_id;      /* -1: none */
    float unknown_score;     /* Unigram */
    uint64_t seed;           /* any number that a file cannot know */
} lm_vocabulary;

typedef struct lm_segmenter lm_segmenter;

/* Prepare a vocabulary, of which nothing is needed afterwards; NULL without memory. */
LM_EXPORT lm_segmenter *lm_make_segmenter(const lm_vocabulary *vocabulary);
LM_EXPORT void lm_free_segmenter(lm_segmenter *segmenter);

/* Find the ids of a normalized text in UTF-8. `ids` has room for `length` of them. Several threads may do so at once.
 * Returns how many there are, or -1 without memory. */
LM_EXPORT int64_t lm_segment(const lm_segmenter *segmenter, const uint8_t *text, int64_t length, int32_t *ids);

/* Find the merges of a byte-level BPE vocabulary, given as different tokens by rank: `text` has one behind the other, and
 * `ends` where each ends. `merges` gets pairs of tokens, those that lead to a lower rank first, and has room for as many
 * as `text` has bytes. `seed` is any number that a file cannot know. Returns how many there are, or -1 without memory. */
LM_EXPORT int64_t lm_find_merges(const uint8_t *text, const int64_t *ends, int32_t num_tokens, uint64_t seed, int32_t *merges);

/* Where what lies in a tile of a type, in bytes from its beginning. */
typedef struct {
    int32_t columns, bytes;
    int32_t code_bytes;           /* of a group of 16 rows by 32 columns */
    int32_t codes_at, scales_at;
    int32_t minima_at;            /* -1: the type has none */
} lm_tile;

/* What a tile of `kind` is; LM_NO_TILES for kinds that are not packed. */
LM_EXPORT int lm_tile_of(int32_t kind, lm_tile *tile);

/* Nanoseconds in which all threads read this memory once, as fast as they can: its whole blocks of 32 KiB. */
LM_EXPORT int64_t lm_read_ns(const void *data, int64_t num_bytes);

/* Nanoseconds that passes, products, choices, packing and reading have taken in this process so far. */
LM_EXPORT int64_t lm_busy_ns(void);

/* Which interface this is; it changes with every struct and function here. */
#define LM_INTERFACE 27
LM_EXPORT int32_t lm_interface(void);

/* The kernels in use: "amx", "avx512_bf16", "avx512_vnni", "avx2", "neon_i8mm", "neon_dotprod" or "portable". */
LM_EXPORT const char *lm_kernels(void);

/* Use these kernels from now on; 0 if this machine has them. NULL is the best there are. */
LM_EXPORT int lm_use_kernels(const char *name);

/* Use this many threads, at least 1. */
LM_EXPORT void lm_set_threads(int32_t num_threads);
LM_EXPORT int32_t lm_threads(void);

#endif
