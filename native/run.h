/* Run a batch: validate it, and split it into passes that fit into memory. */
#include "layers.h"
#include "system.h"

/* Maximum number of rows of a pass, and bytes of attention's partial results for all KV chunks. They bound the memory of activations; results do
 * not depend on them. */
#define MAX_ROWS 256
#define MAX_PARTIAL_BYTES ((size_t)1 << 28)

static int log2_of(int value) {
    int bits = 0;
    while (1 << bits < value) bits++;
    return bits;
}

static int is_block_size(int size) { return size >= LEAST_BLOCK && size <= CHUNK && (size & (size - 1)) == 0; }

/* Return whether a sequence has valid blocks up to a position. */
static int has_blocks(const lm_batch *batch, const lm_cache *cache, int32_t sequence, int32_t position) {
    const int last = position / cache->block_size;
    if (last >= batch->table_stride) return 0;
    const int32_t *table = batch->block_tables + (size_t)sequence * batch->table_stride;
    for (int i = 0; i <= last; i++)
        if (table[i] < 0 || table[i] >= cache->num_blocks) return 0;
    return 1;
}

static int is_index(int32_t value, int32_t count) { return value >= 0 && value < count; }

static int has_parts(const lm_model *model, const lm_edits *edits) {
    for (const lm_edit *e = edits->all; e < edits->all + edits->count; e++)
        if (!is_index(e->part, LM_EDITED_PARTS) || !is_index(e->layer, model->num_layers) || !is_index(e->head, model->num_heads)) return 0;
    return 1;
}

static int check_batch(const lm_model *model, const lm_cache *cache, const lm_batch *batch) {
    if (!is_block_size(cache->block_size)) return LM_BAD_BATCH;
    for (int i = 0; i < batch->num_tokens; i++) {
        const int32_t sequence = batch->sequences[i], position = batch->positions[i];
        if (batch->token_ids[i] < 0 || batch->token_ids[i] >= model->table.rows) return LM_NO_SUCH_ROW;
        if (sequence < 0 || sequence >= batch->num_sequences || position < 0) return LM_BAD_BATCH;
        const int is_last = i + 1 == batch->num_tokens || batch->sequences[i + 1] != sequence;
        if (!is_last && batch->positions[i + 1] <= position) return LM_BAD_BATCH;
        if (is_last && !has_blocks(batch, cache, sequence, position)) return LM_BAD_BATCH;
    }
    for (int i = 0, before = -1; i < batch->num_logits; before = batch->logit_rows[i++])
        if (batch->logit_rows[i] <= before || batch->logit_rows[i] >= batch->num_tokens) return LM_BAD_BATCH;
    for (int i = 0; batch->adapters != NULL && i < batch->num_sequences; i++)
        if (batch->adapters[i] < -1 || batch->adapters[i] >= model->num_adapters) return LM_BAD_BATCH;
    for (int i = 0; batch->edits != NULL && i < batch->num_sequences; i++)
        if (!has_parts(model, &batch->edits[i])) return LM_BAD_BATCH;
    return LM_OK;
}

static kv_cache paged(const lm_cache *cache, const lm_model *model) {
    return (kv_cache){
        .k_dtype = cache->k_dtype,
        .v_dtype = cache->v_dtype,
        .block_bits = log2_of(cache->block_size),
        .block_slots = (size_t)model->num_kv_heads * cache->block_size,
        .head_slots = cache->block_size,
        .k = cache->k,
        .v = cache->v,
        .k_scales = cache->k_scales,
        .v_scales = cache->v_scales,
    };
}

/* out (num_rows, w.cols): some rows of a matrix. */
static void look_up(const lm_matrix *w, const int64_t *rows, int num_rows, float *out) {
    for (int n = 0; n < num_rows; n++, out += w->cols) {
        const size_t place = (size_t)rows[n] * w->cols;
        if (w->kind == LM_F16)
            for (int i = 0; i < w->cols; i++) out[i] = from_half(((const uint16_t *)w->data)[place + i]);
        else if (is_float(w))
            for (int i = 0; i < w->cols; i++) out[i] = number_at(dtype_of(w), w->data, place + i);
        else
            unpack_row(w, rows[n] / LM_TILE_ROWS, (int)(rows[n] % LM_TILE_ROWS), out);
    }
}

/* Run a pass; its rows and cache are set. */
static int run_rows(pass *p) {
    const lm_model *model = p->model;
    forms wanted = forms_of(model);
    const int num_threads = lm_enter();
    arena a = {NULL, 0};
    pass kept;
    p->positions = p->batch->positions + p->first;
    p->sequences = p->batch->sequences + p->first;
    p->apart = are_apart(p);
    p->max_rank = largest_rank(p);
    p->padded_rank = (p->max_rank + 3) / 4 * 4;
    wanted.plain = p->max_rank > 0; /* adapters multiply inputs that are not quantized */
    lay_out(p, &a, wanted, num_threads);
    const int keeps_some = p->num_logits < p->num_rows && !p->apart && p->taps == NULL;
    if (keeps_some) take_kept(p, &a, wanted, num_threads, &kept);
    const size_t bytes = a.used;
    a.memory = lm_allocate(bytes);
    const int failed = a.memory == NULL;
    if (!failed) {
        a.used = 0;
        lay_out(p, &a, wanted, num_threads);
        find_runs(p);
        count_chunks(p);
        for (int i = 0; i < p->num_logits; i++) p->logit_rows[i] = p->batch->logit_rows[p->first_logit + i] - p->first;
        if (keeps_some) take_kept(p, &a, wanted, num_threads, &kept);
        p->kept = keeps_some ? &kept : NULL;
        memset(p->counters, 0, ((size_t)model->num_layers + 1) * MAX_STAGES * sizeof(atomic_int));
        look_up(&model->table, p->batch->token_ids + p->first, p->num_rows, p->hidden);
        lm_parallel(run_pass, p);
        lm_free(a.memory);
    }
    lm_leave();
    return failed ? LM_NO_MEMORY : LM_OK;
}

/* Return how many of a batch's tokens, from `first` on, fit into one pass. */
static int rows_of_pass(const lm_model *model, const lm_batch *batch, int first) {
    const size_t bytes = (size_t)model->num_heads * (model->head_dim + 2) * sizeof(float);
    size_t chunks = 0;
    int row = first;
    for (; row < batch->num_tokens && row - first < MAX_ROWS; row++) {
        chunks += chunks_at(model, batch->positions[row]);
        if (row > first && chunks * bytes > MAX_PARTIAL_BYTES) break;
    }
    return row - first;
}

static int run(const lm_model *model, const lm_cache *cache, const lm_batch *batch, const lm_taps *taps, float *logits) {
    int code = check_batch(model, cache, batch);
    for (int first = 0, logit = 0, end, last; first < batch->num_tokens && code == LM_OK; first = end, logit = last) {
        end = first + rows_of_pass(model, batch, first);
        for (last = logit; last < batch->num_logits && batch->logit_rows[last] < end;) last++;
        code = run_rows(&(pass){
            .model = model,
            .cache = paged(cache, model),
            .batch = batch,
            .first = first,
            .num_rows = end - first,
            .first_logit = logit,
            .num_logits = last - logit,
            .logits = logits + (size_t)logit * model->head.rows,
            .taps = taps,
        });
    }
    return code;
}
