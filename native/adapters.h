/* Low-rank corrections beside products: y += b (scale * a x). Each sequence may have an adapter of its own. All threads compute `a x` before
 * the stage's products, and b times that is added to each panel of a product before it is written. A row's bits depend on its own adapter alone. */
#include "pass.h"

static const lm_lora *lora_of(const lm_adapter *adapter, int layer, int which) {
    if (which == OF_HEAD) return &adapter->head;
    const lm_lora_layer *l = &adapter->layers[layer];
    const lm_lora *const all[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down};
    return all[which];
}

/* What a row's adapter adds to a product; NULL: nothing. */
static const lm_lora *lora_at(const pass *p, int row, int layer, int which) {
    const int adapter = p->batch->adapters[p->sequences[row]];
    const lm_lora *found = adapter < 0 ? NULL : lora_of(&p->model->adapters[adapter], layer, which);
    return found != NULL && found->rank > 0 ? found : NULL;
}

/* The largest rank of the rows' adapters; 0 where no row has one. */
static int largest_rank(const pass *p) {
    int largest = 0;
    for (int row = 0; row < p->num_rows && p->batch->adapters != NULL; row++) {
        if (row > 0 && p->sequences[row] == p->sequences[row - 1]) continue;
        for (int layer = 0; layer < p->model->num_layers; layer++)
            for (int which = 0; which <= OF_HEAD; which++) {
                const lm_lora *lora = lora_at(p, row, layer, which);
                if (lora != NULL && lora->rank > largest) largest = lora->rank;
            }
    }
    return largest;
}

/* The dot products of x (count) with at most four rows of a matrix, in the order of a product of floats: what is missing of the last
 * register is 0. What is missing of four rows is the last one again. */
static __attribute__((noinline)) quad some_dots(const float *rows, int num_rows, const float *x, int count) {
    const float *at[4];
    for (int k = 0; k < 4; k++) at[k] = rows + (size_t)min_int(k, num_rows - 1) * count;
    lanes sums[4] = {{0}};
    int i = 0;
    for (; i + LANES <= count; i += LANES)
        UNROLLED for (int k = 0; k < 4; k++) sums[k] = fused_lanes(sums[k], load_floats(at[k] + i), load_floats(x + i));
    if (i < count)
        UNROLLED for (int k = 0; k < 4; k++)
            sums[k] = fused_lanes(sums[k], load_some(at[k] + i, count - i), load_some(x + i, count - i));
    return sums_of(sums);
}

/* Matrices of the same inputs, which one stage multiplies, and what corrects their products. */
typedef struct {
    const pass *p;
    int layer, count;
    int which[MOST_OF_A_STAGE];
    const int32_t *rows; /* of the pass, whose inputs and outputs these are; NULL: all */
    int num_rows;
    unsigned lowered;    /* lm_await this before the first correction */
} adapted;

static inline const lm_lora *correction_of(const adapted *s, int row, int i) {
    return lora_at(s->p, s->rows != NULL ? s->rows[row] : row, s->layer, s->which[i]);
}

static inline float *lowered_at(const adapted *s, int row, int i) {
    return s->p->lowered + ((size_t)row * MOST_OF_A_STAGE + i) * s->p->padded_rank;
}

/* This thread's share of scale * a x, for x (num_rows, cols), whose rows are filled up to whole groups. Others may still be at theirs when this returns. */
static void lower(lm_team team, adapted *s, const float *x, int cols) {
    const size_t stride = (size_t)groups_of(cols) * LM_GROUP;
    const int quads = s->p->padded_rank / 4, of_row = quads * s->count;
    for (int64_t piece = team.index; piece < (int64_t)s->num_rows * of_row; piece += team.count) {
        const int row = (int)(piece / of_row), i = (int)(piece / quads % s->count), first = (int)(piece % quads) * 4;
        const lm_lora *lora = correction_of(s, row, i);
        if (lora == NULL || first >= lora->rank) continue;
        const quad found = some_dots(lora->a + (size_t)first * cols, lora->rank - first, x + row * stride, cols) * lora->scale;
        memcpy(lowered_at(s, row, i) + first, &found, sizeof found);
    }
    s->lowered = lm_arrive(team);
}

/* out (16, of which `width` are rows of the matrix): a panel of product i of a row, with what its adapter adds. */
static void correct(const adapted *s, int row, int i, int panel, int width, float *out) {
    const lm_lora *lora = correction_of(s, row, i);
    if (lora == NULL) return;
    for (int c = 0; c < width; c += 4) {
        const int count = min_int(4, width - c);
        const size_t first = (size_t)panel * LM_TILE_ROWS + c;
        const quad added = some_dots(lora->b + first * lora->rank, count, lowered_at(s, row, i), lora->rank);
        for (int k = 0; k < count; k++) {
            out[c + k] += added[k];
            if (lora->gain != NULL) out[c + k] *= lora->gain[first + k];
        }
    }
}
