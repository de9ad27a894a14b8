/* A forward pass, stage by stage; compiled once for each set of instructions.
 *
 * All threads run the same function. A stage's work is cut into pieces that are taken one after the other, so that a
 * thread that lost its core for a while holds nobody up; which thread computes a piece does not change its result. Between
 * two stages stands a barrier.
 */
#include <stdlib.h>

#include "attention.h"
#include "choose.h"
#include "products.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

#define FEW_ROWS 4 /* of tokens, which each thread normalises for itself */
#define MAX_STAGES 8

#ifndef LEAVE_JOB /* what a set has to give back on each thread when a job ends */
#define LEAVE_JOB() ((void)0)
#endif

/* --- the pass --------------------------------------------------------------------------------------------------- */

typedef struct {
    const lm_model *model;
    const lm_cache *cache;
    const lm_place *places;
    int num_rows, num_chunks;        /* chunks of the longest row */
    float *hidden, *qkv, *turns, *parts;
    int apart;       /* whether no two rows are of the same sequence */
    float *turned;   /* each thread's queries, (HEADS_AT_ONCE, head_dim) */
    int *runs, num_runs; /* first rows of what attention takes together, and behind the last one num_rows */
    float *scratch;  /* each thread's, for a run of several rows */
    float *attended; /* NULL where heads are made of whole groups */
    inputs *normed;  /* of each thread for a few rows, else one for all */
    inputs mixed, gated;
    atomic_int *counters; /* one a stage that hands out pieces: (num_layers, MAX_STAGES) */
} pass;

static void turn_angles(const pass *p, lm_team team) {
    const int half = p->model->head_dim / 2;
    for (int row = team.index; row < p->num_rows; row += team.count)
        for (int i = 0; i < half; i++) {
            const float angle = (float)p->places[row].position * p->model->frequencies[i];
            p->turns[(size_t)row * 2 * half + i] = cosf(angle);
            p->turns[(size_t)row * 2 * half + half + i] = sinf(angle);
        }
}

/* Where a row keeps a kv head's slots. */
static inline size_t slots_of(const pass *p, int row, int kv) {
    return (size_t)p->places[row].cache_row * p->cache->row_stride + (size_t)kv * p->cache->head_stride;
}

/* Rotate and scale a query head, and put it into the order in which the cache's keys are loaded. */
static __attribute__((noinline)) void turn_query(const pass *p, int row, const float *from, float *to) {
    const int head_dim = p->model->head_dim;
    const float scale = 1 / sqrtf((float)head_dim);
    if (to != from) memcpy(to, from, head_dim * sizeof(float));
    rotate(to, p->turns + (size_t)row * head_dim, head_dim / 2);
    for (int i = 0; i < head_dim; i++) to[i] *= scale;
    into_pairs(p->cache->dtype, to, head_dim);
}

/* Rotate a row's key and put it into the cache beside its value. */
static __attribute__((noinline)) void store_slot(const pass *p, int layer, int row, int kv) {
    const lm_model *model = p->model;
    const int head_dim = model->head_dim, heads = model->num_heads, kv_heads = model->num_kv_heads;
    float *k = p->qkv + ((size_t)row * (heads + 2 * kv_heads) + heads + kv) * head_dim, *v = k + (size_t)kv_heads * head_dim;
    const size_t place = slots_of(p, row, kv) + (size_t)p->places[row].position * head_dim;
    rotate(k, p->turns + (size_t)row * head_dim, head_dim / 2);
    const lm_cache *cache = p->cache;
    const int has_scales = cache->dtype == LM_INT8;
    store(cache->dtype, cache->k[layer], has_scales ? cache->k_scales[layer] : NULL, place, k, head_dim);
    store(cache->dtype, cache->v[layer], has_scales ? cache->v_scales[layer] : NULL, place, v, head_dim);
}

/* Put a head's chunks together, as inputs of the next product; where a head is no whole number of groups, as numbers. */
static void fold_head(const pass *p, int row, int head) {
    const int head_dim = p->model->head_dim, groups = head_dim / LM_GROUP, visible = p->places[row].position + 1;
    const size_t piece = (size_t)row * p->model->num_heads + head;
    part *known = part_at(p->parts, piece * p->num_chunks, head_dim);
    for (int chunk = 1; chunk * CHUNK < visible; chunk++)
        fold(known, part_at(p->parts, piece * p->num_chunks + chunk, head_dim), head_dim);
    for (int i = 0; i < head_dim; i++) known->mixture[i] /= known->sum;
    out_of_pairs(p->cache->dtype, known->mixture, head_dim);
    if (p->attended != NULL)
        memcpy(p->attended + piece * head_dim, known->mixture, head_dim * sizeof(float));
    else
        for (int g = 0; g < groups; g++) put_group(known->mixture + g * LM_GROUP, p->mixed, piece * groups + g);
}

static void turn_and_store_stage(const pass *p, lm_team team, int layer) {
    const int heads = p->model->num_heads, kv_heads = p->model->num_kv_heads, head_dim = p->model->head_dim;
    const int pieces = heads + kv_heads;
    for (int64_t piece = team.index; piece < (int64_t)p->num_rows * pieces; piece += team.count) {
        const int row = (int)(piece / pieces), head = (int)(piece % pieces);
        float *values = p->qkv + ((size_t)row * (heads + 2 * kv_heads) + head) * head_dim;
        if (head < heads)
            turn_query(p, row, values, values);
        else
            store_slot(p, layer, row, head - heads);
    }
}

/* One piece is one row, or some that follow each other in one sequence, one kv head with its query heads, and one chunk of
 * slots. Where no row sees what another one is about to store, a piece turns its own queries, and the row's last one stores its
 * key and value: one stage instead of two. */
static void attend_stage(const pass *p, lm_team team, atomic_int *next, int layer) {
    const lm_model *model = p->model;
    const lm_cache *cache = p->cache;
    const int head_dim = model->head_dim, heads = model->num_heads, kv_heads = model->num_kv_heads;
    const int group = heads / kv_heads, all = heads + 2 * kv_heads;
    const int pieces = p->num_runs * kv_heads * p->num_chunks;
    float *turned = p->turned + (size_t)team.index * HEADS_AT_ONCE * head_dim;
    for (int piece; (piece = lm_next(next)) < pieces;) {
        const int run = piece / (kv_heads * p->num_chunks), kv = piece / p->num_chunks % kv_heads;
        const int row = p->runs[run], count = p->runs[run + 1] - row;
        const int chunk = piece % p->num_chunks, begin = chunk * CHUNK, visible = p->places[row + count - 1].position + 1;
        if (begin >= visible) continue;
        const int has_scales = cache->dtype == LM_INT8;
        const stretch at = {
            .k = cache->k[layer],
            .v = cache->v[layer],
            .k_scales = has_scales ? cache->k_scales[layer] : NULL,
            .v_scales = has_scales ? cache->v_scales[layer] : NULL,
            .place = slots_of(p, row, kv) + (size_t)begin * head_dim,
            .head_dim = head_dim,
            .slots = min_int(visible, begin + CHUNK) - begin,
        };
        if (p->apart && begin + at.slots == visible) store_slot(p, layer, row, kv);
        for (int first = kv * group; first < (kv + 1) * group; first += HEADS_AT_ONCE) {
            const int own = min_int(HEADS_AT_ONCE, (kv + 1) * group - first);
            const float *q = p->qkv + ((size_t)row * all + first) * head_dim;
            part *out[ROWS_OF_RUN][HEADS_AT_ONCE];
            for (int m = 0; m < count; m++)
                for (int h = 0; h < own; h++)
                    out[m][h] = part_at(p->parts, ((size_t)(row + m) * heads + first + h) * p->num_chunks + chunk, head_dim);
            for (int h = 0; h < own && p->apart; h++) turn_query(p, row, q + (size_t)h * head_dim, turned + (size_t)h * head_dim);
            attend_stretch(cache->dtype, own, &at, &(row_run){
                .q = p->apart ? turned : q,
                .stride = (size_t)all * head_dim,
                .count = count,
                .visible = visible - begin,
                .out = out,
                .scratch = p->scratch + team.index * run_scratch(head_dim),
            });
            for (int m = 0; m < count && p->num_chunks == 1; m++)
                for (int h = 0; h < own; h++) fold_head(p, row + m, first + h);
        }
    }
}

static void attention(const pass *p, lm_team team, atomic_int *next, int layer) {
    const int heads = p->model->num_heads, q_size = heads * p->model->head_dim;
    if (!p->apart) {
        turn_and_store_stage(p, team, layer);
        lm_barrier(team);
    }
    attend_stage(p, team, next, layer);
    lm_barrier(team);
    if (p->num_chunks > 1) {
        for (int piece = team.index; piece < p->num_rows * heads; piece += team.count) fold_head(p, piece / heads, piece % heads);
        lm_barrier(team);
    }
    if (p->attended != NULL) {
        prepare_inputs(team, p->attended, p->num_rows, q_size, NULL, NULL, p->mixed);
        lm_barrier(team);
    }
}

/* The hidden states, normalised, as inputs. A few rows each thread prepares for itself, sooner than it could wait for others. */
static inputs normed(const pass *p, lm_team team, const void *norm) {
    const inputs in = p->normed[p->num_rows <= FEW_ROWS ? team.index : 0];
    const lm_team share = p->num_rows <= FEW_ROWS ? (lm_team){0, 1} : team;
    prepare_inputs(share, p->hidden, p->num_rows, p->model->hidden, p->model, norm, in);
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

static void run_pass(void *context, lm_team team) {
    const pass *p = context;
    const lm_model *model = p->model;
    turn_angles(p, team); /* needed after the first barrier */
    for (int layer = 0; layer < model->num_layers; layer++) run_layer(p, team, layer);
    for (int row = team.index; row < p->num_rows; row += team.count) {
        float *x = p->hidden + (size_t)row * model->hidden;
        const float factor = norm_factor(model, x);
        for (int i = 0; i < model->hidden; i++) x[i] *= factor * number_at(model->norm_dtype, model->final_norm, i);
    }
    LEAVE_JOB();
}

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
    int blocks, floats;
} forms;

static forms forms_of(const lm_model *model) {
    forms wanted = {0, 0};
    for (int i = 0; i < model->num_layers; i++) {
        const lm_layer *l = &model->layers[i];
        const int kinds[] = {l->q.kind, l->k.kind, l->v.kind, l->o.kind, l->gate.kind, l->up.kind, l->down.kind};
        for (size_t j = 0; j < sizeof kinds / sizeof *kinds; j++) *(kinds[j] == LM_BF16 ? &wanted.floats : &wanted.blocks) = 1;
    }
    return wanted;
}

static inputs take_inputs(arena *a, forms wanted, size_t rows, size_t cols) {
    lm_block *blocks = wanted.blocks ? take(a, rows * (cols / LM_GROUP) * sizeof(lm_block)) : NULL;
    return (inputs){blocks, wanted.floats ? take(a, rows * cols * sizeof(float)) : NULL};
}

static void lay_out(pass *p, arena *a, forms wanted, int num_threads) {
    const lm_model *model = p->model;
    const size_t rows = p->num_rows, head_dim = model->head_dim, q_size = model->num_heads * head_dim;
    const int copies = rows <= FEW_ROWS ? num_threads : 1;
    p->qkv = take(a, rows * (q_size + 2 * model->num_kv_heads * head_dim) * sizeof(float));
    p->turns = take(a, rows * head_dim * sizeof(float));
    p->parts = take(a, rows * model->num_heads * p->num_chunks * (head_dim + 2) * sizeof(float));
    p->turned = take(a, num_threads * HEADS_AT_ONCE * head_dim * sizeof(float));
    p->attended = head_dim % LM_GROUP ? take(a, rows * q_size * sizeof(float)) : NULL;
    p->mixed = take_inputs(a, wanted, rows, q_size);
    p->gated = take_inputs(a, wanted, rows, model->intermediate);
    p->counters = take(a, (size_t)model->num_layers * MAX_STAGES * sizeof(atomic_int));
    inputs *normed = take(a, copies * sizeof(inputs));
    for (int i = 0; i < copies; i++) {
        const inputs own = take_inputs(a, wanted, rows, model->hidden);
        if (a->memory != NULL) normed[i] = own;
    }
    p->normed = normed;
    p->runs = take(a, (rows + 1) * sizeof(int));
    p->scratch = take(a, num_threads * run_scratch(head_dim) * sizeof(float));
}

/* Whether each row is of another sequence, as when several answers are continued by a token each. */
static int are_apart(const lm_place *places, int num_rows) {
    for (int i = 1; i < num_rows; i++)
        if (places[i].cache_row <= places[i - 1].cache_row) return 0;
    return 1;
}

/* Cut the rows into runs of one sequence. A few rows of one share too little to be put together. */
static void find_runs(pass *p) {
    p->num_runs = 0;
    for (int row = 0, end; row < p->num_rows; row = end) {
        const lm_place *first = &p->places[row];
        for (end = row + 1; end < p->num_rows && p->places[end].cache_row == first->cache_row &&
                            p->places[end].position == first->position + end - row;)
            end++;
        const int size = end - row < ROWS_OF_RUN / 4 ? 1 : ROWS_OF_RUN;
        for (int start = row; start < end; start += size) p->runs[p->num_runs++] = start;
    }
    p->runs[p->num_runs] = p->num_rows;
}

static int forward(const lm_model *model, const lm_cache *cache, const lm_place *places, int32_t num_rows, float *hidden) {
    int last = 0;
    for (int row = 0; row < num_rows; row++) last = places[row].position > last ? places[row].position : last;
    pass p = {.model = model, .cache = cache, .places = places, .num_rows = num_rows, .num_chunks = last / CHUNK + 1,
              .hidden = hidden, .apart = are_apart(places, num_rows)};
    const forms wanted = forms_of(model);
    const int num_threads = lm_enter();
    arena a = {NULL, 0};
    lay_out(&p, &a, wanted, num_threads);
    const size_t bytes = a.used;
    const int failed = posix_memalign((void **)&a.memory, 64, bytes);
    if (!failed) {
        a.used = 0;
        lay_out(&p, &a, wanted, num_threads);
        find_runs(&p);
        memset(p.counters, 0, (size_t)model->num_layers * MAX_STAGES * sizeof(atomic_int));
        lm_parallel(run_pass, &p);
        free(a.memory);
    }
    lm_leave();
    return failed ? LM_NO_MEMORY : LM_OK;
}

/* --- rows ------------------------------------------------------------------------------------------------------- */

static int lookup(const lm_matrix *w, const int64_t *rows, int32_t num_rows, float *out) {
    for (int n = 0; n < num_rows; n++)
        if (rows[n] < 0 || rows[n] >= w->rows) return LM_NO_SUCH_ROW;
    for (int n = 0; n < num_rows; n++, out += w->cols) unpack_row(w, rows[n] / LM_TILE_ROWS, (int)(rows[n] % LM_TILE_ROWS), out);
    return LM_OK;
}

/* --- one product ------------------------------------------------------------------------------------------------ */

typedef struct {
    const lm_matrix *w;
    const float *x;
    int num_rows;
    float *y;
    inputs in;
    atomic_int next;
} single;

static void run_single(void *context, lm_team team) {
    single *s = context;
    prepare_inputs(team, s->x, s->num_rows, s->w->cols, NULL, NULL, s->in);
    lm_barrier(team);
    products(team, &s->next, &s->w, 1, s->in, s->num_rows, (float *const[]){s->y}, &s->w->rows, 0);
    LEAVE_JOB();
}

static int product(const lm_matrix *w, const float *x, int32_t num_rows, float *y) {
    const size_t groups = (size_t)num_rows * (w->cols / LM_GROUP);
    const size_t group_bytes = w->kind == LM_BF16 ? LM_GROUP * sizeof(float) : sizeof(lm_block);
    void *memory;
    if (posix_memalign(&memory, 64, groups * group_bytes) != 0) return LM_NO_MEMORY;
    const inputs in = w->kind == LM_BF16 ? (inputs){NULL, memory} : (inputs){memory, NULL};
    single s = {.w = w, .x = x, .num_rows = num_rows, .y = y, .in = in};
    lm_enter();
    lm_parallel(run_single, &s);
    lm_leave();
    free(memory);
    return LM_OK;
}

/* --- the choice of tokens ---------------------------------------------------------------------------------------- */

typedef struct {
    const float *logits;
    int num_rows, count;
    const lm_choice *how;
    int32_t *ids;
    atomic_int next;
} choices;

static void run_choices(void *context, lm_team team) {
    choices *c = context;
    (void)team;
    for (int row; (row = lm_next(&c->next)) < c->num_rows;)
        c->ids[row] = choose(c->logits + (size_t)row * c->count, c->count, c->how[row]);
}

static int choose_rows(const float *logits, int32_t num_rows, int32_t count, const lm_choice *how, int32_t *ids) {
    choices c = {.logits = logits, .num_rows = num_rows, .count = count, .how = how, .ids = ids};
    lm_enter();
    lm_parallel(run_choices, &c);
    lm_leave();
    for (int row = 0; row < num_rows; row++)
        if (ids[row] == LM_NO_ID_FOR_MEMORY) return LM_NO_MEMORY;
    return LM_OK;
}

const lm_ops JOIN(lm_ops_, LM_ISA) = {NAME, forward, product, lookup, choose_rows};
