/* The CPU kernels of Llamarium: one plain C interface, called through ctypes.
 *
 * Everything works on rows of tokens: one per sequence in decode, many in prefill. The arithmetic of a row depends neither on the number of
 * rows nor on the number of threads.
 *
 * Weights are rows of BF16, F16 or F32 as stored in a file, or they are packed into tiles, in the order in which a product reads them
 * (native/tiles.h).
 */
#ifndef LLAMARIUM_H
#define LLAMARIUM_H

#include <stdint.h>

#ifdef _WIN32
#define LM_EXPORT __declspec(dllexport)
#else
#define LM_EXPORT __attribute__((visibility("default")))
#endif

#define LM_TILE_ROWS 16
#define LM_GROUP 32
#define LM_SUPER 256 /* columns of a tile of the K types */

/* Storage formats of matrices, with GGUF's names. */
enum {
    LM_BF16 = 0, LM_Q8_0 = 1, LM_Q4_0 = 2, LM_Q4_1 = 3, LM_IQ4_NL = 4, LM_Q4_K = 5, LM_Q5_K = 6, LM_Q6_K = 7, LM_F32 = 8,
    LM_Q5_0 = 9, LM_F16 = 10, LM_IQ4_XS = 11
};
enum { LM_FLOAT32 = 0, LM_BFLOAT16 = 1, LM_INT8 = 2, LM_FLOAT16 = 3, LM_INT4 = 4 }; /* LM_FLOAT16 is used neither by caches nor by norms */
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

/* An adapter of a product y = w x: y += b (scale * a x), then y *= gain, before the bias is added. x is not quantized for it. */
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
    float attention_factor;   /* factor of cosines and sines, for YaRN; else 1 */
    const void *final_norm;   /* (hidden), of norm_dtype */
    const lm_layer *layers;
    lm_matrix table, head;    /* embeddings (vocabulary, hidden); logits are the head times hidden states */
    int32_t num_adapters;
    const lm_adapter *adapters;
    int32_t input_bits; /* 8 or 16: bits to which inputs of packed matrices, except outliers, are quantized (docs/decisions/0022) */
    int32_t window; /* sliding window: how many positions a token sees, including its own; 0: no limit */
} lm_model;

/* The paged KV cache: blocks of slots, (num_blocks, num_kv_heads, block_size, head_dim), one pointer per layer.
 *
 * Quantized (x = scale * code), vectors are first rotated by a Hadamard matrix, if head_dim is a power of two of at least 4, which spreads
 * outliers over all elements (docs/decisions/0058). LM_INT8: codes of -127 to 127, one float32 scale per vector. LM_INT4: codes of -8 to 7 in
 * groups of 32, the last of which may be shorter; a group has 16 bytes of codes and a scale, as bfloat16 bits. Keys and values are either
 * both quantized, or have the same dtype.
 *
 * Layout of quantized keys. The keys of 16 consecutive slots, a strip, are interleaved, so that one register holds elements of several slots.
 * 8 bits: codes 0 and 1 of each slot, then codes 2 and 3 of each, and so on. 4 bits: the first 32-bit word of each slot, then the second word
 * of each, and so on. Bits 4p to 4p + 3 of word w hold code 8w + 2p, plus 8; the bits 16 above them hold code 8w + 2p + 1.
 *
 * Layout of quantized values. The values of an even slot and the next one are interleaved, so that both are multiplied at once. 8 bits: code
 * i of the first slot, then code i of the second. 4 bits: a group has eight 32-bit words; the low half of word j holds codes j, 8 + j, 16 + j
 * and 24 + j of the first slot, plus 8, lowest bits first, and the high half those of the second slot.
 *
 * Layout of 4-bit scales. For the 16 slots of a strip: the scales of the first group, then those of the second, and so on. */
typedef struct {
    int32_t k_dtype, v_dtype, num_blocks;
    int32_t block_size; /* a power of two from 16 to 256 */
    void **k, **v;
    void **k_scales, **v_scales; /* (num_blocks, num_kv_heads, block_size, scales of a vector); only if quantized */
} lm_cache;

/* An edit of an activation x of a token: it becomes factor * x + add. */
enum { LM_EDIT_EMBED, LM_EDIT_ATTENTION, LM_EDIT_HEAD, LM_EDIT_MLP, LM_EDIT_RESIDUAL, LM_EDITED_PARTS };
typedef struct {
    int32_t part;
    int32_t layer, head;      /* 0 if the part has none; a head's activation is its output before o */
    float factor;             /* 0 gives zero even if x is not finite */
    const float *add;         /* (hidden), for a head (head_dim); NULL: nothing */
    int32_t num_positions;    /* 0: all */
    const int32_t *positions; /* (num_positions), positions of the edited tokens */
} lm_edit;

/* The edits of one sequence, applied in order. They do not affect the bits of other sequences. */
typedef struct {
    int32_t count;
    const lm_edit *all;
} lm_edits;

/* Tokens of one or more sequences. The tokens of a sequence are adjacent, with ascending positions. A token attends to its sequence's
 * positions up to its own (within the window, if the model has one), both in the cache and in the batch. Position p of a sequence is in block
 * block_tables[sequence][p / block_size]. */
typedef struct {
    int32_t num_tokens, num_sequences, table_stride, num_logits;
    const int64_t *token_ids;    /* (num_tokens) */
    const int32_t *positions;    /* (num_tokens) */
    const int32_t *sequences;    /* (num_tokens), rows of block_tables */
    const int32_t *block_tables; /* (num_sequences, table_stride) */
    const int32_t *logit_rows;   /* (num_logits), the tokens whose logits are computed, ascending */
    const int32_t *adapters;     /* (num_sequences), index of each sequence's adapter, -1 for none; or NULL */
    const lm_edits *edits;       /* (num_sequences); or NULL: none */
} lm_batch;

/* Activations that a pass returns, float32, one row per token of the batch. A NULL pointer returns nothing and costs nothing.
 * N query heads, K kv heads, H head_dim, F intermediate, D hidden. */
enum {
    LM_TAP_ATTN_NORM, /* D: the layer's input, normalised */
    LM_TAP_Q,         /* N * H: before the rotation */
    LM_TAP_K,         /* K * H: before the rotation */
    LM_TAP_V,         /* K * H */
    LM_TAP_Q_ROT,     /* N * H: after it, before the scaling by 1 / sqrt(H) */
    LM_TAP_HEAD_OUT,  /* N * H: the output of each head */
    LM_TAP_ATTN_OUT,  /* D: o times HEAD_OUT */
    LM_TAP_RESID_MID, /* D: the layer's input + ATTN_OUT */
    LM_TAP_MLP_NORM,  /* D: RESID_MID, normalised */
    LM_TAP_GATE,      /* F */
    LM_TAP_UP,        /* F */
    LM_TAP_ACT,       /* F: silu(GATE) */
    LM_TAP_GATED,     /* F: ACT * UP */
    LM_TAP_MLP_OUT,   /* D: down times GATED */
    LM_TAP_RESID,     /* D: the layer's output, RESID_MID + MLP_OUT */
    LM_TAPS_OF_A_LAYER
};
typedef struct {
    float *embed, *final_norm; /* (num_tokens, hidden) */
    float *const *layers;      /* (num_layers, LM_TAPS_OF_A_LAYER); NULL if no layer is tapped */
} lm_taps;

/* Run a batch from token ids to logits (num_logits, head.rows), and write its keys and values to the cache. Everything between the products
 * is float32. A token's bits depend only on its sequence, not on the rest of the batch nor on how the prompt is split. `taps` may be NULL.
 *
 * LM_NO_SUCH_ROW: a token id is outside the vocabulary. LM_BAD_BATCH: a position, block, sequence, adapter, edit or row of logits is invalid or
 * out of order. In both cases nothing is computed. */
LM_EXPORT int lm_run(const lm_model *model, const lm_cache *cache, const lm_batch *batch, const lm_taps *taps, float *logits);

/* --- parts -------------------------------------------------------------------------------------------------------- */

/* y (num_rows, w.rows) = x (num_rows, w.cols) w^T + w.bias; x is quantized to `input_bits` if w is packed. */
LM_EXPORT int lm_product(const lm_matrix *w, const float *x, int32_t num_rows, int32_t input_bits, float *y);

/* out (num_rows, w.cols): some rows of a matrix, as an embedding lookup. */
LM_EXPORT int lm_lookup(const lm_matrix *w, const int64_t *rows, int32_t num_rows, float *out);

/* Sampling parameters of one row. */
typedef struct {
    float temperature; /* 0: the largest logit, the first of equals */
    float min_p;
    int32_t top_k;     /* 0: all */
    double top_p;      /* 1: all */
    uint64_t seed, step; /* the random draw is a function of both and of the token id */
    const uint32_t *mask; /* (count + 31) / 32 words: a token is allowed if its bit is set, lowest bit first; NULL: all are */
} lm_choice;

enum { LM_NO_ID = -1 };

/* Sample a token for each row of logits (num_rows, count): ids (num_rows); LM_NO_ID if the allowed tokens' logits have no finite maximum. */
LM_EXPORT int lm_choose(const float *logits, int32_t num_rows, int32_t count, const lm_choice *how, int32_t *ids);

/* Attention within rows, for training, and its gradients: arrays (rows, tokens, heads, head_dim) of `dtype`, sums in float32. Query head n
 * reads kv head n / (num_heads / num_kv_heads). */
typedef struct {
    int32_t dtype; /* LM_FLOAT32 or LM_BFLOAT16 */
    int32_t num_rows, num_tokens, num_heads, num_kv_heads;
    int32_t head_dim;        /* a multiple of 16 */
    int32_t causal;          /* whether a token does not see later ones */
    int32_t window;          /* sliding window, including the token itself; 0: no limit; only if causal */
    int32_t as_pass;         /* forward with the bits of lm_run over a cache of LM_FLOAT32; requires float32, causal, no segments */
    const int32_t *segments; /* (rows, tokens): tokens of different segments do not see each other; NULL: one segment */
    const void *q, *k, *v;
    void *out;
    float *log_sums;      /* (rows, num_heads, tokens): the logarithm of each query's sum of exponentials */
    const void *grad_out; /* from here on: backward pass only */
    void *grad_q, *grad_k, *grad_v;
} lm_row_attention;

/* Compute `out` and `log_sums`, or with `backward` the three gradients. The bits do not depend on the number of threads. */
LM_EXPORT int lm_attend_rows(const lm_row_attention *call, int32_t backward);

/* Pointwise operations of a training step: arrays (num_rows, columns), row-major, sums in float32. `dtype` is the dtype of the matrix
 * products; a norm's x and its gradient have `x_dtype`, to which x / sqrt(...) is rounded, and its weight is float32. Inputs -> outputs;
 * those in brackets may be NULL.
 *
 *     LM_RMS_NORM           x, weight, [summand added to x first] -> weight x / sqrt(mean(x^2) + eps), 1 / sqrt(...) of each row, [the sum]
 *     LM_RMS_NORM_BACKWARD  x, weight, 1 / sqrt(...), grad, [summand of x's gradient] -> gradients of x and weight, [x's in `dtype`]
 *     LM_SWIGLU             gate, up -> silu(gate) up
 *     LM_SWIGLU_BACKWARD    gate, up, grad -> gradients of gate and up
 *     LM_ROTATE             x, cosines, sines (table_rows, head_dim), which include the sign of the pair's other element -> rotated x;
 *                           row r uses angles r % table_rows
 *     LM_ROTATE_BACKWARD    cosines, sines, grad -> gradient of x */
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

/* The bits do not depend on the number of threads. */
LM_EXPORT int lm_compute_pointwise(const lm_pointwise *call);

/* Compute the total norm of gradients, where array i has `counts[i]` elements, and scale them down to `max_norm` if it is finite and larger.
 * The norm is infinite if its square overflows float32. The bits do not depend on the number of threads. */
LM_EXPORT int lm_clip(float *const *grads, const int64_t *counts, int32_t num_grads, double max_norm, double *norm);

/* Pack a matrix of GGUF blocks, (rows, cols / 32 or 256), into tiles of the same type, without loss. */
LM_EXPORT void lm_pack(int32_t kind, int32_t rows, int32_t cols, const uint8_t *blocks, uint8_t *tiles);

/* A matrix of GGUF blocks in a file, and the destination of its tiles. */
typedef struct {
    int32_t kind, rows, cols;
    int32_t head_rows; /* rows of a head if the file interleaves RoPE pairs (i and i + head_rows / 2 are its rows 2i and 2i + 1); else 0 */
    int32_t file;      /* descriptor, on Windows a handle, open for reading; its position is not used, but Windows changes it */
    int64_t offset;
    uint8_t *tiles;
    int64_t *num_nonfinite; /* counter of weights whose scale or minimum is NaN or infinite; initially 0 */
} lm_file_matrix;

typedef struct {
    int64_t next;      /* number of the next piece; setting it to 2^62 cancels the calls */
    int64_t num_bytes; /* read so far */
} lm_packing;

/* Pack matrices into tiles. All threads that call this with the same `state`, initially 0, share the work; the matrices are complete when all
 * calls have returned. LM_UNREADABLE: a file is truncated or cannot be read. An error ends only the thread's own call. */
LM_EXPORT int lm_pack_files(const lm_file_matrix *all, int32_t count, lm_packing *state);

/* Quantize weights to GGUF blocks: x has `num_blocks` times 32 or 256 weights, row by row. LM_NO_TILES for BF16, F16 and F32. The bytes depend
 * neither on the processor nor on the number of threads. */
LM_EXPORT int lm_encode(int32_t kind, int64_t num_blocks, const float *x, uint8_t *blocks);

/* A SentencePiece vocabulary. Types are numbered as in its file format; pieces of other types than these never match text. */
enum { LM_PIECE_NORMAL = 1, LM_PIECE_USER_DEFINED = 4, LM_PIECE_UNUSED = 5 };
enum { LM_BPE = 0, LM_UNIGRAM = 1 };

typedef struct {
    int32_t kind, num_pieces;
    const uint8_t *text;  /* all pieces, concatenated, in UTF-8; none is empty, and all are distinct */
    const int64_t *ends;  /* end of each piece in `text` */
    const uint8_t *types;
    const int32_t *ranks;    /* BPE: rank of each piece by score, 0 the highest; equal scores have equal ranks */
    const float *scores;     /* Unigram */
    const int32_t *byte_ids; /* ids of the 256 bytes, for byte fallback of unknown characters; NULL: use `unknown_id` */
    int32_t unknown_id;      /* -1: none */
    float unknown_score;     /* Unigram */
    uint64_t seed;           /* random, so that no file can provoke hash collisions */
} lm_vocabulary;

typedef struct lm_segmenter lm_segmenter;

/* Build a segmenter; the vocabulary may be freed afterwards. NULL: not enough memory. */
LM_EXPORT lm_segmenter *lm_make_segmenter(const lm_vocabulary *vocabulary);
LM_EXPORT void lm_free_segmenter(lm_segmenter *segmenter);

/* Encode a normalized text in UTF-8. `ids` has room for `length` ids. Thread-safe. Returns the number of ids, or -1 if there is not enough
 * memory. */
LM_EXPORT int64_t lm_segment(const lm_segmenter *segmenter, const uint8_t *text, int64_t length, int32_t *ids);

/* Derive the merges of a byte-level BPE vocabulary, given as distinct tokens by rank: `text` has them concatenated, `ends` the end of each.
 * `merges` has room for as many pairs of tokens as `text` has bytes, and is ordered by the rank of the result. `seed` is random, so that no file
 * can provoke hash collisions. Returns the number of merges, or -1 if there is not enough memory. */
LM_EXPORT int64_t lm_find_merges(const uint8_t *text, const int64_t *ends, int32_t num_tokens, uint64_t seed, int32_t *merges);

/* The layout of a tile of some type; offsets in bytes from its start. */
typedef struct {
    int32_t columns, bytes;
    int32_t code_bytes;           /* of a group of 16 rows by 32 columns */
    int32_t codes_at, scales_at;
    int32_t minima_at;            /* -1: the type has none */
} lm_tile;

/* The layout of a tile of `kind`; LM_NO_TILES for kinds that are not packed. */
LM_EXPORT int lm_tile_of(int32_t kind, lm_tile *tile);

/* Nanoseconds that all threads take to read the whole 32 KiB blocks of this memory once, to measure the bandwidth. */
LM_EXPORT int64_t lm_read_ns(const void *data, int64_t num_bytes);

/* Total nanoseconds of all jobs in this process so far: passes, products, sampling, packing and reading. */
LM_EXPORT int64_t lm_busy_ns(void);

/* Version of this interface; increase it with every change of a struct or function. */
#define LM_INTERFACE 27
LM_EXPORT int32_t lm_interface(void);

/* The kernels in use: "amx", "avx512_bf16", "avx512_vnni", "avx2", "neon_i8mm", "neon_dotprod" or "portable". */
LM_EXPORT const char *lm_kernels(void);

/* Use these kernels from now on, the best available ones for NULL; returns 0, or 1 if this machine cannot run them. */
LM_EXPORT int lm_use_kernels(const char *name);

/* Use this many threads, at least 1. */
LM_EXPORT void lm_set_threads(int32_t num_threads);
LM_EXPORT int32_t lm_threads(void);

#endif
