/* The layers, stage by stage.
 *
 * All threads run the same function. A stage's work is cut into pieces that are taken one after the other, so that a
 * thread that lost its core for a while delays no other; which thread computes a piece does not change its result. Between
 * two stages stands a barrier.
 */
#include "products.h"

static void leave_job(void) {
    if (TILES.leave_job != NULL) TILES.leave_job();
}

static void compute_angles(const pass *p, lm_team team) {
    const int half = p->model->head_dim / 2;
    const double factor = p->model->attention_factor;
    for (int row = team.index; row < p->num_rows; row += team.count)
        for (int i = 0; i < half; i++) {
            const float angle = (float)p->positions[row] * p->model->frequencies[i];
            p->angles[(size_t)row * 2 * half + i] = (float)(factor * cos(angle)); /* in float64 and rounded once, as in model/rope.py */
            p->angles[(size_t)row * 2 * half + half + i] = (float)(factor * sin(angle));
        }
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

/* Rotate and scale a query head, and put it into the form that the cache's keys are multiplied with; `to` may be the same memory. */
static __attribute__((noinline)) void rotate_query(const pass *p, int row, const float *from, paired *to) {
    const int head_dim = p->model->head_dim;
    const float scale = 1 / sqrtf((float)head_dim);
    float *values = (float *)to;
    if (values != from) memcpy(values, from, head_dim * sizeof(float));
    rotate(values, p->angles + (size_t)row * head_dim, head_dim / 2);
    for (int i = 0; i < head_dim; i++) values[i] *= scale;
    if (is_codes(p->cache.k_dtype))
        into_codes(values, head_dim);
    else
        into_pairs(p->cache.k_dtype, values, head_dim);
}

/* Rotate a row's key and put it into the cache beside its value. */
static __attribute__((noinline)) void store_slot(const pass *p, int layer, int row, int kv) {
    const lm_model *model = p->model;
    const int head_dim = model->head_dim, heads = model->num_heads, kv_heads = model->num_kv_heads;
    float *k = p->qkv + ((size_t)row * (heads + 2 * kv_heads) + heads + kv) * head_dim, *v = k + (size_t)kv_heads * head_dim;
    const kv_cache *c = &p->cache;
    const size_t slot = slot_of(c, table_of(p, row), kv, p->positions[row]);
    rotate(k, p->angles + (size_t)row * head_dim, head_dim / 2);
    const int has_scales = is_codes(c->k_dtype);
    store(c->k_dtype, 0, c->k[layer], has_scales ? c->k_scales[layer] : NULL, slot, k, head_dim);
    store(c->v_dtype, 1, c->v[layer], has_scales ? c->v_scales[layer] : NULL, slot, v, head_dim);
}

/* Merge the results of a head's chunks into inputs of the next product; where a head is no whole number of groups, into numbers. */
static void merge_head(const pass *p, int layer, int row, int head) {
    const int head_dim = p->model->head_dim, groups = head_dim / LM_GROUP;
    const size_t place = (size_t)row * p->model->num_heads + head;
    partial *known = partial_of(p, row, head, 0);
    for (int nth = 1; nth < chunks_of(p, row); nth++) merge(known, partial_of(p, row, head, nth), head_dim);
    for (int i = 0; i < head_dim; i++) known->mixture[i].value /= known->sum;
    float *mixture = out_of_pairs(p->cache.v_dtype, known->mixture, head_dim);
    if (is_codes(p->cache.v_dtype)) spread(mixture, head_dim); /* a Hadamard matrix is its own inverse */
    edit_row(p, row, LM_EDIT_HEAD, layer, head, mixture, head_dim);
    float *tap = tap_of(p, layer, LM_TAP_HEAD_OUT);
    if (tap != NULL) memcpy(tap + place * head_dim, mixture, head_dim * sizeof(float));
    if (p->attended != NULL)
        memcpy(p->attended + place * head_dim, mixture, head_dim * sizeof(float));
    else
        for (int g = 0; g < groups; g++) put_group(mixture + g * LM_GROUP, p->mixed, row, head * groups + g);
}

static void rotate_and_store_stage(const pass *p, lm_team team, int layer) {
    const int heads = p->model->num_heads, kv_heads = p->model->num_kv_heads, head_dim = p->model->head_dim;
    const int pieces = heads + kv_heads;
    for (int64_t piece = team.index; piece < (int64_t)p->num_rows * pieces; piece += team.count) {
        const int row = (int)(piece / pieces), head = (int)(piece % pieces);
        float *values = p->qkv + ((size_t)row * (heads + 2 * kv_heads) + head) * head_dim;
        if (head < heads)
            rotate_query(p, row, values, (paired *)values);
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
    const int pieces = p->num_runs * kv_heads * p->most_chunks, window = window_of(model);
    paired *rotated = p->rotated + (size_t)team.index * HEADS_AT_ONCE * head_dim;
    for (int piece; (piece = lm_next(next)) < pieces;) {
        const int run = piece / (kv_heads * p->most_chunks), kv = piece / p->most_chunks % kv_heads;
        const int row = p->runs[run], count = p->runs[run + 1] - row;
        const int chunk = first_chunk_of(p, row) + piece % p->most_chunks;
        const int begin = chunk * CHUNK, visible = p->positions[row + count - 1] + 1;
        if (begin >= visible) continue;
        const int first_slot = max_int(first_visible(p->positions[row], window) - begin, 0), slots = min_int(visible - begin, CHUNK);
        const kv_chunk at = chunk_of(&p->cache, layer, table_of(p, row), kv, begin, first_slot, slots, head_dim);
        if (p->apart && begin + slots == visible) store_slot(p, layer, row, kv);
        for (int first = kv * group; first < (kv + 1) * group; first += HEADS_AT_ONCE) {
            const int own = min_int(HEADS_AT_ONCE, (kv + 1) * group - first);
            const float *q = p->qkv + ((size_t)row * all + first) * head_dim;
            partial *out[ROWS_OF_RUN][HEADS_AT_ONCE];
            for (int m = 0; m < count; m++)
                for (int h = 0; h < own; h++) out[m][h] = partial_of(p, row + m, first + h, chunk - first_chunk_of(p, row + m));
            for (int h = 0; h < own && p->apart; h++) rotate_query(p, row, q + (size_t)h * head_dim, rotated + (size_t)h * head_dim);
            attend_chunk(own, &at, &(row_run){
                .q = p->apart ? rotated : (const paired *)q, /* rotated where they lie, in the stage before */
                .stride = (size_t)all * head_dim,
                .count = count,
                .visible = visible - begin,
                .window = window,
                .out = out,
                .scratch = p->scratch + team.index * run_scratch(head_dim),
            });
            for (int m = 0; m < count && p->most_chunks == 1; m++)
                for (int h = 0; h < own; h++) merge_head(p, layer, row + m, first + h);
        }
    }
}

static void attention(const pass *p, lm_team team, atomic_int *next, int layer) {
    const int heads = p->model->num_heads, q_size = heads * p->model->head_dim;
    attend_stage(p, team, next, layer);
    lm_barrier(team);
    if (p->most_chunks > 1) {
        for (int piece = team.index; piece < p->num_rows * heads; piece += team.count)
            merge_head(p, layer, piece / heads, piece % heads);
        lm_barrier(team);
    }
    if (p->attended != NULL) {
        prepare_inputs(team, p->attended, NULL, p->num_rows, q_size, NULL, NULL, p->mixed);
        lm_barrier(team);
    }
}

/* --- products ----------------------------------------------------------------------------------------------------- */

/* The hidden states, normalised, as inputs. A few rows each thread prepares for itself, sooner than it could wait for others. */
static inputs normed(const pass *p, lm_team team, const void *norm, float *tap) {
    const inputs in = p->normed[p->num_rows <= FEW_ROWS ? team.index : 0];
    const lm_team share = p->num_rows <= FEW_ROWS ? (lm_team){0, 1} : team;
    const int hidden = p->model->hidden;
    prepare_inputs(share, p->hidden, NULL, p->num_rows, hidden, p->model, norm, in);
    for (int row = team.index; row < p->num_rows && tap != NULL; row += team.count)
        normalise(p->model, norm, p->hidden + (size_t)row * hidden, tap + (size_t)row * hidden);
    if (share.count > 1) lm_barrier(team);
    return in;
}

/* Hand out a row's queries, keys and values as the products made them, and its queries rotated. */
static void tap_queries(const pass *p, lm_team team, int layer) {
    const int head_dim = p->model->head_dim, q_size = p->model->num_heads * head_dim, kv_size = p->model->num_kv_heads * head_dim;
    float *q = wanted_tap(p, layer, LM_TAP_Q), *k = wanted_tap(p, layer, LM_TAP_K), *v = wanted_tap(p, layer, LM_TAP_V);
    float *rotated = wanted_tap(p, layer, LM_TAP_Q_ROT);
    if (q == NULL && k == NULL && v == NULL && rotated == NULL) return;
    for (size_t row = team.index; row < (size_t)p->num_rows; row += team.count) {
        const float *from = p->qkv + row * (q_size + 2 * kv_size);
        if (q != NULL) memcpy(q + row * q_size, from, q_size * sizeof(float));
        if (k != NULL) memcpy(k + row * kv_size, from + q_size, kv_size * sizeof(float));
        if (v != NULL) memcpy(v + row * kv_size, from + q_size + kv_size, kv_size * sizeof(float));
        if (rotated == NULL) continue;
        memcpy(rotated + row * q_size, from, q_size * sizeof(float));
        for (int place = 0; place < q_size; place += head_dim)
            rotate(rotated + row * q_size + place, p->angles + row * head_dim, head_dim / 2);
    }
    lm_barrier(team); /* keys are rotated where they lie */
}

static void project_queries(const pass *p, lm_team team, atomic_int *next, int index) {
    const lm_model *model = p->model;
    const lm_layer *layer = &model->layers[index];
    const int q_size = model->num_heads * model->head_dim, kv_size = model->num_kv_heads * model->head_dim;
    const int all = q_size + 2 * kv_size, begins[] = {0, q_size, q_size + kv_size};
    const lm_matrix *const qkv[] = {&layer->q, &layer->k, &layer->v};
    const inputs in = normed(p, team, layer->attention_norm, tap_of(p, index, LM_TAP_ATTN_NORM));
    adapted s = {.p = p, .layer = index, .count = 3, .which = {OF_Q, OF_K, OF_V}, .num_rows = p->num_rows};
    if (p->max_rank > 0) lower(team, &s, in.plain, model->hidden);
    products(team, next, qkv, 3, in, p->num_rows, (float *const[]){p->qkv, p->qkv + begins[1], p->qkv + begins[2]},
             (const int[]){all, all, all}, 0, p->max_rank > 0 ? &s : NULL);
    lm_barrier(team);
    tap_queries(p, team, index);
}

/* Add a product to the hidden states. Where `tap` is wanted, it is computed there, and then added. */
static void add_product(const pass *p, lm_team team, atomic_int *next, int index, int which, inputs in, float *tap) {
    const lm_layer *layer = &p->model->layers[index];
    const lm_matrix *const w[] = {which == OF_O ? &layer->o : &layer->down};
    const int hidden = p->model->hidden;
    adapted s = {.p = p, .layer = index, .count = 1, .which = {which}, .num_rows = p->num_rows};
    if (p->max_rank > 0) lower(team, &s, in.plain, w[0]->cols);
    products(team, next, w, 1, in, p->num_rows, (float *const[]){tap != NULL ? tap : p->hidden}, &hidden, tap == NULL,
             p->max_rank > 0 ? &s : NULL);
    lm_barrier(team);
    if (tap == NULL) return;
    for (size_t row = team.index; row < (size_t)p->num_rows; row += team.count) {
        edit_row(p, (int)row, which == OF_O ? LM_EDIT_ATTENTION : LM_EDIT_MLP, index, 0, tap + row * hidden, hidden);
        for (size_t i = row * hidden; i < (row + 1) * hidden; i++) p->hidden[i] = tap[i] + p->hidden[i];
    }
    lm_barrier(team);
}

/* Apply edits of the hidden states as they are now. */
static void edit_hidden(const pass *p, lm_team team, int part, int layer) {
    const int hidden = p->model->hidden;
    if (!is_edited(p, part, layer)) return;
    for (int row = team.index; row < p->num_rows; row += team.count)
        edit_row(p, row, part, layer, 0, p->hidden + (size_t)row * hidden, hidden);
    lm_barrier(team);
}

static void copy_hidden(const pass *p, lm_team team, float *to) {
    const size_t hidden = p->model->hidden;
    for (size_t row = team.index; row < (size_t)p->num_rows && to != NULL; row += team.count)
        memcpy(to + row * hidden, p->hidden + row * hidden, hidden * sizeof(float));
}

/* A group of silu(gate) * up, as `put_gated` computes it, of which `count` are there, and what is handed out of it. */
static void gate_group(const float *gate, const float *up, float *act, float *gated, int count, inputs in, size_t row, int g) {
    _Alignas(64) float group[LM_GROUP] = {0}, factors[LM_GROUP] = {0};
    memcpy(group, gate, count * sizeof(float));
    memcpy(factors, up, count * sizeof(float));
    for (int i = 0; i < LM_GROUP; i += LANES) {
        const lanes values = silu(load_floats(group + i));
        memcpy(group + i, &values, sizeof values);
    }
    if (act != NULL) memcpy(act, group, count * sizeof(float));
    for (int i = 0; i < LM_GROUP; i++) group[i] *= factors[i];
    if (gated != NULL) memcpy(gated, group, count * sizeof(float));
    put_group(group, in, row, g);
}

/* `gated_products` in two stages, since something between them is wanted. */
static void open_mlp(const pass *p, lm_team team, atomic_int *next, int index, inputs in, const adapted *s) {
    const lm_layer *layer = &p->model->layers[index];
    const int size = p->model->intermediate, groups = groups_of(size);
    const lm_matrix *const w[] = {&layer->gate, &layer->up};
    float *gate = tap_of(p, index, LM_TAP_GATE), *up = tap_of(p, index, LM_TAP_UP);
    float *act = tap_of(p, index, LM_TAP_ACT), *gated = tap_of(p, index, LM_TAP_GATED);
    products(team, next, w, 2, in, p->num_rows, (float *const[]){gate, up}, (const int[]){size, size}, 0, s);
    lm_barrier(team);
    for (int64_t piece = team.index; piece < (int64_t)p->num_rows * groups; piece += team.count) {
        const int row = (int)(piece / groups), g = (int)(piece % groups), begin = g * LM_GROUP;
        const size_t place = (size_t)row * size, at = place + begin;
        gate_group(gate + at, up + at, act == NULL ? NULL : act + at, gated == NULL ? NULL : gated + at,
                   min_int(LM_GROUP, size - begin), p->gated, row, g);
    }
}

/* Move what the wanted rows need to where `p->kept` has them. */
static void move_kept(const pass *p) {
    const size_t hidden = p->model->hidden, all = (size_t)(p->model->num_heads + 2 * p->model->num_kv_heads) * p->model->head_dim;
    for (size_t i = 0; i < (size_t)p->num_logits; i++) {
        memmove(p->hidden + i * hidden, p->hidden + p->logit_rows[i] * hidden, hidden * sizeof(float));
        memmove(p->qkv + i * all, p->qkv + p->logit_rows[i] * all, all * sizeof(float));
    }
}

static void run_layer(const pass *p, lm_team team, int index) {
    const lm_layer *layer = &p->model->layers[index];
    atomic_int *next = p->counters + (size_t)index * MAX_STAGES;
    project_queries(p, team, next++, index);
    if (!p->apart) {
        rotate_and_store_stage(p, team, index);
        lm_barrier(team);
    }
    if (p->kept != NULL && index == p->model->num_layers - 1) {
        if (p->num_logits == 0) return;
        if (team.index == 0) move_kept(p);
        lm_barrier(team);
        p = p->kept;
    }
    attention(p, team, next++, index);
    add_product(p, team, next++, index, OF_O, p->mixed, tap_of(p, index, LM_TAP_ATTN_OUT));
    copy_hidden(p, team, wanted_tap(p, index, LM_TAP_RESID_MID));
    const inputs in = normed(p, team, layer->mlp_norm, tap_of(p, index, LM_TAP_MLP_NORM));
    adapted s = {.p = p, .layer = index, .count = 2, .which = {OF_GATE, OF_UP}, .num_rows = p->num_rows};
    if (p->max_rank > 0) lower(team, &s, in.plain, p->model->hidden);
    if (opens_mlp(p, index))
        open_mlp(p, team, next++, index, in, p->max_rank > 0 ? &s : NULL);
    else
        gated_products(team, next++, layer, in, p->num_rows, p->gated, p->max_rank > 0 ? &s : NULL);
    lm_barrier(team);
    add_product(p, team, next++, index, OF_DOWN, p->gated, tap_of(p, index, LM_TAP_MLP_OUT));
    edit_hidden(p, team, LM_EDIT_RESIDUAL, index);
    copy_hidden(p, team, wanted_tap(p, index, LM_TAP_RESID));
}

/* Logits of the rows that want them. */
static void run_head(const pass *p, lm_team team) {
    if (p->num_logits == 0) return;
    const int is_few = p->num_logits <= FEW_ROWS, hidden = p->model->hidden;
    const inputs in = p->last[is_few ? team.index : 0];
    const lm_model *model = p->model;
    const lm_matrix *const head[] = {&model->head};
    adapted s = {.p = p, .count = 1, .which = {OF_HEAD}, .rows = p->logit_rows, .num_rows = p->num_logits};
    prepare_inputs(is_few ? (lm_team){0, 1} : team, p->hidden, p->logit_rows, p->num_logits, hidden, model, model->final_norm, in);
    if (!is_few) lm_barrier(team);
    if (p->max_rank > 0) lower(team, &s, in.plain, hidden);
    products(team, p->counters + (size_t)model->num_layers * MAX_STAGES, head, 1, in, p->num_logits, (float *const[]){p->logits},
             &model->head.rows, 0, p->max_rank > 0 ? &s : NULL);
}

/* The last norm of all rows, where it is wanted. */
static void tap_final_norm(const pass *p, lm_team team) {
    const size_t hidden = p->model->hidden;
    float *out = p->taps != NULL ? p->taps->final_norm : NULL;
    for (size_t row = team.index; row < (size_t)p->num_rows && out != NULL; row += team.count)
        normalise(p->model, p->model->final_norm, p->hidden + row * hidden, out + (p->first + row) * hidden);
}

static void run_pass(void *context, lm_team team) {
    const pass *p = context;
    compute_angles(p, team); /* needed after the first barrier */
    edit_hidden(p, team, LM_EDIT_EMBED, 0);
    if (p->taps != NULL && p->taps->embed != NULL) copy_hidden(p, team, p->taps->embed + (size_t)p->first * p->model->hidden);
    for (int layer = 0; layer < p->model->num_layers; layer++) run_layer(p, team, layer);
    if (p->kept != NULL) p = p->kept;
    tap_final_norm(p, team);
    run_head(p, team);
    leave_job();
}
