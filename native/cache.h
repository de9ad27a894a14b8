/* Where keys and values lie. A slot keeps one position of one kv head: a vector of head_dim, and its scales if it is kept as codes. */
#ifndef LLAMARIUM_CACHE_H
#define LLAMARIUM_CACHE_H

#include "numbers.h"

#define CHUNK 256    /* slots that one piece of attention looks at, a "KV chunk": a sequence's positions 256 c to 256 c + 255 */
#define LEAST_BLOCK 16
#define STRIP 16 /* slots whose keys lie together, if they are codes */

/* A paged cache: `block_slots` apart begins the next block, `head_slots` apart a block's next kv head. */
typedef struct {
    int k_dtype, v_dtype;
    int block_bits; /* a block has 2^block_bits positions */
    size_t block_slots, head_slots;
    void *const *k, *const *v;
    void *const *k_scales, *const *v_scales; /* of codes only */
} kv_cache;

/* Whether numbers are kept as codes with scales. */
static inline int is_codes(int dtype) { return dtype == LM_INT8 || dtype == LM_INT4; }

#define NIBBLE_GROUP 32 /* codes of LM_INT4 that have a scale together */
#define GROUP_BYTES (NIBBLE_GROUP / 2)

static inline int nibble_groups(int head_dim) { return (head_dim + NIBBLE_GROUP - 1) / NIBBLE_GROUP; }

/* How many of a vector's codes are in its group g. */
static inline int size_of_group(int head_dim, int g) {
    return head_dim - g * NIBBLE_GROUP < NIBBLE_GROUP ? head_dim - g * NIBBLE_GROUP : NIBBLE_GROUP;
}

/* Bytes of a slot's vector. */
INLINE size_t vector_bytes(const int dtype, int head_dim) {
    if (dtype == LM_INT4) return (size_t)nibble_groups(head_dim) * GROUP_BYTES;
    return (size_t)head_dim * (dtype == LM_FLOAT32 ? 4 : dtype == LM_BFLOAT16 ? 2 : 1);
}

/* The slot of a position, from its sequence's table of blocks. */
static inline size_t slot_of(const kv_cache *c, const int32_t *table, int kv_head, int position) {
    const int mask = (1 << c->block_bits) - 1;
    return table[position >> c->block_bits] * c->block_slots + kv_head * c->head_slots + (position & mask);
}

/* A KV chunk of one kv head: in each block of the cache some slots that follow each other. */
typedef struct {
    int k_dtype, v_dtype;
    const void *k, *v;
    const void *k_scales, *v_scales; /* of codes only */
    int head_dim;
    int first, slots; /* queries see those from `first` to `slots` - 1 */
    int block_bits; /* a block has 2^block_bits of the chunk's slots, the last one perhaps fewer */
    size_t blocks[CHUNK / LEAST_BLOCK]; /* each one's first slot */
} kv_chunk;

static inline int min_int(int a, int b) { return a < b ? a : b; }

static inline int max_int(int a, int b) { return a > b ? a : b; }

static inline kv_chunk chunk_of(const kv_cache *c, int layer, const int32_t *table, int kv_head, int begin, int first, int slots,
                                int head_dim) {
    kv_chunk chunk = {.k_dtype = c->k_dtype, .v_dtype = c->v_dtype, .k = c->k[layer], .v = c->v[layer], .head_dim = head_dim,
                      .first = first, .slots = slots, .block_bits = min_int(c->block_bits, 8)};
    if (is_codes(c->k_dtype)) {
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
