/* A part of a set: attention over whole rows of tokens and its gradients, as training needs them.
 *
 * Queries go through in tiles of 32, keys in blocks of 128. A tile's scores lie with the queries side by side, (keys, 32), so that the
 * softmax of each is a column and never a sum across a register. What is kept of T x T numbers is one a query: the logarithm of its sum
 * of exponentials, from which the backward pass makes a tile's probabilities again. A head's sums have one order, whatever thread
 * computes it.
 *
 * Products of two factors that are bfloat16 as they come take words, pairs of neighbours in the place of a float:
 * scores, and grad_out v. All others are of floats.
 *
 * Source: Dao 2023, "FlashAttention-2".
 */
#include "parts.h"
#include "system.h"

#include <stdlib.h>

#define QUERIES 32 /* of a tile */
#define KEYS CHUNK /* of a block: its keys, values and their gradients stay in the L2 cache */
#define FEW 8      /* groups of query heads: a thread gets one head of them in the backward pass, so that no thread waits long */
#define HIDDEN (-1e30f)

#ifdef __AVX512BF16__
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

#if LANES == 16
#define ROWS 8 /* of a product that are summed at once, times as many registers: as many as give the multipliers enough to do */
#define REGISTERS 2
#elif defined __ARM_NEON
#define ROWS 4
#define REGISTERS 4
#else
#define ROWS 4
#define REGISTERS 2
#endif

INLINE lanes repeat(float x) {
#if HAS_PAIRS
    return (lanes)_mm512_set1_ps(x);
#endif
    return x - (lanes){0};
}

INLINE lanes add_product(const int of_words, lanes sum, lanes left, lanes right) {
#if HAS_PAIRS
    if (of_words) return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
#endif
    (void)of_words;
    return sum + left * right;
}

INLINE void multiply_some(const int of_words, const int registers, const float *a, ptrdiff_t a_row, ptrdiff_t a_step, const float *b,
                          ptrdiff_t b_step, float *c, ptrdiff_t c_row, int depth, int adds) {
    lanes sums[ROWS][REGISTERS];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < registers; i++) sums[r][i] = (lanes){0};
    for (int step = 0; step < depth; step++, a += a_step, b += b_step) {
        lanes right[REGISTERS];
        for (int i = 0; i < registers; i++) right[i] = load_floats(b + i * LANES);
        for (int r = 0; r < ROWS; r++) {
            const lanes left = repeat(a[r * a_row]);
            for (int i = 0; i < registers; i++) sums[r][i] = add_product(of_words, sums[r][i], left, right[i]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < registers; i++) {
            float *to = c + r * c_row + i * LANES;
            if (adds) sums[r][i] += load_floats(to); /* last: sums of parts round less than one long sum */
            memcpy(to, &sums[r][i], sizeof(lanes));
        }
}

#define NO_TRIANGLE -(1 << 20), 1 << 20

/* c (rows, columns) = or += a (rows, depth) b (depth, columns). Neighbours of `a` in a column are a_row apart, in a row a_step. `rows` is a
 * multiple of ROWS, `columns` of 16. Row r of `a` is zero before `begin` + r, and from `end` + r on, for r up to a multiple of ROWS. Of words
 * `depth`, `begin` and `end` count numbers, and steps words. */
INLINE void multiply_any(const int of_words, const float *a, ptrdiff_t a_row, ptrdiff_t a_step, const float *b, ptrdiff_t b_step, float *c,
                         ptrdiff_t c_row, int rows, int columns, int depth, int adds, int begin, int end) {
    int column = 0;
#define MULTIPLY(COUNT)                                                                                                                   \
    for (; column + (COUNT) * LANES <= columns; column += (COUNT) * LANES)                                                                \
        for (int r = 0; r < rows; r += ROWS) {                                                                                            \
            const int from = begin + r > 0 ? begin + r : 0, last = end + r + ROWS - 1, to = last < depth ? last : depth;                  \
            const int first = from >> of_words, count = ((to + of_words) >> of_words) - first;                                            \
            multiply_some(of_words, COUNT, a + r * a_row + first * a_step, a_row, a_step, b + first * b_step + column, b_step,            \
                          c + r * c_row + column, c_row, count, adds);                                                                    \
        }
    MULTIPLY(REGISTERS)
#if REGISTERS * LANES > 16
    MULTIPLY(1)
#endif
#undef MULTIPLY
}

static void multiply(int of_words, const float *a, ptrdiff_t a_row, ptrdiff_t a_step, const float *b, ptrdiff_t b_step, float *c,
                     ptrdiff_t c_row, int rows, int columns, int depth, int adds, int begin, int end) {
    if (HAS_PAIRS && of_words)
        multiply_any(1, a, a_row, a_step, b, b_step, c, c_row, rows, columns, depth, adds, begin, end);
    else
        multiply_any(0, a, a_row, a_step, b, b_step, c, c_row, rows, columns, depth, adds, begin, end);
}

typedef struct {
    const lm_row_attention *call;
    int backward, num_tasks, heads; /* of a task */
    float *parts;                   /* NULL: each task gives gradients of a key-value head that are whole */
    atomic_int *finished;           /* (rows, key-value heads): tasks whose parts are there */
    atomic_int next, failed;
} row_job;

/* What a thread works in. Tiles' transposes are (head_dim, QUERIES). Backward, `most` is log-sum-exp, and `total` grad_out times out. */
typedef struct {
    float *k, *v, *grad_k, *grad_v;                                   /* a block's: (KEYS, head_dim) */
    float *q, *q_transposed, *grad_out, *grad_out_transposed;         /* a tile's; of `attend_as_pass` queries of four heads */
    float *scores, *grad_scores;                                      /* (KEYS, QUERIES) */
    float *plain, *words_k, *words_v;                                 /* words, as they lie in memory; of a tile, of a block's keys and values */
    float *sums;                                                      /* (heads, tokens, head_dim): outputs, or gradients of queries */
    float *most, *total;                                              /* (heads, tokens): what of each query's softmax is known so far */
    float *partials, *scratch;                                        /* of `attend_as_pass` */
} workspace;

/* Whether vectors are words: pairs of bfloat16. */
INLINE int has_words(const lm_row_attention *call) { return HAS_PAIRS && call->dtype == LM_BFLOAT16 && call->head_dim % 32 == 0; }

/* --- between memory and tiles ------------------------------------------------------------------------------------ */

/* Where a token's vector of a head lies in (B, T, heads, head_dim). */
static size_t place_of(const lm_row_attention *call, int heads, int row, int token, int head) {
    return (((size_t)row * call->num_tokens + token) * heads + head) * call->head_dim;
}

INLINE void load_numbers(const int dtype, const void *from, size_t place, int step, int rows, int count, float *to) {
    const char *coming = (const char *)from + (place + (size_t)rows * step) * (dtype == LM_FLOAT32 ? 4 : 2); /* the next tile's */
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < count; i += LANES) {
            const lanes values = load_lanes(dtype, from, place + (size_t)r * step + i);
            memcpy(to + (size_t)r * count + i, &values, sizeof values);
            __builtin_prefetch(coming + ((size_t)r * step + i) * (dtype == LM_FLOAT32 ? 4 : 2));
        }
}

INLINE void store_numbers(const int dtype, void *to, size_t place, int step, int rows, int count, const float *from) {
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < count; i += LANES) {
            const lanes values = load_floats(from + (size_t)r * count + i);
            store_lanes(dtype, to, place + (size_t)r * step + i, values);
        }
}

/* Vectors of some tokens of one head from memory, as floats or words, and zeros up to `size` of them; both dtypes are constants. */
static void load_vectors(const lm_row_attention *call, int as_words, const void *from, int heads, int row, int token, int head, int size, float *to) {
    const int left = call->num_tokens - token, rows = left < size ? left : size, count = call->head_dim >> as_words;
    const size_t place = place_of(call, heads, row, token, head) >> as_words;
    if (call->dtype == LM_BFLOAT16 && !as_words)
        load_numbers(LM_BFLOAT16, from, place, heads * count, rows, count, to);
    else
        load_numbers(LM_FLOAT32, from, place, heads * count, rows, count, to);
    memset(to + (size_t)rows * count, 0, (size_t)(size - rows) * count * sizeof(float));
}

static void store_vectors(const lm_row_attention *call, void *to, int heads, int row, int token, int head, int size, const float *from) {
    const int left = call->num_tokens - token, rows = left < size ? left : size, count = call->head_dim;
    const size_t place = place_of(call, heads, row, token, head);
    if (call->dtype == LM_BFLOAT16)
        store_numbers(LM_BFLOAT16, to, place, heads * count, rows, count, from);
    else
        store_numbers(LM_FLOAT32, to, place, heads * count, rows, count, from);
}

/* to (count, QUERIES) = from (QUERIES, count). */
static void transpose(const float *from, int count, float *to) {
    for (int i = 0; i < count; i += LANES)
        for (int q = 0; q < QUERIES; q += LANES) {
            lanes block[LANES];
            for (int r = 0; r < LANES; r++) block[r] = load_floats(from + (q + r) * count + i);
            transpose_lanes(block);
            for (int r = 0; r < LANES; r++) memcpy(to + (i + r) * QUERIES + q, &block[r], sizeof(lanes));
        }
}

/* A tile's vectors, and transposed, there as words where there are. */
static void load_tile(const lm_row_attention *call, const void *from, int row, int tile, int head, float *vectors, float *transposed,
                      workspace at) {
    const int of_words = has_words(call);
    load_vectors(call, 0, from, call->num_heads, row, tile, head, QUERIES, vectors);
    if (of_words) load_vectors(call, 1, from, call->num_heads, row, tile, head, QUERIES, at.plain);
    transpose(of_words ? at.plain : vectors, call->head_dim >> of_words, transposed);
}

/* --- what is visible --------------------------------------------------------------------------------------------- */

/* The keys of a block that some query of a tile may see, and whether there are pairs among them that may not. */
typedef struct {
    int first, count;
    int has_hidden;
} seen;

typedef struct {
    int32_t low, high;
} span;

static span segments_of(const int32_t *segments, int first, int end) {
    span found = {segments[first], segments[first]};
    for (int i = first; i < end; i++) {
        found.low = segments[i] < found.low ? segments[i] : found.low;
        found.high = segments[i] > found.high ? segments[i] : found.high;
    }
    return found;
}

static int window_of(const lm_row_attention *call) { return call->window > 0 ? call->window : NO_WINDOW; }

/* The end of the queries that may see some key of a block. */
static int end_of_queries(const lm_row_attention *call, int block) {
    const int tokens = call->num_tokens;
    return call->window > 0 && call->window < tokens ? min_int(tokens, block + KEYS - 1 + call->window) : tokens;
}

static seen keys_seen(const lm_row_attention *call, const int32_t *segments, int tile, int block) {
    const int tokens = call->num_tokens, tile_end = tile + QUERIES < tokens ? tile + QUERIES : tokens, window = window_of(call);
    int first = block, end = block + KEYS < tokens ? block + KEYS : tokens;
    if (call->causal && tile_end < end) end = tile_end;
    first = max_int(first, first_visible(tile, window) / ROWS * ROWS);
    int hidden = (call->causal && end - 1 > tile) || first_visible(tile_end - 1, window) > first || end % ROWS != 0;
    if (segments != NULL && first < end) {
        const span own = segments_of(segments, tile, tile_end);
        while (first < end && (segments[first] < own.low || segments[first] > own.high)) first++;
        while (first < end && (segments[end - 1] < own.low || segments[end - 1] > own.high)) end--;
        first -= first % ROWS;
        const span theirs = first < end ? segments_of(segments, first, end) : own;
        hidden |= own.low != own.high || theirs.low != own.low || theirs.high != own.high || end % ROWS != 0;
    }
    return (seen){first, first < end ? end - first : 0, hidden};
}

/* Rows of scores up to a multiple of ROWS. */
static int padded(int count) { return (count + ROWS - 1) / ROWS * ROWS; }

static void hide(const lm_row_attention *call, const int32_t *segments, int tile, seen keys, float *scores) {
    const int tokens = call->num_tokens, left = tokens - tile, window = window_of(call);
    int32_t numbers[QUERIES] = {0};
    if (segments != NULL) memcpy(numbers, segments + tile, (left < QUERIES ? left : QUERIES) * sizeof(int32_t));
    for (int q = 0; q < QUERIES; q += LANES) {
        lane_ints own;
        const lane_ints query = lane_numbers() + (tile + q);
        memcpy(&own, numbers + q, sizeof own);
        const int sees_first = segments == NULL && first_visible(tile + QUERIES - 1, window) <= keys.first; /* every query */
        for (int key = sees_first && call->causal && tile > keys.first ? tile - keys.first : 0; key < padded(keys.count); key++) {
            const int token = keys.first + key, number = segments == NULL || token >= tokens ? 0 : segments[token];
            const int from = token >= tokens ? INT32_MAX : call->causal ? token : 0; /* the first query that may see it */
            const int to = window < tokens ? token + window - 1 : INT32_MAX;           /* and the last one */
            float *at = scores + key * QUERIES + q;
            const lanes score = select_lanes((query >= from) & (query <= to) & (own == number), load_floats(at), (lanes){0} + HIDDEN);
            memcpy(at, &score, sizeof score);
        }
    }
}

/* --- forward ----------------------------------------------------------------------------------------------------- */

/* e^x, and nothing where the score is hidden; NaN stays NaN. */
INLINE lanes probability(lanes score, lanes x) {
    const lanes hidden = (lanes){0} + HIDDEN;
    return select_lanes(score <= hidden, (lanes){0}, exp_of_lanes(x));
}

/* Turn scores into exponentials, and note of each query the largest score and the sum so far; `sums` of earlier keys shrink. */
static void soften(float *scores, int num_keys, int head_dim, float factor, float *most, float *total, float *sums) {
    float shrink[QUERIES];
    for (int q = 0; q < QUERIES; q += LANES) {
        float *at = scores + q;
        const lanes before = load_floats(most + q);
        lanes largest[2] = {before, before}; /* two, which do not wait for each other */
        for (int key = 0; key < num_keys; key += 2)
            for (int i = 0; i < 2; i++) largest[i] = larger_lanes(load_floats(at + (key + i) * QUERIES), largest[i]);
        largest[0] = larger_lanes(largest[0], largest[1]);
        const lanes less = exp_of_lanes((before - largest[0]) * factor);
        lanes sum = {0};
        for (int key = 0; key < num_keys; key++) {
            const lanes score = load_floats(at + key * QUERIES), p = probability(score, (score - largest[0]) * factor);
            memcpy(at + key * QUERIES, &p, sizeof p);
            sum += p;
        }
        sum += load_floats(total + q) * less;
        memcpy(most + q, &largest[0], sizeof *largest);
        memcpy(total + q, &sum, sizeof sum);
        memcpy(shrink + q, &less, sizeof less);
    }
    for (int q = 0; q < QUERIES; q++)
        for (int i = 0; shrink[q] != 1 && i < head_dim; i++) sums[q * head_dim + i] *= shrink[q];
}

static float factor_of(const lm_row_attention *call) { return 1 / sqrtf((float)call->head_dim); } /* of scores */

static void score(const row_job *job, const int32_t *segments, int tile, int block, seen keys, workspace at) {
    const int of_words = has_words(job->call), size = job->call->head_dim, count = size >> of_words;
    multiply(of_words, (of_words ? at.words_k : at.k) + (size_t)(keys.first - block) * count, count, 1, at.q_transposed, QUERIES,
             at.scores, QUERIES, padded(keys.count), QUERIES, size, 0, NO_TRIANGLE);
    if (keys.has_hidden) hide(job->call, segments, tile, keys, at.scores);
}

static void attend_forward(const row_job *job, int row, int head, workspace at) {
    const lm_row_attention *call = job->call;
    const int tokens = call->num_tokens, size = call->head_dim, kv_head = head / (call->num_heads / call->num_kv_heads), of_words = has_words(call);
    const float factor = factor_of(call);
    const int32_t *segments = call->segments == NULL ? NULL : call->segments + (size_t)row * tokens;
    memset(at.sums, 0, (size_t)(tokens + QUERIES) * size * sizeof(float));
    for (int i = 0; i < tokens + QUERIES; i++) at.most[i] = HIDDEN, at.total[i] = 0;
    for (int block = 0; block < tokens; block += KEYS) {
        load_vectors(call, of_words, call->k, call->num_kv_heads, row, block, kv_head, KEYS, of_words ? at.words_k : at.k);
        load_vectors(call, 0, call->v, call->num_kv_heads, row, block, kv_head, KEYS, at.v);
        for (int tile = call->causal ? block : 0; tile < end_of_queries(call, block); tile += QUERIES) {
            const seen keys = keys_seen(call, segments, tile, block);
            if (keys.count == 0) continue;
            load_tile(call, call->q, row, tile, head, at.q, at.q_transposed, at);
            score(job, segments, tile, block, keys, at);
            float *sums = at.sums + (size_t)tile * size;
            soften(at.scores, padded(keys.count), size, factor, at.most + tile, at.total + tile, sums);
            multiply(0, at.scores, 1, QUERIES, at.v + (size_t)(keys.first - block) * size, size, sums, size, QUERIES, size,
                     keys.count, 1, -KEYS, call->causal ? tile + 1 - keys.first : KEYS);
        }
    }
    float *logs = call->log_sums + ((size_t)row * call->num_heads + head) * tokens;
    for (int token = 0; token < tokens; token++) {
        for (int i = 0; i < size; i++) at.sums[(size_t)token * size + i] /= at.total[token];
        logs[token] = at.most[token] * factor + logf(at.total[token]);
    }
    store_vectors(call, call->out, call->num_heads, row, 0, head, tokens, at.sums);
}

/* What the forward pass gives, of `count` query heads of one key-value head, with the bits of a pass whose cache holds these keys and values. */
static void attend_as_pass(const row_job *job, int row, int head, int count, workspace at) {
    const lm_row_attention *call = job->call;
    const int tokens = call->num_tokens, size = call->head_dim, heads = call->num_heads, stride = tokens + QUERIES;
    const int window = window_of(call);
    for (int block = 0; block < tokens; block += CHUNK) {
        load_vectors(call, 0, call->k, call->num_kv_heads, row, block, head / count, CHUNK, at.k);
        load_vectors(call, 0, call->v, call->num_kv_heads, row, block, head / count, CHUNK, at.v);
        for (int tile = block; tile < end_of_queries(call, block); tile += ROWS_OF_RUN)
            for (int first = 0; first < count; first += HEADS_AT_ONCE) {
                const int own = min_int(HEADS_AT_ONCE, count - first), rows = min_int(ROWS_OF_RUN, tokens - tile), visible = tile + rows - block;
                const kv_chunk chunk = {.k_dtype = LM_FLOAT32, .v_dtype = LM_FLOAT32, .k = at.k, .v = at.v, .head_dim = size,
                                        .first = max_int(first_visible(tile, window) - block, 0), .slots = min_int(visible, CHUNK), .block_bits = 8};
                partial *out[ROWS_OF_RUN][HEADS_AT_ONCE];
                for (int i = 0; i < rows * own; i++) { /* `tokens` and on: of this chunk alone */
                    const int is_first = first_visible(tile + i / own, window) >= block; /* the first chunk that the row sees */
                    out[i / own][i % own] = partial_at(at.partials, (first + i % own) * stride + (is_first ? tile : tokens) + i / own, size);
                }
                load_numbers(LM_FLOAT32, call->q, place_of(call, heads, row, tile, head + first), heads * size, rows, own * size, at.q);
                for (int i = 0; i < rows * own * size; i++) at.q[i] *= factor_of(call);
                attend_chunk(own, &chunk, &(row_run){(const paired *)at.q, (size_t)own * size, rows, visible, window, out, at.scratch});
                for (int i = 0; i < rows * own; i++) {
                    partial *known = partial_at(at.partials, (first + i % own) * stride + tile + i / own, size);
                    if (out[i / own][i % own] != known) merge(known, out[i / own][i % own], size);
                }
            }
    }
    for (int nth = 0; nth < count; nth++) {
        for (int token = 0; token < tokens; token++) {
            const partial *found = partial_at(at.partials, nth * stride + token, size);
            for (int i = 0; i < size; i++) at.sums[token * size + i] = found->mixture[i].value / found->sum;
            call->log_sums[((size_t)row * heads + head + nth) * tokens + token] = found->largest + logf(found->sum);
        }
        store_vectors(call, call->out, heads, row, 0, head + nth, tokens, at.sums);
    }
}

/* --- backward ---------------------------------------------------------------------------------------------------- */

/* Turn scores into probabilities, and the gradients of probabilities into those of scores, times `factor`. */
static void soften_backward(float *scores, float *grad_scores, int num_keys, float factor, const float *log_sums, const float *shares) {
    for (int q = 0; q < QUERIES; q += LANES) {
        const lanes log_sum = load_floats(log_sums + q), share = load_floats(shares + q);
        for (int i = q; i < num_keys * QUERIES; i += QUERIES) {
            const lanes score = load_floats(scores + i), p = probability(score, score * factor - log_sum);
            const lanes grad = p * factor * (load_floats(grad_scores + i) - share);
            memcpy(scores + i, &p, sizeof p);
            memcpy(grad_scores + i, &grad, sizeof grad);
        }
    }
}

static void attend_tile_backward(const row_job *job, const int32_t *segments, int row, int tile, int block, int head, int nth, workspace at) {
    const lm_row_attention *call = job->call;
    const int size = call->head_dim, of_words = has_words(call), width = size >> of_words;
    const seen keys = keys_seen(call, segments, tile, block);
    if (keys.count == 0) return;
    const size_t query = (size_t)nth * (call->num_tokens + QUERIES) + tile, key = keys.first - block;
    const int count = padded(keys.count), first = call->causal ? keys.first - tile : -KEYS, end = call->causal ? 1 - first : KEYS;
    const float factor = factor_of(call), *most = at.most + query, *total = at.total + query;
    load_tile(call, call->q, row, tile, head, at.q, at.q_transposed, at);
    load_tile(call, call->grad_out, row, tile, head, at.grad_out, at.grad_out_transposed, at);
    score(job, segments, tile, block, keys, at);
    multiply(of_words, (of_words ? at.words_v : at.v) + key * width, width, 1, at.grad_out_transposed, QUERIES,
             at.grad_scores, QUERIES, count, QUERIES, size, 0, NO_TRIANGLE);
    soften_backward(at.scores, at.grad_scores, count, factor, most, total);
    multiply(0, at.scores, QUERIES, 1, at.grad_out, size, at.grad_v + key * size, size, count, size, QUERIES, 1, first, QUERIES);
    multiply(0, at.grad_scores, QUERIES, 1, at.q, size, at.grad_k + key * size, size, count, size, QUERIES, 1, first, QUERIES);
    multiply(0, at.grad_scores, 1, QUERIES, at.k + key * size, size,
             at.sums + query * size, size, QUERIES, size, keys.count, 1, -KEYS, end);
}

/* Of each query: the logarithm of its sum, which is large where there is no query, and its share: its output times that one's gradient,
 * summed in the order of `multiply`, so that where one key is all that is seen its score has no gradient at all. */
static void load_softmax(const row_job *job, int row, int head, float *log_sums, float *shares, workspace at) {
    const lm_row_attention *call = job->call;
    const int tokens = call->num_tokens, size = call->head_dim, of_words = has_words(call);
    const float *logs = call->log_sums + ((size_t)row * call->num_heads + head) * tokens;
    for (int token = 0; token < tokens + QUERIES; token++) log_sums[token] = token < tokens ? logs[token] : -HIDDEN;
    for (int tile = 0; tile < tokens; tile += QUERIES) {
        load_tile(call, call->out, row, tile, head, at.q, at.q_transposed, at);
        load_tile(call, call->grad_out, row, tile, head, at.grad_out, at.grad_out_transposed, at);
        for (int q = 0; q < QUERIES; q += LANES) {
            lanes sum = {0};
            for (int i = q; i < (size >> of_words) * QUERIES; i += QUERIES)
                sum = add_product(of_words, sum, load_floats(at.q_transposed + i), load_floats(at.grad_out_transposed + i));
            memcpy(shares + tile + q, &sum, sizeof sum);
        }
    }
}

/* The part of a head's gradient of keys, or of values, that one query head gives: (tokens, head_dim) and as much as fills a block. */
static float *part_of(const row_job *job, int row, int head, int of_values) {
    const lm_row_attention *call = job->call;
    const size_t blocks = (call->num_tokens + KEYS - 1) / KEYS, heads = (size_t)row * call->num_heads + head;
    return job->parts + (2 * heads + of_values) * blocks * KEYS * call->head_dim;
}

/* Sum the parts of a key-value head's gradients that its query heads gave, in their order. */
static void join_parts(const row_job *job, int row, int kv_head) {
    const lm_row_attention *call = job->call;
    const int group = call->num_heads / call->num_kv_heads;
    const size_t count = (size_t)call->num_tokens * call->head_dim;
    for (int of_values = 0; of_values < 2; of_values++) {
        float *total = part_of(job, row, kv_head * group, of_values);
        for (int nth = 1; nth < group; nth++) {
            const float *part = part_of(job, row, kv_head * group + nth, of_values);
            for (size_t i = 0; i < count; i++) total[i] += part[i];
        }
        store_vectors(call, of_values ? call->grad_v : call->grad_k, call->num_kv_heads, row, 0, kv_head, call->num_tokens, total);
    }
}

/* Of `count` query heads from `head` on, which have a key-value head in common. */
static void attend_backward(row_job *job, int row, int head, int count, workspace at) {
    const lm_row_attention *call = job->call;
    const int tokens = call->num_tokens, size = call->head_dim, group = call->num_heads / call->num_kv_heads, stride = tokens + QUERIES;
    const int kv_head = head / group;
    const int32_t *segments = call->segments == NULL ? NULL : call->segments + (size_t)row * tokens;
    memset(at.sums, 0, (size_t)count * stride * size * sizeof(float));
    for (int nth = 0; nth < count; nth++)
        load_softmax(job, row, head + nth, at.most + (size_t)nth * stride, at.total + (size_t)nth * stride, at);
    for (int block = 0; block < tokens; block += KEYS) {
        load_vectors(call, 0, call->k, call->num_kv_heads, row, block, kv_head, KEYS, at.k);
        if (has_words(call)) load_vectors(call, 1, call->k, call->num_kv_heads, row, block, kv_head, KEYS, at.words_k);
        load_vectors(call, has_words(call), call->v, call->num_kv_heads, row, block, kv_head, KEYS, has_words(call) ? at.words_v : at.v);
        if (job->parts != NULL) {
            at.grad_k = part_of(job, row, head, 0) + (size_t)block * size;
            at.grad_v = part_of(job, row, head, 1) + (size_t)block * size;
        }
        memset(at.grad_k, 0, (size_t)KEYS * size * sizeof(float));
        memset(at.grad_v, 0, (size_t)KEYS * size * sizeof(float));
        for (int nth = 0; nth < count; nth++)
            for (int tile = call->causal ? block : 0; tile < end_of_queries(call, block); tile += QUERIES)
                attend_tile_backward(job, segments, row, tile, block, head + nth, nth, at);
        if (job->parts != NULL) continue;
        store_vectors(call, call->grad_k, call->num_kv_heads, row, block, kv_head, KEYS, at.grad_k);
        store_vectors(call, call->grad_v, call->num_kv_heads, row, block, kv_head, KEYS, at.grad_v);
    }
    for (int nth = 0; nth < count; nth++)
        store_vectors(call, call->grad_q, call->num_heads, row, 0, head + nth, tokens, at.sums + (size_t)nth * stride * size);
    if (job->parts != NULL && atomic_fetch_add(&job->finished[row * call->num_kv_heads + kv_head], 1) + 1 == group) join_parts(job, row, kv_head);
}

/* --- the job ----------------------------------------------------------------------------------------------------- */

/* The parts of a thread's memory, one after the other; returns how many floats they are. */
static size_t lay_out(const lm_row_attention *call, int heads, float *memory, workspace *at) {
    const size_t size = call->head_dim, tokens = (size_t)heads * (call->num_tokens + QUERIES), words = has_words(call) ? size / 2 : 0;
    const size_t counts[] = {KEYS * size, KEYS * size, KEYS * size, KEYS * size, QUERIES * size, QUERIES * size, QUERIES * size, QUERIES * size,
                             KEYS * QUERIES, KEYS * QUERIES, words * QUERIES, words * KEYS, words * KEYS, tokens * size, tokens, tokens,
                             call->as_pass ? tokens * (size + 2) : 0, call->as_pass ? run_scratch(call->head_dim) : 0};
    float **parts[] = {&at->k, &at->v, &at->grad_k, &at->grad_v, &at->q, &at->q_transposed, &at->grad_out, &at->grad_out_transposed,
                       &at->scores, &at->grad_scores, &at->plain, &at->words_k, &at->words_v, &at->sums, &at->most, &at->total,
                       &at->partials, &at->scratch};
    size_t all = 0;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        *parts[i] = memory + all;
        all += (counts[i] + 15) / 16 * 16;
    }
    return all;
}

static void run_row_job(void *context) {
    row_job *job = context;
    const lm_row_attention *call = job->call;
    const int row_tasks = call->num_heads / job->heads;
    workspace at;
    void *memory = lm_allocate(lay_out(call, job->heads, NULL, &at) * sizeof(float));
    if (memory == NULL) {
        atomic_store(&job->failed, 1);
        return;
    }
    lay_out(call, job->heads, memory, &at);
    for (int task; (task = lm_next(&job->next)) < job->num_tasks;)
        if (job->backward)
            attend_backward(job, task / row_tasks, task % row_tasks * job->heads, job->heads, at);
        else if (call->as_pass)
            attend_as_pass(job, task / row_tasks, task % row_tasks * job->heads, job->heads, at);
        else
            attend_forward(job, task / row_tasks, task % row_tasks, at);
    lm_free(memory);
}

int attend_rows(const lm_row_attention *call, int32_t backward) {
    const int group = call->num_heads / call->num_kv_heads, num_groups = call->num_rows * call->num_kv_heads;
    row_job job = {.call = call, .backward = backward, .heads = 1};
    if (backward && group > 1 && num_groups < FEW) {
        const size_t part = (size_t)(call->num_tokens + KEYS - 1) / KEYS * KEYS * call->head_dim;
        job.parts = malloc(2 * (size_t)num_groups * group * part * sizeof(float));
        job.finished = calloc(num_groups, sizeof(atomic_int));
        job.failed = job.parts == NULL || job.finished == NULL;
    } else if (backward || call->as_pass) {
        job.heads = group;
    }
    job.num_tasks = call->num_rows * call->num_heads / job.heads;
    if (!job.failed) lm_parallel_beside_others(run_row_job, &job);
    free(job.parts);
    free(job.finished);
    return job.failed ? LM_NO_MEMORY : LM_OK;
}
