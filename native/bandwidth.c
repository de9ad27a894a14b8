/* How fast this machine reads memory: what bounds decoding, which reads every weight for every token. */
#include "llamarium.h"
#include "pool.h"
#include "system.h"

#define LINE 64
#define PAGE 4096
#define PAGES 8 /* read side by side: a core can wait for more lines than one page's prefetcher requests */
#define BLOCK (PAGES * PAGE)
#define BLOCKS_AT_ONCE 32 /* which a thread takes: one that lost its core delays the others but shortly */

typedef struct {
    const char *data;
    int num_blocks;
    atomic_int next;
    atomic_uint_least64_t seen; /* so that what is read is used */
} reading;

static uint64_t read_block(const char *block) {
    uint64_t seen = 0;
    for (int at = 0; at < PAGE; at += LINE)
        for (int page = 0; page < PAGES; page++) {
            const char *line = block + page * PAGE + at;
            __builtin_prefetch((const void *)((uintptr_t)line + BLOCK)); /* past the end it does nothing */
            seen ^= *(const uint64_t *)line;                             /* memory comes in whole lines */
        }
    return seen;
}

static void read_stage(void *context, lm_team team) {
    (void)team;
    reading *r = context;
    uint64_t seen = 0;
    for (int first; (first = lm_next(&r->next) * BLOCKS_AT_ONCE) < r->num_blocks;) {
        const int end = first + BLOCKS_AT_ONCE < r->num_blocks ? first + BLOCKS_AT_ONCE : r->num_blocks;
        for (int block = first; block < end; block++) seen ^= read_block(r->data + (int64_t)block * BLOCK);
    }
    atomic_fetch_xor(&r->seen, seen);
}

int64_t lm_read_ns(const void *data, int64_t num_bytes) {
    reading r = {.data = data, .num_blocks = (int)(num_bytes / BLOCK)};
    lm_enter();
    const int64_t begin = lm_now_ns();
    lm_parallel(read_stage, &r);
    const int64_t taken = lm_now_ns() - begin;
    lm_leave();
    return taken;
}
