/* The layers, stage by stage.
 *
 * All threads run the same function. A stage's work is cut into pieces that are taken one after the other, so that a
 * thread that lost its core for a while holds nobody up; which thread computes a piece does not change its result. Between
 * two stages stands a barrier.
 */
#include "pass.h"

#ifndef LEAVE_JOB /* what a set has to give back on each thread when a job ends */
#define LEAVE_JOB() ((void)0)
#endif

static void compute_angles(const pass *p, lm_team team) {
    const int half = p->model->head_dim / 2;
    for (int row = team.index; row < p->num_rows; row += team.count)
        for (int i = 0; i < half; i++) {
            const float angle = (float)p->positions[row] * p->model->frequencies[i];
            p->angles[(size_t)row * 2 * half + i] = cosf(angle);
            p->angles[(size_t)row * 2 * half + half + i] = sinf(angle);
        }
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

/* Rotate and scale a query head, and put it into the order in which the cache's keys are loaded. */
static __attribute__((noinline)) void rotate_query(const pass *p, int row, const float *from, float *to) {
    const int head_dim = p->model->head_dim;
    const float scale = 1 / sqrtf((float)head_dim);
    if (to != from) memcpy(to, from, head_dim * sizeof(float));
    rotate(to, p->angles + (size_t)row * head_dim, head_dim / 2);
    for (int i = 0; i < head_dim; i++) to[i] *= scale;
    into_pairs(p->cache.dtype, to, head_dim);
}

/* Rotate a row's key and put it into the cache beside its value. */
static __attribute__((noinline)) void store_slot(const pass *p, int layer, int row, int kv) {
    const lm_model *model = p->model;
    const int head_dim = model->head_dim, heads = model->num_heads, kv_heads = model->num_kv_heads;
    float *k = p->qkv + ((size_t)row * (heads + 2 * kv_heads) + heads + kv) * head_dim, *v = k + (size_t)kv_heads * head_dim;
    const kv_cache *c = &p->cache;
    const size_t slot = slot_of(c, table_of(p, row), kv, p->positions[row]);
    rotate(k, p->angles + (size_t)row * head_dim, head_dim / 2);
    const int has_scales = c->dtype == LM_INT8;
    store(c->dtype, c->k[layer], has_scales ? c->k_scales[layer] : NULL, slot, k, head_dim);
    store(c->dtype, c->v[layer], has_scales ? c->v_scales[layer] : NULL, slot, v, head_dim);
}

/* Merge the results of a head's chunks into inputs of the next product; where a head is no whole number of groups, into numbers. */
static void merge_head(const pass *p, int row, int head) {
    const int head_dim = p->model->head_dim, groups = head_dim / LM_GROUP;
    const size_t place = (size_t)row * p->model->num_heads + head;
    partial *known = partial_of(p, row, head, 0);
    for (int chunk = 1; chunk < chunks_of(p, row); chunk++) merge(known, partial_of(p, row, head, chunk), head_dim);
    for (int i = 0; i < head_dim; i++) known->mixture[i] /= known->sum;
    out_of_pairs(p->cache.dtype, known->mixture, head_dim);
    if (p->attended != NULL)
        memcpy(p->attended + place * head_dim, known->mixture, head_dim * sizeof(float));
    else
        for (int g = 0; g < groups; g++) put_group(known->mixture + g * LM_GROUP, p->mixed, place * groups + g);
}

static void rotate_and_store_stage(const pass *p, lm_team team, int layer) {
    const int heads = p->model->num_heads, kv_heads = p->model->num_kv_heads, head_dim = p->model->head_dim;
    const int pieces = heads + kv_heads;
    for (int64_t piece = team.index; piece < (int64_t)p->num_rows * pieces; piece += team.count) {
        const int row = (int)(piece / pieces), head = (int)(piece % pieces);
        float *values = p->qkv + ((size_t)row * (heads + 2 * kv_heads) + head) * head_dim;
        if (head < heads)
            rotate_query(p, row, values, values);
        else
            store_slot(p, layer, row, head - heads);
    }
}

/* One piece is one row, or some that follow each other in one sequence, one kv head with its query heads, and one chunk of
 * slots. Where no row sees what another one is about to store, a piece rotates its own queries, and the row's last one stores its
 * key and value: one stage instead of two. */
static void attend_stage(const pass *p, lm_team team, atomic_int *next, int layer) {
    const lm_model *model = p->model;
    const int head_dim = model->head_dim, heads = model->num_heads, kv_heads = model->num_kv_heads;
    const int group = heads / kv_heads, all = heads + 2 * kv_heads;
    const int pieces = p->num_runs * kv_heads * p->most_chunks;
    float *rotated = p->rotated + (size_t)team.index * HEADS_AT_ONCE * head_dim;
    for (int piece; (piece = lm_next(next)) < pieces;) {
        const int run = piece / (kv_heads * p->most_chunks), kv = piece / p->most_chunks % kv_heads;
        const int row = p->runs[run], count = p->runs[run + 1] - row;
        const int chunk = piece % p->most_chunks, begin = chunk * CHUNK, visible = p->positions[row + count - 1] + 1;
        if (begin >= visible) continue;
        const int slots = min_int(visible, begin + CHUNK) - begin;
        const kv_chunk at = chunk_of(&p->cache, layer, table_of(p, row), kv, begin, slots, head_dim);
        if (p->apart && begin + slots == visible) store_slot(p, layer, row, kv);
        for (int first = kv * group; first < (kv + 1) * group; first += HEADS_AT_ONCE) {
            const int own = min_int(HEADS_AT_ONCE, (kv + 1) * group - first);
            const float *q = p->qkv + ((size_t)row * all + first) * head_dim;
            partial *out[ROWS_OF_RUN][HEADS_AT_ONCE];
            for (int m = 0; m < count; m++)
                for (int h = 0; h < own; h++) out[m][h] = partial_of(p, row + m, first + h, chunk);
            for (int h = 0; h < own && p->apart; h++) rotate_query(p, row, q + (size_t)h * head_dim, rotated + (size_t)h * head_dim);
            attend_chunk(p->cache.dtype, own, &at, &(row_run){
                .q = p->apart ? rotated : q,
                .stride = (size_t)all * head_dim,
                .count = count,
                .visible = visible - begin,
                .out = out,
                .scratch = p->scratch + team.index * run_scratch(head_dim),
            });
            for (int m = 0; m < count && p->most_chunks == 1; m++)
                for (int h = 0; h < own; h++) merge_head(p, row + m, first + h);
        }
    }
}

static void attention(const pass *p, lm_team team, atomic_int *next, int layer) {
    const int heads = p->model->num_heads, q_size = heads * p->model->head_dim;
    if (!p->apart) {
        rotate_and_store_stage(p, team, layer);
        lm_barrier(team);
    }
    attend_stage(p, team, next, layer);
    lm_barrier(team);
    if (p->most_chunks > 1) {
        for (int piece = team.index; piece < p->num_rows * heads; piece += team.count) merge_head(p, piece / heads, piece % heads);
        lm_barrier(team);
    }
    if (p->attended != NULL) {
        prepare_inputs(team, p->attended, NULL, p->num_rows, q_size, NULL, NULL, p->mixed);
        lm_barrier(team);
    }
}

/* --- products ----------------------------------------------------------------------------------------------------- */

/* The hidden states, normalised, as inputs. A few rows each thread prepares for itself, sooner than it could wait for others. */
static inputs normed(const pass *p, lm_team team, const void *norm) {
    const inputs in = p->normed[p->num_rows <= FEW_ROWS ? team.index : 0];
    const lm_team share = p->num_rows <= FEW_ROWS ? (lm_team){0, 1} : team;
    prepare_inputs(share, p->hidden, NULL, p->num_rows, p->model->hidden, p->model, norm, in);
    if (share.count > 1) lm_barrier(team);
    return in;
}

static void run_layer(const pass *p, lm_team team, int index) {
    const lm_model *model = p->model;
    const lm_layer *layer = &model->layers[index];
    const int hidden = model->hidden, rows = p->num_rows, head_dim = model->head_dim;
    const int q_size = model->num_heads * head_dim, kv_size = model->num_kv_heads * head_dim, all = q_size + 2 * kv_size;
    atomic_int *next = p->counters + (size_t)index * MAX_STAGES;

    const lm_matrix *const qkv[] = {&layer->q, &layer->k, &layer->v}, *const o[] = {&layer->o}, *const down[] = {&layer->down};
    products(team, next++, qkv, 3, normed(p, team, layer->attention_norm), rows,
             (float *const[]){p->qkv, p->qkv + q_size, p->qkv + q_size + kv_size}, (const int[]){all, all, all}, 0);
    lm_barrier(team);
    attention(p, team, next++, index);
    products(team, next++, o, 1, p->mixed, rows, (float *const[]){p->hidden}, &hidden, 1);
    lm_barrier(team);
    gated_products(team, next++, layer, normed(p, team, layer->mlp_norm), rows, p->gated);
    lm_barrier(team);
    products(team, next++, down, 1, p->gated, rows, (float *const[]){p->hidden}, &hidden, 1);
    lm_barrier(team);
}

/* Logits of the rows that want them. */
static void run_head(const pass *p, lm_team team) {
    if (p->num_logits == 0) return;
    const int is_few = p->num_logits <= FEW_ROWS;
    const inputs in = p->last[is_few ? team.index : 0];
    const lm_model *model = p->model;
    const lm_matrix *const head[] = {&model->head};
    prepare_inputs(is_few ? (lm_team){0, 1} : team, p->hidden, p->logit_rows, p->num_logits,
                   model->hidden, model, model->final_norm, in);
    if (!is_few) lm_barrier(team);
    products(team, p->counters + (size_t)model->num_layers * MAX_STAGES, head, 1, in, p->num_logits, (float *const[]){p->logits},
             &model->head.rows, 0);
}

static void run_pass(void *context, lm_team team) {
    const pass *p = context;
    compute_angles(p, team); /* needed after the first barrier */
    for (int layer = 0; layer < p->model->num_layers; layer++) run_layer(p, team, layer);
    if (p->batch->token_ids == NULL) { /* lm_forward */
        for (int row = team.index; row < p->num_rows; row += team.count) {
            float *x = p->hidden + (size_t)row * p->model->hidden;
            normalise(p->model, p->model->final_norm, x, x);
        }
    }
    run_head(p, team);
    LEAVE_JOB();
}
