/* The choice of a token from its logits: the largest, or one that is drawn after temperature, top-k, top-p and min-p, in the
 * order of sampling/sampler.py, which also defines a draw.
 *
 * A vocabulary is large, and what a filter leaves of it small. So logits are looked at in blocks, of which the largest is
 * known: no fewer than k logits reach the k-th largest of those, and the blocks that stay below it are not looked at again.
 */
#include <stdlib.h>

#include "numbers.h"

#define CHOICE_BLOCK 64
#define FEW_CANDIDATES 256 /* hold the nucleus of most rows */

enum { NO_MEMORY_FOR_ID = INT32_MIN }; /* in the place of a row's id, until lm_choose returns LM_NO_MEMORY for all */

typedef struct {
    const float *logits;
    int count, num_blocks;
    float largest, temperature;
    float *block_largest; /* (num_blocks) */
} logit_row;

static inline int block_end(const logit_row *row, int block) {
    const int end = (block + 1) * CHOICE_BLOCK;
    return end < row->count ? end : row->count;
}

/* LANES of `count` numbers from `first` on; -infinity behind their end. */
static inline lanes lanes_at(const float *x, int count, int first) {
    if (count - first >= LANES) return load_floats(x + first);
    lanes found = (lanes){0} - INFINITY;
    memcpy(&found, x + first, (count > first ? count - first : 0) * sizeof(float));
    return found;
}

static inline lanes logits_at(const logit_row *row, int first) { return lanes_at(row->logits, row->count, first); }

/* e^((logit - largest) / temperature); less than e^-87 is 0. */
static inline lanes weights_of(const logit_row *row, lanes logits) {
    const lanes zero = {0}, scaled = (logits - row->largest) / row->temperature;
    return select_lanes(scaled > zero - 87.0f, exp_of_lanes(select_lanes(scaled > zero - 87.0f, scaled, zero)), zero);
}

/* Fill in `block_largest` and `largest`; returns whether there is a finite maximum and no NaN. */
static int find_largest(logit_row *row) {
    lane_ints is_nan = {0};
    row->largest = -INFINITY;
    for (int block = 0; block < row->num_blocks; block++) {
        lanes most = (lanes){0} - INFINITY;
        for (int i = block * CHOICE_BLOCK; i < block_end(row, block); i += LANES) {
            const lanes here = logits_at(row, i);
            is_nan |= here != here;
            most = larger_lanes(here, most);
        }
        float largest = most[0];
        for (int i = 1; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
        row->block_largest[block] = largest;
        row->largest = largest > row->largest ? largest : row->largest;
    }
    for (int i = 0; i < LANES; i++)
        if (is_nan[i]) return 0;
    return row->largest > -INFINITY && row->largest < INFINITY;
}

/* The first of the largest. */
static int first_largest(const logit_row *row) {
    int block = 0;
    while (row->block_largest[block] < row->largest) block++;
    int i = block * CHOICE_BLOCK;
    while (row->logits[i] < row->largest) i++;
    return i;
}

static float block_mass(const logit_row *row, int block) {
    lanes sums[16 / LANES] = {{0}}; /* the same order in every set */
    for (int i = block * CHOICE_BLOCK; i < block_end(row, block); i += 16)
        for (int j = 0; j < 16 / LANES; j++) sums[j] += weights_of(row, logits_at(row, i + j * LANES));
    quad parts[4];
    memcpy(parts, sums, sizeof parts);
    const quad sum = (parts[0] + parts[2]) + (parts[1] + parts[3]);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

typedef struct {
    int before, after; /* up to `before` numbers are no smaller than what is between, from `after` on no larger */
} span_of_equals;

/* Hoare's partition of x[first] to x[last] around one of them, larger ones first. */
static span_of_equals split(float *x, int first, int last) {
    const float pivot = x[first + (last - first) / 2];
    int i = first, j = last;
    while (i <= j) {
        while (x[i] > pivot) i++;
        while (x[j] < pivot) j--;
        if (i <= j) {
            const float kept = x[i];
            x[i++] = x[j];
            x[j--] = kept;
        }
    }
    return (span_of_equals){j, i};
}

/* The k-th largest of some numbers, which change places. */
static float kth_largest(float *x, int count, int k) {
    int first = 0, last = count - 1;
    while (first < last) {
        const span_of_equals at = split(x, first, last);
        if (k - 1 <= at.before)
            last = at.before;
        else if (k - 1 >= at.after)
            first = at.after;
        else
            break;
    }
    return x[k - 1];
}

/* The largest number that is among those which, added up from the largest on, reach `mass`; they change places. */
static float nucleus_floor(float *x, int count, double mass) {
    int first = 0, last = count - 1;
    while (first < last) {
        double left = 0, middle = 0;
        const span_of_equals at = split(x, first, last);
        for (int i = first; i <= at.before; i++) left += x[i];
        for (int i = at.before + 1; i < at.after; i++) middle += x[i];
        if (left >= mass) {
            last = at.before;
        } else if (left + middle >= mass) {
            return x[at.before + 1];
        } else {
            mass -= left + middle;
            first = at.after;
        }
    }
    return x[first < count ? first : count - 1];
}

/* The largest logits of a row, in the order of ids. */
typedef struct {
    int count, is_all;
    int32_t *ids;
    float *logits, *weights, *scratch;
} candidates;

/* At least `wanted` of the largest with all of their equals; returns whether there is memory for them. */
static int find_candidates(const logit_row *row, int wanted, candidates *found) {
    float least = -INFINITY;
    const size_t most = row->count > row->num_blocks ? row->count : row->num_blocks;
    char *memory = malloc(most * (sizeof(int32_t) + 3 * sizeof(float)));
    if (memory == NULL) return 0;
    *found = (candidates){.ids = (int32_t *)memory, .logits = (float *)memory + most, .weights = (float *)memory + 2 * most,
                          .scratch = (float *)memory + 3 * most};
    if (wanted < row->num_blocks) {
        memcpy(found->scratch, row->block_largest, row->num_blocks * sizeof(float));
        least = kth_largest(found->scratch, row->num_blocks, wanted);
    }
    int count = 0;
    for (int block = 0; block < row->num_blocks; block++) {
        if (row->block_largest[block] < least) continue;
        for (int i = block * CHOICE_BLOCK; i < block_end(row, block); i++) {
            found->ids[count] = i;
            found->logits[count] = row->logits[i];
            count += row->logits[i] >= least;
        }
    }
    found->count = count;
    found->is_all = count == row->count;
    return 1;
}

static void weigh_candidates(const logit_row *row, const candidates *found) {
    for (int i = 0; i < found->count; i += LANES) {
        const lanes weights = weights_of(row, lanes_at(found->logits, found->count, i));
        memcpy(found->weights + i, &weights, (found->count - i < LANES ? found->count - i : LANES) * sizeof(float));
    }
}

/* Set the weights of those that the filters take out to 0; returns whether all that they leave is here. */
static int filter(const logit_row *row, const lm_choice *how, const candidates *found) {
    const int count = found->count;
    float *scratch = found->scratch, *weights = found->weights;
    weigh_candidates(row, found);
    if (how->top_k > 0) {
        memcpy(scratch, found->logits, count * sizeof(float));
        const float least = kth_largest(scratch, count, how->top_k);
        for (int i = 0; i < count; i++) weights[i] = found->logits[i] >= least ? weights[i] : 0;
    }
    const int has_all = found->is_all || how->top_k > 0;
    double here = 0, total = 0;
    for (int i = 0; i < count; i++) here += weights[i];
    if (how->top_p < 1) {
        for (int block = 0; block < row->num_blocks && !has_all; block++) total += block_mass(row, block);
        const double mass = how->top_p * (has_all ? here : total);
        if (!has_all && here < mass) return 0;
        memcpy(scratch, weights, count * sizeof(float));
        const float least = nucleus_floor(scratch, count, mass);
        for (int i = 0; i < count; i++) weights[i] = weights[i] >= least ? weights[i] : 0;
    }
    float least = 1;
    for (int i = 0; i < count; i++) {
        least = weights[i] < least ? weights[i] : least;
        weights[i] = weights[i] >= how->min_p ? weights[i] : 0;
    }
    return has_all || how->top_p < 1 || least < how->min_p;
}

/* --- draws ------------------------------------------------------------------------------------------------------- */

/* Number n of the stream that begins at `state`.
 * Source: Steele, Lea and Flood 2014, Fast Splittable Pseudorandom Number Generators (java.util.SplittableRandom). */
static inline uint64_t splitmix64(uint64_t state, uint64_t n) {
    uint64_t z = state + (n + 1) * 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

/* A draw on its way. A token's noise is -log(-log1p(-v)) with v = (bits + 0.5) / 2^52, of the 52 high bits of its hash. As
 * -log1p(-v) >= v, only a token with v < e^(score without noise - best) can become the best: most are passed over by their bits
 * alone, without a logarithm. */
typedef struct {
    const logit_row *row;
    uint64_t stream; /* its number i is the hash of token i */
    double best;
    int id;
} draw;

#define MOST_NOISE 36.8 /* of v = 2^-53 */

/* The sign is for the processor, which makes doubles of signed numbers faster. */
static inline int64_t bits_of(const draw *d, int id) { return splitmix64(d->stream, id) >> 12; }

static inline double scaled(const logit_row *row, float logit) { return ((double)logit - row->largest) / row->temperature; }

static void consider(draw *d, int id, int64_t bits) {
    const double v = ((double)bits + 0.5) * 0x1p-52;
    const double score = scaled(d->row, d->row->logits[id]) - log(-log1p(-v));
    if (score > d->best) {
        d->best = score;
        d->id = id;
    }
}

static void draw_from_block(draw *d, int block) {
    const double missing = d->best - scaled(d->row, d->row->block_largest[block]);
    if (missing > MOST_NOISE) return;
    const int64_t limit = missing <= 0 ? INT64_MAX : (int64_t)(exp(-missing) * 0x1.00001p52) + 1; /* and some for rounding */
    for (int i = block * CHOICE_BLOCK; i < block_end(d->row, block); i++) {
        const int64_t bits = bits_of(d, i);
        if (bits < limit) consider(d, i, bits);
    }
}

static draw begin_draw(const logit_row *row, const lm_choice *how) {
    return (draw){.row = row, .stream = splitmix64(splitmix64(how->seed, 0), how->step), .best = -INFINITY, .id = LM_NO_ID};
}

/* The largest logits come first: their scores let most of the others be passed over. */
static int draw_any(const logit_row *row, const lm_choice *how) {
    draw d = begin_draw(row, how);
    const int first = first_largest(row) / CHOICE_BLOCK;
    draw_from_block(&d, first);
    for (int block = 0; block < row->num_blocks; block++)
        if (block != first) draw_from_block(&d, block);
    return d.id;
}

/* One of those that have a weight: e^(score without noise), rounded. */
static int draw_weighted(const logit_row *row, const lm_choice *how, const candidates *found) {
    draw d = begin_draw(row, how);
    double reach = INFINITY; /* e^-best in bits, and some for rounding */
    for (int i = 0; i < found->count; i++) {
        const int64_t bits = bits_of(&d, found->ids[i]);
        if (!((double)bits < found->weights[i] * reach)) continue; /* nor one without a weight, whose infinite reach is NaN */
        consider(&d, found->ids[i], bits);
        reach = exp(-d.best) * 0x1.004p52;
    }
    return d.id;
}

static int draw_filtered(const logit_row *row, const lm_choice *how) {
    const int few = how->top_k > 0 ? how->top_k : FEW_CANDIDATES;
    candidates found;
    if (!find_candidates(row, few, &found)) return NO_MEMORY_FOR_ID;
    if (!filter(row, how, &found)) {
        free(found.ids);
        if (!find_candidates(row, row->count, &found)) return NO_MEMORY_FOR_ID;
        filter(row, how, &found);
    }
    const int chosen = draw_weighted(row, how, &found);
    free(found.ids);
    return chosen;
}

/* Copy logits, those of tokens that may not come as -infinity. */
static void copy_masked(const float *logits, int count, const uint32_t *mask, float *out) {
    const lane_ints number = lane_numbers();
    for (int i = 0; i < count; i += LANES) {
        const lane_ints may_come = ((((lane_ints){0} + (int32_t)(mask[i / 32] >> i % 32)) >> number) & 1) != 0;
        const lanes kept = select_lanes(may_come, lanes_at(logits, count, i), (lanes){0} - INFINITY);
        memcpy(out + i, &kept, (count - i < LANES ? count - i : LANES) * sizeof(float));
    }
}

static int choose(const float *logits, int count, lm_choice how) {
    if (how.top_k >= count) how.top_k = 0;
    const int num_blocks = (count + CHOICE_BLOCK - 1) / CHOICE_BLOCK;
    float *memory = malloc((num_blocks + (how.mask ? (size_t)count : 0)) * sizeof(float));
    if (memory == NULL) return NO_MEMORY_FOR_ID;
    logit_row row = {.logits = logits, .count = count, .num_blocks = num_blocks, .temperature = how.temperature,
                     .block_largest = memory};
    if (how.mask) {
        row.logits = memory + num_blocks;
        copy_masked(logits, count, how.mask, memory + num_blocks);
    }
    int chosen = LM_NO_ID;
    if (find_largest(&row)) {
        const int has_filter = how.top_k > 0 || how.top_p < 1 || how.min_p > 0;
        chosen = how.temperature <= 0 ? first_largest(&row) : has_filter ? draw_filtered(&row, &how) : draw_any(&row, &how);
    }
    free(memory);
    return chosen;
}
