/* BPE with scores: of all neighbors that together are a piece, those of the best rank are joined, the leftmost of equals, until
 * there are none. src/llamarium/tokenizer/sentencepiece/segment.py is the same to read.
 *
 * A text is cut where no piece could reach over, usually before each space. Short parts are gone through again for each join; long
 * ones have their pairs in a heap. */
#include "segment.h"

#define SHORT 32        /* symbols */
#define KEPT_BEFORE (-2) /* a user-defined piece's symbol is this minus its id: it is joined with nothing */

typedef struct {
    int32_t symbol;      /* NO_SYMBOL: a character of no piece */
    int32_t rank;        /* of the pair with the next one; NO_RANK: none */
    int32_t piece;       /* which that pair becomes */
    int32_t before, next; /* in long parts; -1: none */
    uint32_t begin;      /* in the text */
} node;

typedef struct {
    node *nodes;
    int64_t count, capacity;
    uint64_t *heap; /* (rank, place) */
    int64_t heap_count, heap_capacity;
    int32_t *halves; /* of each unused piece: the two symbols that it was seen as last, or NO_SYMBOL */
    int32_t *waiting; /* taking unused pieces apart */
    int64_t waiting_capacity;
    output *out;
} merging;

static void consider(merging *m, int64_t left, int64_t right) {
    node *at = m->nodes;
    const pair *p = find_pair(&m->out->s->pairs, at[left].symbol, at[right].symbol);
    at[left].rank = p ? p->rank : NO_RANK;
    if (!p) return;
    at[left].piece = p->piece;
    if (m->halves && m->out->s->types[p->piece] == LM_PIECE_UNUSED)
        m->halves[2 * p->piece] = at[left].symbol, m->halves[2 * p->piece + 1] = at[right].symbol;
}

/* --- short parts ------------------------------------------------------------------------------------------------- */

static void merge_short(merging *m) {
    node *at = m->nodes;
    int count = (int)m->count;
    for (int i = 0; i + 1 < count; i++) consider(m, i, i + 1);
    at[count - 1].rank = NO_RANK;
    for (;;) {
        int best = -1, rank = NO_RANK;
        for (int i = 0; i + 1 < count; i++)
            if (at[i].rank < rank) rank = at[i].rank, best = i;
        if (best < 0) break;
        at[best].symbol = at[best].piece;
        count--;
        memmove(at + best + 1, at + best + 2, (size_t)(count - best - 1) * sizeof *at);
        if (best) consider(m, best - 1, best);
        if (best + 1 < count)
            consider(m, best, best + 1);
        else
            at[best].rank = NO_RANK;
    }
    m->count = count;
}

/* --- long parts -------------------------------------------------------------------------------------------------- */

static void sift_down(uint64_t *heap, int64_t count, int64_t at) {
    const uint64_t moved = heap[at];
    for (int64_t child; (child = 2 * at + 1) < count; at = child) {
        child += child + 1 < count && heap[child + 1] < heap[child];
        if (heap[child] >= moved) break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

/* Fill the heap with the pairs that there are now. */
static void make_heap(merging *m) {
    m->heap_count = 0;
    for (int64_t i = 0; i >= 0; i = m->nodes[i].next)
        if (m->nodes[i].rank != NO_RANK) m->heap[m->heap_count++] = (uint64_t)m->nodes[i].rank << 32 | (uint64_t)i;
    for (int64_t i = m->heap_count / 2 - 1; i >= 0; i--) sift_down(m->heap, m->heap_count, i);
}

static void push(merging *m, int64_t place) {
    if (place < 0 || m->nodes[place].rank == NO_RANK) return;
    if (m->heap_count == m->heap_capacity) {
        make_heap(m); /* without what has been joined since; this pair is among them */
        return;
    }
    const uint64_t entry = (uint64_t)m->nodes[place].rank << 32 | (uint64_t)place;
    int64_t at = m->heap_count++;
    for (; at && m->heap[(at - 1) / 2] > entry; at = (at - 1) / 2) m->heap[at] = m->heap[(at - 1) / 2];
    m->heap[at] = entry;
}

/* Make room for a heap of all pairs, and half as many that are outdated; 0 if there is memory for it. */
static int reserve_heap(merging *m) {
    const int64_t needed = m->count + m->count / 2 + 2;
    if (needed <= m->heap_capacity) return 0;
    free(m->heap);
    m->heap = malloc((size_t)needed * sizeof *m->heap);
    m->heap_capacity = m->heap ? needed : 0;
    return m->heap ? 0 : -1;
}

static int merge_long(merging *m) {
    if (reserve_heap(m)) return -1;
    node *at = m->nodes;
    for (int64_t i = 0; i < m->count; i++) {
        at[i].before = (int32_t)(i - 1), at[i].next = i + 1 < m->count ? (int32_t)(i + 1) : -1, at[i].rank = NO_RANK;
        if (i + 1 < m->count) consider(m, i, i + 1);
    }
    make_heap(m);
    while (m->heap_count) {
        const uint64_t entry = m->heap[0];
        const int64_t left = (int64_t)(entry & UINT32_MAX);
        m->heap[0] = m->heap[--m->heap_count];
        if (m->heap_count) sift_down(m->heap, m->heap_count, 0);
        if (at[left].rank == NO_RANK || (uint64_t)at[left].rank != entry >> 32) continue; /* joined to another since */
        const int64_t right = at[left].next, before = at[left].before, next = at[right].next;
        at[left].symbol = at[left].piece, at[left].next = (int32_t)next, at[left].rank = at[right].rank = NO_RANK;
        if (next >= 0) at[next].before = (int32_t)left;
        if (before >= 0) consider(m, before, left), push(m, before);
        if (next >= 0) consider(m, left, next), push(m, left);
    }
    int64_t count = 0;
    for (int64_t i = 0; i >= 0; i = at[i].next) at[count++] = at[i];
    m->count = count;
    return 0;
}

/* --- from parts to ids ------------------------------------------------------------------------------------------- */

/* Put a piece, or the halves from which an unused one was joined; 0 if there is memory to take it apart. */
static int put_symbol(merging *m, int32_t symbol, int64_t begin) {
    const lm_segmenter *s = m->out->s;
    int64_t waiting = 0;
    for (;;) {
        const int is_piece = symbol >= 0 && symbol < s->num_pieces;
        const int64_t end = begin + (is_piece ? s->lengths[symbol] : character_size(m->out->text[begin]));
        const int is_unused = is_piece && s->types[symbol] == LM_PIECE_UNUSED;
        if (is_unused && m->halves[2 * symbol] != NO_SYMBOL) {
            if (waiting == m->waiting_capacity) {
                const int64_t capacity = 2 * waiting + 64;
                int32_t *more = realloc(m->waiting, (size_t)capacity * sizeof *more);
                if (!more) return -1;
                m->waiting = more, m->waiting_capacity = capacity;
            }
            m->waiting[waiting++] = m->halves[2 * symbol + 1];
            symbol = m->halves[2 * symbol];
            continue;
        }
        if (is_piece && !is_unused)
            put_piece(m->out, symbol);
        else
            put_unknown(m->out, begin, end);
        if (!waiting) return 0;
        symbol = m->waiting[--waiting], begin = end;
    }
}

/* Join what stands in a part, put it, and begin another part; 0 if there was memory for it. */
static int finish_part(merging *m) {
    if (m->count > SHORT) {
        if (merge_long(m)) return -1;
    } else if (m->count > 1)
        merge_short(m);
    for (int64_t i = 0; i < m->count; i++) {
        const int32_t symbol = m->nodes[i].symbol;
        if (symbol < NO_SYMBOL)
            put_piece(m->out, KEPT_BEFORE - symbol);
        else if (put_symbol(m, symbol, m->nodes[i].begin))
            return -1;
    }
    m->count = 0;
    return 0;
}

static int add_node(merging *m, int32_t symbol, int64_t begin) {
    if (m->count == m->capacity) {
        const int64_t capacity = 2 * m->capacity + 64;
        node *more = realloc(m->nodes, (size_t)capacity * sizeof *more);
        if (!more) return -1;
        m->nodes = more, m->capacity = capacity;
    }
    m->nodes[m->count++] = (node){.symbol = symbol, .begin = (uint32_t)begin};
    return 0;
}

/* Find the longest user-defined piece that begins at each place of a text, or TRIE_NONE: an automaton reads it from its end, so that
 * the time does not depend on how long such pieces are. Returns NULL if there is no memory for it. */
static int32_t *find_kept(const lm_segmenter *s, const uint8_t *text, int64_t length) {
    int32_t *kept = malloc((size_t)length * sizeof *kept);
    int64_t state = TRIE_ROOT;
    for (int64_t i = length - 1; kept && i >= 0; i--) {
        state = state == TRIE_ROOT && !s->ends_kept[text[i]] ? TRIE_ROOT : next_state(s, state, text[i]);
        const link *here = s->links + state;
        kept[i] = here->piece != TRIE_NONE ? here->piece : s->links[here->shorter].piece;
    }
    return kept;
}

/* `kept` is as of `find_kept`, or NULL without user-defined pieces. How unused pieces are taken apart depends on all pairs of a text, so
 * a vocabulary with such has texts of one part. */
static int merge_parts(merging *m, int64_t length, const int32_t *kept) {
    const lm_segmenter *s = m->out->s;
    const uint8_t *text = m->out->text;
    int32_t last = NO_SYMBOL;
    for (int64_t at = 0, size; at < length; at += size) {
        const int is_kept = kept && kept[at] != TRIE_NONE;
        size = is_kept ? s->lengths[kept[at]] : character_size(text[at]);
        const int32_t symbol = is_kept ? KEPT_BEFORE - kept[at] : symbol_of(s, character_at(text + at, (int)size));
        if (!s->has_unused && m->count && !find_pair(&s->neighbors, last, symbol) && finish_part(m)) return -1;
        if (add_node(m, symbol, at)) return -1;
        last = symbol;
    }
    return finish_part(m);
}

int lm_merge(output *out, int64_t length) {
    merging m = {.out = out};
    int failed = 0;
    if (out->s->has_unused) {
        const size_t size = (size_t)out->s->num_pieces * 2 * sizeof *m.halves;
        m.halves = malloc(size);
        if (m.halves)
            memset(m.halves, 0xFF, size); /* NO_SYMBOL */
        else
            failed = -1;
    }
    int32_t *kept = out->s->has_kept && length ? find_kept(out->s, out->text, length) : NULL;
    failed = failed || (out->s->has_kept && length && !kept) || merge_parts(&m, length, kept);
    free(m.nodes), free(m.heap), free(m.halves), free(m.waiting), free(kept);
    return failed ? -1 : 0;
}
