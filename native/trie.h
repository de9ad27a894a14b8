/* Strings and their numbers, found byte by byte: a trie, whose edges stand in one hash table. */
#ifndef LLAMARIUM_TRIE_H
#define LLAMARIUM_TRIE_H

#include <stdint.h>
#include <stdlib.h>

#define TRIE_ROOT 0
#define TRIE_NONE (-1)
#define NODE_BITS 28 /* so that an edge's two nodes and its byte have 64 bits together */
#define MAX_NODES ((int64_t)1 << NODE_BITS)

typedef struct {
    uint64_t *edges; /* (node, byte, the node that they lead to); 0: none. A power of two of them, at most half taken */
    int32_t *values; /* of each node: the number of the string that ends there, or TRIE_NONE */
    int64_t num_nodes, node_capacity;
    int edge_bits;
    uint64_t seed; /* so that no file can choose strings that collide */
} trie;

static inline uint64_t mix(uint64_t key, uint64_t seed) {
    key = (key ^ seed) * 0x9E3779B97F4A7C15u;
    return (key ^ key >> 32) * 0xD6E8FEB86659FD93u;
}

/* Return the place of an edge, or the free one where it would stand. */
static inline uint64_t *edge_place(const trie *t, int64_t node, uint8_t byte) {
    const uint64_t key = (uint64_t)node << 8 | byte, mask = ((uint64_t)1 << t->edge_bits) - 1;
    uint64_t at = mix(key, t->seed) >> (64 - t->edge_bits);
    while (t->edges[at] && t->edges[at] >> NODE_BITS != key) at = (at + 1) & mask;
    return t->edges + at;
}

/* Return the node behind `node` for a byte, or TRIE_NONE. */
static inline int64_t trie_step(const trie *t, int64_t node, uint8_t byte) {
    const uint64_t edge = *edge_place(t, node, byte);
    return edge ? (int64_t)(edge & (MAX_NODES - 1)) : TRIE_NONE;
}

static inline void trie_free(trie *t) {
    free(t->edges);
    free(t->values);
    t->edges = NULL, t->values = NULL;
}

/* Make an empty trie; 0 if there is memory for it. */
static inline int trie_make(trie *t, uint64_t seed) {
    *t = (trie){.num_nodes = 1, .node_capacity = 512, .edge_bits = 10, .seed = seed};
    t->edges = calloc((size_t)1 << t->edge_bits, sizeof *t->edges);
    t->values = malloc((size_t)t->node_capacity * sizeof *t->values);
    if (t->edges && t->values) {
        t->values[TRIE_ROOT] = TRIE_NONE;
        return 0;
    }
    trie_free(t);
    return -1;
}

/* Make room for twice as many nodes; 0 if there is memory for them. */
static inline int trie_grow(trie *t) {
    if (t->node_capacity >= MAX_NODES / 2) return -1;
    int32_t *values = realloc(t->values, (size_t)t->node_capacity * 2 * sizeof *values);
    if (!values) return -1;
    t->values = values;
    uint64_t *old = t->edges, *edges = calloc((size_t)2 << t->edge_bits, sizeof *edges);
    if (!edges) return -1;
    const uint64_t count = (uint64_t)1 << t->edge_bits++;
    t->edges = edges, t->node_capacity *= 2;
    for (uint64_t i = 0; i < count; i++)
        if (old[i]) {
            const uint64_t key = old[i] >> NODE_BITS;
            *edge_place(t, (int64_t)(key >> 8), (uint8_t)key) = old[i];
        }
    free(old);
    return 0;
}

/* Add a string, from its last byte to its first if `backward`; 0 if there is memory for it. */
static inline int trie_add(trie *t, const uint8_t *text, int64_t size, int backward, int32_t value) {
    int64_t node = TRIE_ROOT;
    for (int64_t i = 0; i < size; i++) {
        const uint8_t byte = text[backward ? size - 1 - i : i];
        uint64_t *place = edge_place(t, node, byte);
        if (!*place) {
            if (t->num_nodes == t->node_capacity) {
                if (trie_grow(t)) return -1;
                place = edge_place(t, node, byte);
            }
            *place = ((uint64_t)node << 8 | byte) << NODE_BITS | (uint64_t)t->num_nodes;
            t->values[t->num_nodes++] = TRIE_NONE;
        }
        node = (int64_t)(*place & (MAX_NODES - 1));
    }
    t->values[node] = value;
    return 0;
}

#endif
