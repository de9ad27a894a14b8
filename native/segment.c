/* Texts into ids of a SentencePiece vocabulary: the tables are made here, merge.c and best_cut.c use them. */
#include "segment.h"

/* --- tables of pairs --------------------------------------------------------------------------------------------- */

/* Make a table of twice the size, or the first one; 0 if there is memory for it. */
static int grow_table(pair_table *t) {
    pair_table grown = {.bits = t->places ? t->bits + 1 : 8, .count = t->count, .seed = t->seed};
    const size_t size = sizeof *grown.places << grown.bits;
    grown.places = malloc(size);
    if (!grown.places) return -1;
    memset(grown.places, 0xFF, size); /* NO_SYMBOL */
    if (t->places)
        for (int64_t i = 0; i < (int64_t)1 << t->bits; i++) {
            const pair *old = t->places + i;
            if (old->left != NO_SYMBOL) *pair_place(&grown, old->left, old->right) = *old;
        }
    free(t->places);
    *t = grown;
    return 0;
}

static int add_pair(pair_table *t, pair added) {
    if ((!t->places || 2 * (t->count + 1) > (int64_t)1 << t->bits) && grow_table(t)) return -1;
    pair *place = pair_place(t, added.left, added.right);
    t->count += place->left == NO_SYMBOL;
    *place = added;
    return 0;
}

/* --- the automaton ----------------------------------------------------------------------------------------------- */

/* Number the nodes by their depth, which is smaller the nearer to the root: `order`. */
static void sort_by_depth(const link *links, int64_t num_nodes, int32_t *order, int64_t *counts, int64_t deepest) {
    for (int64_t node = 0; node < num_nodes; node++) counts[links[node].depth + 1]++;
    for (int64_t depth = 0; depth < deepest; depth++) counts[depth + 1] += counts[depth];
    for (int64_t node = 0; node < num_nodes; node++) order[counts[links[node].depth]++] = (int32_t)node;
}

/* Make the links of the pieces' trie, a node's after those of all nodes nearer to the root. */
static void fill_links(lm_segmenter *s, const uint64_t *edges, const int32_t *order) {
    link *links = s->links;
    for (int64_t i = 1; i < s->pieces.num_nodes; i++) {
        link *own = links + order[i];
        const uint64_t key = edges[order[i]];
        const int64_t parent = (int64_t)(key >> 8);
        if (parent != TRIE_ROOT) own->back = (int32_t)next_state(s, links[parent].back, (uint8_t)key);
        const link *back = links + own->back;
        own->shorter = back->piece != TRIE_NONE ? own->back : back->shorter;
    }
}

static int build_links(lm_segmenter *s) {
    const trie *t = &s->pieces;
    const size_t count = (size_t)t->num_nodes;
    s->links = calloc(count, sizeof *s->links);
    uint64_t *edges = malloc(count * sizeof *edges); /* to each node */
    int32_t *order = malloc(count * sizeof *order);
    int64_t *counts = NULL, deepest = 0;
    if (s->links && edges && order) {
        for (uint64_t i = 0; i < (uint64_t)1 << t->edge_bits; i++)
            if (t->edges[i]) edges[t->edges[i] & (MAX_NODES - 1)] = t->edges[i] >> NODE_BITS;
        for (int64_t node = 0; node < t->num_nodes; node++) { /* a node has a greater number than the one before it */
            s->links[node].piece = t->values[node];
            if (node) s->links[node].depth = s->links[edges[node] >> 8].depth + 1;
            if (s->links[node].depth > deepest) deepest = s->links[node].depth;
        }
        counts = calloc((size_t)deepest + 2, sizeof *counts);
    }
    if (counts) {
        sort_by_depth(s->links, t->num_nodes, order, counts, deepest);
        fill_links(s, edges, order);
    }
    free(edges), free(order), free(counts);
    return counts ? 0 : -1;
}

/* --- BPE --------------------------------------------------------------------------------------------------------- */

typedef struct {
    lm_segmenter *s;
    const lm_vocabulary *v;
    trie forward, backward; /* of all pieces that others may become */
    int32_t *symbols;       /* of the beginnings of a piece, by their size in bytes */
    int64_t symbols_capacity;
    int32_t num_symbols;
} building;

static int is_joined(uint8_t type) { return type == LM_PIECE_NORMAL || type == LM_PIECE_UNUSED; }

static const uint8_t *text_of(const lm_vocabulary *v, int32_t piece) { return v->text + (piece ? v->ends[piece - 1] : 0); }

static int32_t symbol_at(const lm_segmenter *s, const uint8_t *text) {
    return symbol_of(s, character_at(text, character_size(*text)));
}

static int add_character(lm_segmenter *s, int32_t character, int32_t symbol) {
    int32_t **page = s->pages + (character >> PAGE_BITS);
    if (!*page) {
        *page = malloc(sizeof **page << PAGE_BITS);
        if (!*page) return -1;
        memset(*page, 0xFF, sizeof **page << PAGE_BITS); /* NO_SYMBOL */
    }
    (*page)[character & ((1 << PAGE_BITS) - 1)] = symbol;
    return 0;
}

/* Characters that are pieces have their ids as symbols; the others in pieces get the numbers behind them. */
static int add_characters(building *b) {
    for (int others = 0; others < 2; others++)
        for (int32_t piece = 0; piece < b->v->num_pieces; piece++) {
            if (!is_joined(b->v->types[piece])) continue;
            const uint8_t *text = text_of(b->v, piece), *end = text + b->s->lengths[piece];
            if (!others && text + character_size(*text) != end) continue;
            for (; text < end; text += character_size(*text)) {
                if (symbol_at(b->s, text) != NO_SYMBOL) continue;
                const int32_t character = character_at(text, character_size(*text));
                if (add_character(b->s, character, others ? b->num_symbols++ : piece)) return -1;
            }
        }
    return 0;
}

/* Find the symbols of the beginnings of a piece; 0 if there is memory for them. */
static int find_beginnings(building *b, const uint8_t *text, int64_t length) {
    if (length > b->symbols_capacity) {
        free(b->symbols);
        b->symbols = malloc((size_t)length * 2 * sizeof *b->symbols);
        b->symbols_capacity = b->symbols ? 2 * length : 0;
        if (!b->symbols) return -1;
    }
    int64_t node = TRIE_ROOT;
    for (int64_t i = 1; i < length; i++) {
        node = trie_step(&b->forward, node, text[i - 1]);
        b->symbols[i] = b->forward.values[node];
    }
    if (character_size(*text) < length) b->symbols[character_size(*text)] = symbol_at(b->s, text);
    return 0;
}

/* Add each place of a piece where the text before it and the text behind it are symbols, and all neighboring characters. */
static int add_pairs(building *b, int32_t piece) {
    const uint8_t *text = text_of(b->v, piece);
    const int64_t length = b->s->lengths[piece];
    if (find_beginnings(b, text, length)) return -1;
    int64_t node = TRIE_ROOT;
    int32_t behind = NO_SYMBOL; /* the symbol of the character behind */
    for (int64_t i = length - 1; i >= 0; i--) {
        node = trie_step(&b->backward, node, text[i]);
        if ((text[i] & 0xC0) == 0x80) continue; /* not the first byte of a character */
        const int32_t character = symbol_at(b->s, text + i), end = behind == NO_SYMBOL ? character : b->backward.values[node];
        if (behind != NO_SYMBOL && add_pair(&b->s->neighbors, (pair){character, behind, 0, 0})) return -1;
        behind = character;
        if (i == 0 || end == TRIE_NONE || b->symbols[i] == TRIE_NONE) continue;
        if (add_pair(&b->s->pairs, (pair){b->symbols[i], end, piece, b->v->ranks[piece]})) return -1;
    }
    return 0;
}

static int build_pairs(building *b) {
    lm_segmenter *s = b->s;
    const lm_vocabulary *v = b->v;
    for (int32_t piece = 0; piece < v->num_pieces; piece++) {
        const uint8_t *text = text_of(v, piece);
        const int64_t length = s->lengths[piece];
        s->has_unused |= v->types[piece] == LM_PIECE_UNUSED;
        if (v->types[piece] == LM_PIECE_USER_DEFINED && length) {
            if (trie_add(&s->pieces, text, length, 1, piece)) return -1;
            s->has_kept = s->ends_kept[text[length - 1]] = 1;
        }
        if (!is_joined(v->types[piece])) continue;
        if (trie_add(&b->forward, text, length, 0, piece) || trie_add(&b->backward, text, length, 1, piece)) return -1;
    }
    if (grow_table(&s->pairs) || grow_table(&s->neighbors) || add_characters(b)) return -1;
    for (int32_t piece = 0; piece < v->num_pieces; piece++)
        if (is_joined(v->types[piece]) && add_pairs(b, piece)) return -1;
    return 0;
}

static int build_bpe(lm_segmenter *s, const lm_vocabulary *v) {
    building b = {.s = s, .v = v, .num_symbols = v->num_pieces};
    s->pairs.seed = s->neighbors.seed = v->seed;
    const int failed = trie_make(&s->pieces, v->seed) || trie_make(&b.forward, v->seed) || trie_make(&b.backward, v->seed) ||
                       build_pairs(&b) || (s->has_kept && build_links(s));
    trie_free(&b.forward), trie_free(&b.backward), free(b.symbols);
    return failed;
}

/* --- Unigram ----------------------------------------------------------------------------------------------------- */

static int build_unigram(lm_segmenter *s, const lm_vocabulary *v) {
    s->scores = malloc((size_t)v->num_pieces * sizeof *s->scores);
    if (!s->scores || trie_make(&s->pieces, v->seed)) return -1;
    memcpy(s->scores, v->scores, (size_t)v->num_pieces * sizeof *s->scores);
    for (int32_t piece = 0; piece < v->num_pieces; piece++) {
        const uint8_t type = v->types[piece];
        if (type != LM_PIECE_NORMAL && type != LM_PIECE_USER_DEFINED) continue;
        if (trie_add(&s->pieces, text_of(v, piece), s->lengths[piece], 0, piece)) return -1;
    }
    return build_links(s);
}

/* --- the interface ----------------------------------------------------------------------------------------------- */

static int build(lm_segmenter *s, const lm_vocabulary *v) {
    const size_t count = (size_t)v->num_pieces;
    s->types = malloc(count);
    s->lengths = malloc(count * sizeof *s->lengths);
    if (!s->types || !s->lengths) return -1;
    memcpy(s->types, v->types, count);
    for (int32_t piece = 0; piece < v->num_pieces; piece++) s->lengths[piece] = (int32_t)(v->text + v->ends[piece] - text_of(v, piece));
    if (v->byte_ids) {
        s->byte_ids = malloc(256 * sizeof *s->byte_ids);
        if (!s->byte_ids) return -1;
        memcpy(s->byte_ids, v->byte_ids, 256 * sizeof *s->byte_ids);
    }
    return v->kind == LM_UNIGRAM ? build_unigram(s, v) : build_bpe(s, v);
}

lm_segmenter *lm_make_segmenter(const lm_vocabulary *v) {
    if (v->num_pieces < 1 || v->ends[v->num_pieces - 1] > INT32_MAX) return NULL;
    lm_segmenter *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->kind = v->kind, s->num_pieces = v->num_pieces, s->unknown_id = v->unknown_id, s->unknown_score = v->unknown_score;
    if (!build(s, v)) return s;
    lm_free_segmenter(s);
    return NULL;
}

void lm_free_segmenter(lm_segmenter *s) {
    for (int page = 0; page < NUM_PAGES; page++) free(s->pages[page]);
    trie_free(&s->pieces);
    free(s->types), free(s->lengths), free(s->byte_ids), free(s->scores), free(s->links), free(s->pairs.places), free(s->neighbors.places);
    free(s);
}

int64_t lm_segment(const lm_segmenter *s, const uint8_t *text, int64_t length, int32_t *ids) {
    if (length >= INT32_MAX) return -1;
    output out = {.s = s, .text = text, .ids = ids};
    const int failed = s->kind == LM_UNIGRAM ? lm_best_cut(&out, length) : lm_merge(&out, length);
    return failed ? -1 : out.count;
}
