/* Where keys and values lie. A slot keeps one position of one kv head: a vector of head_dim, and its scale with LM_INT8. */
#ifndef LLAMARIUM_CACHE_H
#define LLAMARIUM_CACHE_H

#include "numbers.h"

#define CHUNK 256    /* slots that one piece of attention looks at, a "KV chunk": a sequence's positions 256 c to 256 c + 255 */
#define LEAST_BLOCK 16

/* A paged cache: `block_slots` apart begins the next block, `head_slots` apart a block's next kv head. */
typedef struct {
    int dtype, block_bits; /* a block has 2^block_bits positions */
    size_t block_slots, head_slots;
    void *const *k, *const *v;
    float *const *k_scales, *const *v_scales; /* of LM_INT8 only */
} kv_cache;

/* The slot of a position, from its sequence's table of blocks. */
static inline size_t slot_of(const kv_cache *c, const int32_t *table, int kv_head, int position) {
    const int mask = (1 << c->block_bits) - 1;
    return table[position >> c->block_bits] * c->block_slots + kv_head * c->head_slots + (position & mask);
}

/* A KV chunk of one kv head: in each block of the cache some slots that follow each other. */
typedef struct {
    const void *k, *v;
    const float *k_scales, *v_scales; /* of LM_INT8 only */
    int head_dim;
    int first, slots; /* queries see those from `first` to `slots` - 1 */
    int block_bits; /* a block has 2^block_bits of the chunk's slots, the last one perhaps fewer */
    size_t blocks[CHUNK / LEAST_BLOCK]; /* each one's first slot */
} kv_chunk;

static inline int min_int(int a, int b) { return a < b ? a : b; }

static inline int max_int(int a, int b) { return a > b ? a : b; }

static inline kv_chunk chunk_of(const kv_cache *c, int layer, const int32_t *table, int kv_head, int begin, int first, int slots,
                                int head_dim) {
    kv_chunk chunk = {.k = c->k[layer], .v = c->v[layer], .head_dim = head_dim, .first = first, .slots = slots,
                      .block_bits = min_int(c->block_bits, 8)};
    if (c->dtype == LM_INT8) {
        chunk.k_scales = c->k_scales[layer];
        chunk.v_scales = c->v_scales[layer];
    }
    for (int i = 0; i << chunk.block_bits < slots; i++) chunk.blocks[i] = slot_of(c, table, kv_head, begin + (i << chunk.block_bits));
    return chunk;
}

/* The cache's slot of a chunk's. */
static inline size_t slot_at(const kv_chunk *chunk, int slot) {
    return chunk->blocks[slot >> chunk->block_bits] + (slot & ((1 << chunk->block_bits) - 1));
}

/* The end of the block in which a chunk's slot lies. */
static inline int end_of_block(const kv_chunk *chunk, int slot) {
    return min_int(((slot >> chunk->block_bits) + 1) << chunk->block_bits, chunk->slots);
}

#endif
