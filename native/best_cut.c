/* Unigram: the cut of a text whose pieces have the highest sum of scores (Viterbi). Sums are float32, and the first of equal cuts
 * counts, as in the sentencepiece library. src/llamarium/tokenizer/sentencepiece/segment.py is the same to read.
 *
 * Where no piece reaches over a place, usually before each space, all cuts go through it: what lies before is decided. */
#include <math.h>

#include "segment.h"

#define LARGEST_SUM 100000.0f

#define UNREACHED INT32_MIN
#define UNKNOWN (-1)

typedef struct {
    float sum;
    int32_t piece;      /* the last one of the best way to here, UNKNOWN or UNREACHED */
    int32_t from, next; /* where it begins; where the next one ends, once that is decided */
} place;

typedef struct {
    place *places; /* from `begin` on, one for each byte */
    int64_t begin, reached, capacity;
    output *out;
} search;

/* Make places up to `end`; 0 if there is memory for them. */
static int reach(search *c, int64_t end) {
    if (end - c->begin >= c->capacity) {
        const int64_t capacity = 2 * (end - c->begin) + 256;
        place *more = realloc(c->places, (size_t)capacity * sizeof *more);
        if (!more) return -1;
        c->places = more, c->capacity = capacity;
    }
    while (c->reached < end) c->places[++c->reached - c->begin].piece = UNREACHED;
    return 0;
}

static inline void take(search *c, int64_t from, int64_t end, int32_t piece, float sum) {
    place *p = c->places + (end - c->begin);
    if (p->piece == UNREACHED || sum > p->sum) *p = (place){.sum = sum, .piece = piece, .from = (int32_t)(from - c->begin)};
}

/* Put the pieces of the best way to `end`, which becomes the first place. */
static void decide(search *c, int64_t end) {
    place *p = c->places;
    const int32_t last = (int32_t)(end - c->begin);
    for (int32_t at = last; at; at = p[at].from) p[p[at].from].next = at;
    for (int32_t at = 0; at != last; at = p[at].next) {
        const int32_t next = p[at].next;
        if (p[next].piece == UNKNOWN)
            put_unknown(c->out, c->begin + at, c->begin + next);
        else
            put_piece(c->out, p[next].piece);
    }
    p[0].sum = p[last].sum;
    c->begin = c->reached = end;
}

/* Count from 0 again at `start`, so that float32 still tells sums apart in a long text. */
static void begin_again(search *c, int64_t start) {
    place *p = c->places - c->begin;
    const float offset = p[start].sum;
    p[start].sum -= offset;
    for (int64_t at = start + 1; at <= c->reached; at++)
        if (p[at].piece != UNREACHED) p[at].sum -= offset;
}

/* Find the pieces that begin at `start`, from the shortest on; 0 if there was memory for it. */
static int look_up(search *c, int64_t start, int64_t length) {
    const lm_segmenter *s = c->out->s;
    const uint8_t *text = c->out->text;
    const float sum = c->places[start - c->begin].sum;
    const int64_t behind = start + character_size(text[start]);
    int is_covered = 0;
    int64_t at = TRIE_ROOT;
    for (int64_t end = start; end < length && (at = trie_step(&s->pieces, at, text[end++])) != TRIE_NONE;) {
        const int32_t piece = s->pieces.values[at];
        if (piece == TRIE_NONE) continue;
        if (end > c->reached && reach(c, end)) return -1;
        take(c, start, end, piece, s->scores[piece] + sum);
        is_covered |= end == behind;
    }
    if (is_covered) return 0;
    if (behind > c->reached && reach(c, behind)) return -1;
    take(c, start, behind, UNKNOWN, s->unknown_score + sum);
    return 0;
}

int lm_best_cut(output *out, int64_t length) {
    search c = {.out = out, .reached = -1};
    int failed = reach(&c, 0);
    if (!failed) c.places[0] = (place){0};
    for (int64_t start = 0; !failed && start < length; start += character_size(out->text[start])) {
        if (start == c.reached && start > c.begin) decide(&c, start);
        if (fabsf(c.places[start - c.begin].sum) > LARGEST_SUM) begin_again(&c, start);
        failed = look_up(&c, start, length);
    }
    if (!failed && length > c.begin) decide(&c, length);
    free(c.places);
    return failed;
}
