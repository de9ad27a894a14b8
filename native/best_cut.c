/* Unigram: the cut of a text whose pieces have the highest sum of scores (Viterbi). Sums are float32, and the first of equal cuts
 * counts, as in the sentencepiece library. src/llamarium/tokenizer/sentencepiece/segment.py is the same to read.
 *
 * The pieces that end at a place are found by Aho and Corasick's automaton, whatever their lengths: its state is the longest end of
 * the text so far that a piece begins with. Where that is only the last character, no piece reaches over the place before it,
 * which is usually a space: all cuts go through there, and what lies before is decided. */
#include <math.h>

#include "segment.h"

#define LARGEST_SUM 100000.0f
#define MANY_RESTARTS 64 /* which only a piece of thousands of characters reaches over: their offsets are subtracted at once */
#define UNKNOWN (-1)

typedef struct {
    union {
        float sum;    /* of the best way to here */
        int32_t next; /* where the next piece ends, counted from `begin`, once that is decided */
    };
    int32_t piece; /* the last one of the best way, or UNKNOWN: a character without a piece */
} place;

/* Sums of this and all later places have been made smaller there. */
typedef struct {
    int64_t at;
    float offset;
    double total; /* with those before it */
} restart;

typedef struct {
    place *places; /* from `begin` on, one for each byte */
    int64_t begin, capacity;
    restart *restarts;
    int64_t num_restarts, restart_capacity;
    output *out;
} search;

/* The best way to a place, of those seen so far. */
typedef struct {
    float sum;
    int32_t piece;
    int is_there;
    int64_t restarts; /* how many of them are in its sum */
} way;

static int64_t start_of(const search *c, int64_t end, int32_t piece) {
    if (piece != UNKNOWN) return end - c->out->s->lengths[piece];
    for (end--; (c->out->text[end] & 0xC0) == 0x80; end--) {}
    return end;
}

/* Put the pieces of the best way to `end`, which becomes the first place. */
static void decide(search *c, int64_t end) {
    place *p = c->places;
    const int64_t begin = c->begin;
    const float sum = p[end - begin].sum;
    for (int64_t at = end; at > begin;) {
        const int64_t start = start_of(c, at, p[at - begin].piece);
        p[start - begin].next = (int32_t)(at - begin);
        at = start;
    }
    for (int64_t at = begin; at < end;) {
        const int64_t next = begin + p[at - begin].next;
        const int32_t piece = p[next - begin].piece;
        if (piece == UNKNOWN)
            put_unknown(c->out, at, next);
        else
            put_piece(c->out, piece);
        at = next;
    }
    p[0].sum = sum;
    c->begin = end, c->num_restarts = 0;
}

/* Make a place at `end`; 0 if there is memory for it. */
static int reserve(search *c, int64_t end) {
    if (end - c->begin < c->capacity) return 0;
    const int64_t capacity = (end - c->begin) / 2 * 3 + 256;
    place *more = realloc(c->places, (size_t)capacity * sizeof *more);
    if (!more) return -1;
    c->places = more, c->capacity = capacity;
    return 0;
}

/* Count from 0 again, so that float32 still tells sums apart in a long text; 0 if there is memory to remember it. */
static int begin_again(search *c, int64_t at) {
    if (c->num_restarts == c->restart_capacity) {
        const int64_t capacity = 2 * c->restart_capacity + 16;
        restart *more = realloc(c->restarts, (size_t)capacity * sizeof *more);
        if (!more) return -1;
        c->restarts = more, c->restart_capacity = capacity;
    }
    float *sum = &c->places[at - c->begin].sum;
    const double before = c->num_restarts ? c->restarts[c->num_restarts - 1].total : 0;
    c->restarts[c->num_restarts++] = (restart){at, *sum, before + *sum};
    *sum -= *sum;
    return 0;
}

/* Return how many restarts there are up to a place. */
static int64_t restarts_up_to(const search *c, int64_t at) {
    int64_t low = 0, high = c->num_restarts;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (c->restarts[middle].at <= at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Subtract from a way's sum what was subtracted from the others' at the restarts up to number `count`. */
static void follow(const search *c, way *w, int64_t count) {
    const restart *all = c->restarts;
    if (count - w->restarts > MANY_RESTARTS) {
        w->sum -= (float)(all[count - 1].total - (w->restarts ? all[w->restarts - 1].total : 0));
        w->restarts = count;
    }
    while (w->restarts < count) w->sum -= all[w->restarts++].offset;
}

/* Compare with another way, whose last piece begins at `start`, behind those of the ways before. */
static void consider(const search *c, way *best, int64_t start, int32_t piece, float score) {
    const float sum = score + c->places[start - c->begin].sum;
    const int64_t restarts = restarts_up_to(c, start);
    if (best->is_there) follow(c, best, restarts);
    if (!best->is_there || sum > best->sum) *best = (way){sum, piece, 1, restarts};
}

/* Find the best way to `end`, where the character from `start` on ends. */
static void find_way(search *c, int64_t start, int64_t end, const link *state) {
    const lm_segmenter *s = c->out->s;
    way best = {.sum = 0};
    int is_covered = 0;
    if (state->piece == TRIE_NONE) state = s->links + state->shorter;
    for (; state->piece != TRIE_NONE; state = s->links + state->shorter) { /* the longest piece begins first */
        const int64_t from = end - s->lengths[state->piece];
        is_covered = from == start;
        consider(c, &best, from, state->piece, s->scores[state->piece]);
    }
    if (!is_covered) consider(c, &best, start, UNKNOWN, s->unknown_score);
    follow(c, &best, c->num_restarts);
    c->places[end - c->begin] = (place){.sum = best.sum, .piece = best.piece};
}

static int go_through(search *c, int64_t length) {
    const lm_segmenter *s = c->out->s;
    const uint8_t *text = c->out->text;
    int64_t state = TRIE_ROOT;
    if (reserve(c, 0)) return -1;
    c->places[0].sum = 0;
    for (int64_t start = 0, end; start < length; start = end) {
        end = start + character_size(text[start]);
        for (int64_t i = start; i < end; i++) state = next_state(s, state, text[i]);
        if (fabsf(c->places[start - c->begin].sum) > LARGEST_SUM && begin_again(c, start)) return -1;
        if (s->links[state].depth <= end - start) decide(c, start);
        if (reserve(c, end)) return -1;
        find_way(c, start, end, s->links + state);
    }
    decide(c, length);
    return 0;
}

int lm_best_cut(output *out, int64_t length) {
    search c = {.out = out};
    const int failed = go_through(&c, length);
    free(c.places), free(c.restarts);
    return failed;
}
