/* What each set of kernels offers; compiled once for each set of instructions. */
#include "choose.h"
#include "run.h"

#define STRING_(name) #name
#define STRING(name) STRING_(name)

/* --- rows of a table --------------------------------------------------------------------------------------------- */

#define ROWS_OF_A_PIECE 64
#define NUMBERS_OF_ONE_THREAD 65536 /* fewer are sooner done than another thread is awake */

typedef struct {
    const lm_matrix *w;
    const int64_t *rows;
    int num_rows;
    float *out;
    atomic_int next;
} lookups;

static void run_lookups(void *context, lm_team team) {
    lookups *l = context;
    (void)team;
    for (int first; (first = lm_next(&l->next) * ROWS_OF_A_PIECE) < l->num_rows;) {
        const int left = l->num_rows - first;
        look_up(l->w, l->rows + first, left < ROWS_OF_A_PIECE ? left : ROWS_OF_A_PIECE, l->out + (size_t)first * l->w->cols);
    }
}

static int lookup(const lm_matrix *w, const int64_t *rows, int32_t num_rows, float *out) {
    for (int n = 0; n < num_rows; n++)
        if (rows[n] < 0 || rows[n] >= w->rows) return LM_NO_SUCH_ROW;
    lookups l = {.w = w, .rows = rows, .num_rows = num_rows, .out = out};
    if ((int64_t)num_rows * w->cols <= NUMBERS_OF_ONE_THREAD) {
        look_up(w, rows, num_rows, out);
        return LM_OK;
    }
    lm_enter();
    lm_parallel(run_lookups, &l);
    lm_leave();
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
    prepare_inputs(team, s->x, NULL, s->num_rows, s->w->cols, NULL, NULL, s->in);
    lm_barrier(team);
    products(team, &s->next, &s->w, 1, s->in, s->num_rows, (float *const[]){s->y}, &s->w->rows, 0, NULL);
    leave_job();
}

static int product(const lm_matrix *w, const float *x, int32_t num_rows, int32_t input_bits, float *y) {
    const int parts = parts_of(input_bits), groups = groups_of(w->cols);
    const size_t group_bytes = is_float(w) ? LM_GROUP * sizeof(float) : parts * sizeof(lm_block);
    void *memory = lm_allocate((size_t)num_rows * groups * group_bytes);
    if (memory == NULL) return LM_NO_MEMORY;
    inputs in = {.num_rows = num_rows, .groups = groups, .parts = parts};
    if (w->kind == LM_BF16)
        in.bf16.at = memory;
    else if (is_float(w))
        in.floats = memory;
    else
        in.blocks = memory;
    single s = {.w = w, .x = x, .num_rows = num_rows, .y = y, .in = in};
    lm_enter();
    lm_parallel(run_single, &s);
    lm_leave();
    lm_free(memory);
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
    if (num_rows == 1)
        run_choices(&c, (lm_team){0}); /* sooner done than another thread is awake */
    else
        lm_parallel(run_choices, &c);
    lm_leave();
    for (int row = 0; row < num_rows; row++)
        if (ids[row] == NO_MEMORY_FOR_ID) return LM_NO_MEMORY;
    return LM_OK;
}

#ifdef LM_WITHOUT_TRAINING
#define OF_TRAINING NULL, NULL, NULL
#else
#define OF_TRAINING attend_rows, compute_pointwise, clip
#endif

const lm_ops JOIN(lm_ops_, LM_ISA) = {STRING(LM_ISA), run, product, lookup, choose_rows, OF_TRAINING};
