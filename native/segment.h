/* What cutting a text into pieces needs, made once for a vocabulary and only read from then on. */
#ifndef LLAMARIUM_SEGMENT_H
#define LLAMARIUM_SEGMENT_H

#include <string.h>

#include "llamarium.h"
#include "trie.h"

#define NO_SYMBOL (-1) /* of a character that no piece has */
#define NO_RANK INT32_MAX
#define PAGE_BITS 8
#define NUM_PAGES (0x110000 >> PAGE_BITS)

/* Two symbols that are joined to a piece. */
typedef struct {
    int32_t left, right; /* of a free place: NO_SYMBOL */
    int32_t piece, rank;
} pair;

typedef struct {
    pair *places; /* a power of two of them, at most half taken */
    int bits;
    int64_t count;
    uint64_t seed;
} pair_table;

/* What follows a node of the trie of pieces, when no longer piece goes on. */
typedef struct {
    int32_t piece;   /* that ends here, or TRIE_NONE */
    int32_t shorter; /* the node of the longest piece that ends here, too; TRIE_ROOT: none */
    int32_t back;    /* the node of the longest end of this one's text */
    int32_t depth;   /* bytes from the root */
} link;

/* A symbol is what BPE joins: a piece by its id, or, behind these, a character without a piece that is part of one. */
struct lm_segmenter {
    int32_t kind, num_pieces, unknown_id;
    uint8_t *types;
    int32_t *lengths; /* of each piece, in bytes */
    int32_t *byte_ids; /* NULL without byte fallback */
    /* BPE */
    int32_t *pages[NUM_PAGES]; /* the symbol of each character; NULL where all have none */
    pair_table pairs, neighbors; /* neighbors: symbols of characters that stand side by side in a piece */
    int has_kept, has_unused;    /* has_kept: user-defined pieces, which no other is joined with */
    uint8_t ends_kept[256];      /* whether one of them ends with a byte */
    /* Unigram */
    float *scores, unknown_score;
    /* Aho and Corasick's automaton: for Unigram of all pieces, for BPE of the user-defined ones, read from their ends */
    trie pieces;
    link *links; /* of each node */
};

/* The ids of a text, as they are found. */
typedef struct {
    const lm_segmenter *s;
    const uint8_t *text;
    int32_t *ids;
    int64_t count;
    int was_unknown; /* several unknown characters in a row are one unknown piece */
} output;

static inline void put_piece(output *out, int32_t id) {
    out->ids[out->count++] = id;
    out->was_unknown = 0;
}

static inline void put_unknown(output *out, int64_t begin, int64_t end) {
    const lm_segmenter *s = out->s;
    if (s->byte_ids)
        for (int64_t i = begin; i < end; i++) out->ids[out->count++] = s->byte_ids[out->text[i]];
    else if (!out->was_unknown && s->unknown_id >= 0)
        out->ids[out->count++] = s->unknown_id;
    out->was_unknown = 1;
}

/* Return the node of the longest end of what has been read that a piece begins with, one byte further. */
static inline int64_t next_state(const lm_segmenter *s, int64_t node, uint8_t byte) {
    for (int64_t next;; node = s->links[node].back)
        if ((next = trie_step(&s->pieces, node, byte)) != TRIE_NONE || node == TRIE_ROOT) return next == TRIE_NONE ? TRIE_ROOT : next;
}

/* How many bytes a character has, by its first one; `text` is UTF-8. */
static inline int character_size(uint8_t first) { return first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4; }

static inline int32_t character_at(const uint8_t *text, int size) {
    switch (size) {
    case 1: return text[0];
    case 2: return (text[0] & 31) << 6 | (text[1] & 63);
    case 3: return (text[0] & 15) << 12 | (text[1] & 63) << 6 | (text[2] & 63);
    default: return (text[0] & 7) << 18 | (text[1] & 63) << 12 | (text[2] & 63) << 6 | (text[3] & 63);
    }
}

static inline int32_t symbol_of(const lm_segmenter *s, int32_t character) {
    const int32_t *page = s->pages[character >> PAGE_BITS];
    return page ? page[character & ((1 << PAGE_BITS) - 1)] : NO_SYMBOL;
}

/* Return the place of a pair, or the free one where it would stand. */
static inline pair *pair_place(const pair_table *t, int32_t left, int32_t right) {
    const uint64_t mask = ((uint64_t)1 << t->bits) - 1;
    uint64_t at = mix((uint64_t)(uint32_t)left << 32 | (uint32_t)right, t->seed) >> (64 - t->bits);
    while (t->places[at].left != NO_SYMBOL && (t->places[at].left != left || t->places[at].right != right)) at = (at + 1) & mask;
    return t->places + at;
}

/* Return the pair of two symbols, or NULL if they make no piece. */
static inline const pair *find_pair(const pair_table *t, int32_t left, int32_t right) {
    if (left < 0 || right < 0) return NULL;
    const pair *found = pair_place(t, left, right);
    return found->left == NO_SYMBOL ? NULL : found;
}

int lm_merge(output *out, int64_t length);   /* BPE; 0 if there was memory for it */
int lm_best_cut(output *out, int64_t length); /* Unigram */

#endif
