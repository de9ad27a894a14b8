/* One pass through all layers: what it is given, its buffers, and how its rows are put together. */
#include <stdlib.h>

#include "parts.h"

#define FEW_ROWS 4 /* of tokens, which each thread normalises for itself */
#define MAX_STAGES 8
#define MOST_OF_A_STAGE 3 /* matrices of the same inputs */

enum { OF_Q, OF_K, OF_V, OF_O, OF_GATE, OF_UP, OF_DOWN, OF_HEAD }; /* what an adapter corrects */

/* Some of a batch's rows of tokens. Their results do not depend on which come together. */
typedef struct pass {
    const lm_model *model;
    kv_cache cache;
    const lm_batch *batch;
    int first, num_rows;             /* of the batch's tokens */
    const int32_t *positions, *sequences;
    int first_logit, num_logits;     /* of the batch's logits */
    float *logits;
    const lm_taps *taps;             /* or NULL */

    float *hidden, *qkv, *angles, *partials;
    int apart;           /* whether no row sees what another one stores */
    paired *rotated;     /* each thread's queries, (HEADS_AT_ONCE, head_dim) */
    int32_t *logit_rows; /* (num_logits), counted from the pass's first row */
    int *runs, num_runs; /* first rows of what attention takes together, and behind the last one num_rows */
    size_t *chunks;      /* (num_rows + 1): how many KV chunks the rows before see together */
    int most_chunks;     /* that the rows of a run see together */
    float *scratch;      /* each thread's, for a run of several rows, or of one over codes */
    float *attended;     /* NULL where heads are made of whole groups */
    inputs *normed;      /* of each thread for a few rows, else one for all */
    inputs *last;        /* the same of the rows whose logits are wanted */
    inputs mixed, gated;
    float *own_taps[LM_TAPS_OF_A_LAYER]; /* what other taps or edits need and no caller has asked for */
    int max_rank, padded_rank; /* of the rows' adapters; to whole quads */
    float *lowered;            /* an adapter's a x: (num_rows, MOST_OF_A_STAGE, padded_rank) */
    atomic_int *counters; /* one a stage that hands out pieces: (num_layers + 1, MAX_STAGES) */
    const struct pass *kept;    /* the rows that are left when the last layer has stored its keys and values; NULL: all */
} pass;

static inline const int32_t *table_of(const pass *p, int row) {
    return p->batch->block_tables + (size_t)p->sequences[row] * p->batch->table_stride;
}

static inline int window_of(const lm_model *model) { return model->window > 0 ? model->window : NO_WINDOW; }

/* The first KV chunk that a token at `position` sees. */
static inline int first_chunk_at(const lm_model *model, int position) { return first_visible(position, window_of(model)) / CHUNK; }

/* How many KV chunks a token at `position` sees. */
static inline int chunks_at(const lm_model *model, int position) { return position / CHUNK + 1 - first_chunk_at(model, position); }

static inline int first_chunk_of(const pass *p, int row) { return first_chunk_at(p->model, p->positions[row]); }

static inline int chunks_of(const pass *p, int row) { return chunks_at(p->model, p->positions[row]); }

/* --- edits -------------------------------------------------------------------------------------------------------- */

/* What a row's edits make of what a part computed for it, x (count). */
static void edit_row(const pass *p, int row, int part, int layer, int head, float *x, int count) {
    if (p->batch->edits == NULL) return;
    const lm_edits own = p->batch->edits[p->sequences[row]];
    for (const lm_edit *e = own.all; e < own.all + own.count; e++) {
        int is_meant = e->part == part && e->layer == layer && e->head == head, is_there = e->num_positions == 0;
        for (int i = 0; i < e->num_positions && is_meant && !is_there; i++) is_there = e->positions[i] == p->positions[row];
        if (!is_meant || !is_there) continue;
        for (int i = 0; i < count && e->factor != 1; i++) x[i] = e->factor == 0 ? 0 : e->factor * x[i];
        for (int i = 0; i < count && e->add != NULL; i++) x[i] += e->add[i];
    }
}

/* Whether an edit of any of the rows is of this part of this layer. */
static int is_edited(const pass *p, int part, int layer) {
    for (int row = 0; row < p->num_rows && p->batch->edits != NULL; row++) {
        if (row > 0 && p->sequences[row] == p->sequences[row - 1]) continue;
        const lm_edits own = p->batch->edits[p->sequences[row]];
        for (int i = 0; i < own.count; i++)
            if (own.all[i].part == part && own.all[i].layer == layer) return 1;
    }
    return 0;
}

/* --- taps --------------------------------------------------------------------------------------------------------- */

static int width_of(const lm_model *model, int tap) {
    switch (tap) {
    case LM_TAP_Q:
    case LM_TAP_Q_ROT:
    case LM_TAP_HEAD_OUT: return model->num_heads * model->head_dim;
    case LM_TAP_K:
    case LM_TAP_V: return model->num_kv_heads * model->head_dim;
    case LM_TAP_GATE:
    case LM_TAP_UP:
    case LM_TAP_ACT:
    case LM_TAP_GATED: return model->intermediate;
    default: return model->hidden;
    }
}

/* Where the pass's rows are copied to; NULL: nowhere. */
static float *wanted_tap(const pass *p, int layer, int tap) {
    float *all = p->taps == NULL || p->taps->layers == NULL ? NULL : p->taps->layers[layer * LM_TAPS_OF_A_LAYER + tap];
    return all == NULL ? NULL : all + (size_t)p->first * width_of(p->model, tap);
}

/* Where it is to be put, for the caller or for another tap. */
static float *tap_of(const pass *p, int layer, int tap) {
    float *wanted = wanted_tap(p, layer, tap);
    return wanted != NULL ? wanted : p->own_taps[tap];
}

/* Whether gate and up are handed out before they are multiplied. */
static int opens_mlp(const pass *p, int layer) {
    int found = 0;
    for (int tap = LM_TAP_GATE; tap <= LM_TAP_GATED; tap++) found |= wanted_tap(p, layer, tap) != NULL;
    return found;
}

/* Whether a tap needs memory of the pass's own. */
static int needs_own(const pass *p, int tap) {
    int needs = 0;
    for (int layer = 0; layer < p->model->num_layers; layer++) {
        if (tap == LM_TAP_GATE || tap == LM_TAP_UP) needs |= opens_mlp(p, layer);
        if (tap == LM_TAP_ATTN_OUT) needs |= is_edited(p, LM_EDIT_ATTENTION, layer);
        if (tap == LM_TAP_MLP_OUT) needs |= is_edited(p, LM_EDIT_MLP, layer);
    }
    return needs;
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* Memory for all of a pass's buffers, in one piece. */
typedef struct {
    char *memory;
    size_t used;
} arena;

static void *take(arena *a, size_t bytes) {
    void *place = a->memory == NULL ? NULL : a->memory + a->used;
    a->used += (bytes + 63) / 64 * 64;
    return place;
}

/* Which forms of its inputs a model's matrices want. */
typedef struct {
    int blocks, bf16, floats, plain;
    int bits; /* of the blocks */
} forms;

static void add_form(forms *wanted, const lm_matrix *w) {
    *(w->kind == LM_BF16 ? &wanted->bf16 : w->kind == LM_F32 || w->kind == LM_F16 ? &wanted->floats : &wanted->blocks) = 1;
}

static forms forms_of(const lm_model *model) {
    forms wanted = {.bits = model->input_bits};
    for (int i = 0; i < model->num_layers; i++) {
        const lm_layer *l = &model->layers[i];
        const lm_matrix *const all[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down};
        for (size_t j = 0; j < sizeof all / sizeof *all; j++) add_form(&wanted, all[j]);
    }
    return wanted;
}

static inputs take_inputs(arena *a, forms wanted, size_t rows, size_t cols) {
    inputs in = {.num_rows = (int)rows, .groups = groups_of((int)cols), .parts = parts_of(wanted.bits)};
    const size_t padded = rows * in.groups * LM_GROUP;
    if (wanted.blocks) in.blocks = take(a, rows * in.parts * in.groups * sizeof(lm_block));
    if (wanted.bf16) in.bf16.at = take(a, padded * sizeof(bf16_input));
    if (wanted.floats) in.floats = take(a, padded * sizeof(float));
    if (wanted.plain) in.plain = take(a, padded * sizeof(float));
    return in;
}

/* Inputs for each thread where there are a few rows, else for all. */
static inputs *take_copies(arena *a, forms wanted, int rows, size_t cols, int num_threads) {
    const int copies = rows <= FEW_ROWS ? num_threads : 1;
    inputs *all = take(a, copies * sizeof(inputs));
    for (int i = 0; i < copies; i++) {
        const inputs own = take_inputs(a, wanted, rows, cols);
        if (a->memory != NULL) all[i] = own;
    }
    return all;
}

static void lay_out(pass *p, arena *a, forms wanted, int num_threads) {
    const lm_model *model = p->model;
    const size_t rows = p->num_rows, head_dim = model->head_dim, q_size = model->num_heads * head_dim;
    size_t num_chunks = 0;
    forms of_head = {.bits = model->input_bits, .plain = wanted.plain};
    add_form(&of_head, &model->head);
    for (int row = 0; row < p->num_rows; row++) num_chunks += chunks_of(p, row);
    p->hidden = take(a, rows * model->hidden * sizeof(float));
    p->qkv = take(a, rows * (q_size + 2 * model->num_kv_heads * head_dim) * sizeof(float));
    p->angles = take(a, rows * head_dim * sizeof(float));
    p->partials = take(a, num_chunks * model->num_heads * (head_dim + 2) * sizeof(float));
    p->rotated = take(a, num_threads * HEADS_AT_ONCE * head_dim * sizeof(float));
    p->attended = head_dim % LM_GROUP ? take(a, rows * q_size * sizeof(float)) : NULL;
    p->mixed = take_inputs(a, wanted, rows, q_size);
    p->gated = take_inputs(a, wanted, rows, model->intermediate);
    p->counters = take(a, ((size_t)model->num_layers + 1) * MAX_STAGES * sizeof(atomic_int));
    p->normed = take_copies(a, wanted, p->num_rows, model->hidden, num_threads);
    p->last = take_copies(a, of_head, p->num_logits, model->hidden, num_threads);
    p->runs = take(a, (rows + 1) * sizeof(int));
    p->logit_rows = take(a, p->num_logits * sizeof(int32_t));
    p->chunks = take(a, (rows + 1) * sizeof(size_t));
    for (int tap = 0; tap < LM_TAPS_OF_A_LAYER; tap++)
        p->own_taps[tap] = needs_own(p, tap) ? take(a, rows * width_of(model, tap) * sizeof(float)) : NULL;
    p->lowered = take(a, rows * MOST_OF_A_STAGE * p->padded_rank * sizeof(float));
    p->scratch = take(a, num_threads * run_scratch(head_dim) * sizeof(float));
}

/* --- rows --------------------------------------------------------------------------------------------------------- */

/* Whether a row's past holds the slot that the row before it stores, as where tokens of one text are run again. Of codes, slots are read
 * that are not seen, in the same block. */
static int sees_row_before(const pass *p, int row) {
    const int block_bits = p->cache.block_bits, stored = p->positions[row - 1], position = p->positions[row];
    const int is_read = is_codes(p->cache.k_dtype) ? stored >> block_bits <= position >> block_bits : stored < position;
    return is_read && table_of(p, row)[stored >> block_bits] == table_of(p, row - 1)[stored >> block_bits];
}

/* Whether no row sees what another one stores: each is of a sequence of its own, as when several answers are continued. */
static int are_apart(const pass *p) {
    for (int i = 1; i < p->num_rows; i++)
        if (p->sequences[i] <= p->sequences[i - 1] || sees_row_before(p, i)) return 0;
    return 1;
}

/* Cut the rows into runs of one sequence. A few rows of one share too little to be put together (docs/decisions/0045). */
static void find_runs(pass *p) {
    p->num_runs = 0;
    for (int row = 0, end; row < p->num_rows; row = end) {
        for (end = row + 1; end < p->num_rows && p->sequences[end] == p->sequences[row] &&
                            p->positions[end] == p->positions[row] + end - row;)
            end++;
        for (int start = row, size; start < end; start += size) {
            p->runs[p->num_runs++] = start;
            size = end - start < LEAST_RUN ? 1 : ROWS_OF_RUN;
        }
    }
    p->runs[p->num_runs] = p->num_rows;
}

static void count_chunks(pass *p) {
    p->chunks[0] = p->most_chunks = 0;
    for (int row = 0; row < p->num_rows; row++) p->chunks[row + 1] = p->chunks[row] + chunks_of(p, row);
    for (int run = 0; run < p->num_runs; run++) {
        const int last = p->positions[p->runs[run + 1] - 1] / CHUNK;
        p->most_chunks = max_int(p->most_chunks, last + 1 - first_chunk_of(p, p->runs[run]));
    }
}

/* Of the rows of `all`, those whose logits are wanted: no others go through the last layer's attention and MLP. */
static void take_kept(const pass *all, arena *a, forms wanted, int num_threads, pass *p) {
    const size_t rows = all->num_logits;
    *p = *all;
    p->num_rows = p->mixed.num_rows = p->gated.num_rows = (int)rows;
    p->normed = take_copies(a, wanted, p->num_rows, p->model->hidden, num_threads);
    p->runs = take(a, (rows + 1) * sizeof(int));
    p->chunks = take(a, (rows + 1) * sizeof(size_t));
    int32_t *positions = take(a, rows * sizeof(int32_t)), *sequences = take(a, rows * sizeof(int32_t));
    p->logit_rows = take(a, rows * sizeof(int32_t));
    if (a->memory == NULL) return;
    for (size_t i = 0; i < rows; i++) {
        positions[i] = all->positions[all->logit_rows[i]];
        sequences[i] = all->sequences[all->logit_rows[i]];
        p->logit_rows[i] = (int32_t)i;
    }
    p->positions = positions;
    p->sequences = sequences;
    find_runs(p);
    count_chunks(p);
}

/* A query head's result for a row and the nth of the KV chunks that it sees. */
static inline partial *partial_of(const pass *p, int row, int head, int nth) {
    const size_t index = p->chunks[row] * p->model->num_heads + (size_t)head * (p->chunks[row + 1] - p->chunks[row]) + nth;
    return partial_at(p->partials, index, p->model->head_dim);
}
