/* The merges of a byte-level BPE vocabulary that is a list of tokens by rank, where two neighbours join if their texts
 * together are a token: for each token, the two that it is made of. */
#include "llamarium.h"

#include <stdlib.h>
#include <string.h>

#include "trie.h" /* mix */

#define NO_TOKEN (-1)

typedef struct {
    int32_t left, right; /* of a byte: itself; NO_TOKEN: it is not made of two tokens of lower ranks */
} halves;

typedef struct {
    const uint8_t *text;
    const int64_t *ends;
    int32_t *places; /* a hash table of tokens, a power of two of them, at most half taken */
    int bits;
    uint64_t seed;
    uint64_t *powers, *inverses; /* of the hash's base */
    uint64_t *sums;              /* of the bytes of one token times `powers`, up to each of its bytes */
    halves *halves, *cuts;
} ranks;

static int64_t start_of(const ranks *r, int32_t token) { return token ? r->ends[token - 1] : 0; }

static int64_t size_of(const ranks *r, int32_t token) { return r->ends[token] - start_of(r, token); }

/* Make the sums of a token's bytes, by which any part of it has a hash. */
static void sum_up(ranks *r, int32_t token) {
    const uint8_t *text = r->text + start_of(r, token);
    const int64_t size = size_of(r, token);
    for (int64_t i = 0; i < size; i++) r->sums[i + 1] = r->sums[i] + (text[i] + (uint64_t)1) * r->powers[i];
}

/* Return the place of the token that is a part of the token whose sums were made, or the free one where it would be. */
static int32_t *place_of(const ranks *r, const uint8_t *text, int64_t begin, int64_t end) {
    const uint64_t hash = (r->sums[end] - r->sums[begin]) * r->inverses[begin], mask = ((uint64_t)1 << r->bits) - 1;
    for (uint64_t at = mix(hash, r->seed) >> (64 - r->bits);; at = (at + 1) & mask) {
        const int32_t token = r->places[at];
        if (token == NO_TOKEN) return r->places + at;
        if (size_of(r, token) == end - begin && !memcmp(r->text + start_of(r, token), text + begin, (size_t)(end - begin)))
            return r->places + at;
    }
}

/* Whether merges below `limit` leave two parts of a text side by side, cut at `cut`. Their own merges are undone, the
 * last one first: at no time may the two at the cut have joined earlier. Of equal ranks the leftmost joins first. */
static int are_left(const ranks *r, const uint8_t *text, int64_t cut, halves at_cut, int32_t limit) {
    for (int32_t left = at_cut.left, right = at_cut.right;;) {
        const int32_t joined = *place_of(r, text, cut - size_of(r, left), cut + size_of(r, right));
        if (joined != NO_TOKEN && joined < limit) return 0;

        const int32_t inner_left = r->halves[left].right, inner_right = r->halves[right].left;
        const int is_byte_left = inner_left == left, is_byte_right = inner_right == right;
        if (is_byte_left && is_byte_right) return 1;
        if (is_byte_right || (left > right && !is_byte_left)) {
            limit = left;
            left = inner_left;
        } else {
            limit = right + 1;
            right = inner_right;
        }
    }
}

/* Find the merges that lead to a token: the one that BPE takes, or, where none of them is taken for sure, all. */
static int64_t merges_to(ranks *r, int32_t token, halves *merges) {
    const uint8_t *text = r->text + start_of(r, token);
    const int64_t size = size_of(r, token);
    int64_t count = 0;
    sum_up(r, token);
    for (int64_t cut = 1; cut < size; cut++) {
        halves two = {.left = *place_of(r, text, 0, cut)};
        if (two.left == NO_TOKEN || (two.right = *place_of(r, text, cut, size)) == NO_TOKEN) continue;
        const int is_made = two.left < token && two.right < token && r->halves[two.left].left != NO_TOKEN &&
                            r->halves[two.right].left != NO_TOKEN;
        if (is_made && are_left(r, text, cut, two, token)) {
            merges[0] = r->halves[token] = two;
            return 1;
        }
        int64_t place = count++; /* the better known halves first */
        for (; place && (r->cuts[place - 1].left > two.left); place--) r->cuts[place] = r->cuts[place - 1];
        r->cuts[place] = two;
    }
    memcpy(merges, r->cuts, (size_t)count * sizeof *merges);
    return count;
}

static int64_t find_merges(ranks *r, int32_t num_tokens, int64_t longest, halves *merges) {
    const uint64_t base = r->seed << 1 | 1;
    uint64_t inverse = base; /* right in three bits, and in twice as many after each of these steps */
    for (int i = 0; i < 5; i++) inverse *= 2 - base * inverse;
    r->powers[0] = r->inverses[0] = 1, r->sums[0] = 0;
    for (int64_t i = 0; i < longest; i++) {
        r->powers[i + 1] = r->powers[i] * base;
        r->inverses[i + 1] = r->inverses[i] * inverse;
    }
    memset(r->places, 0xFF, sizeof *r->places << r->bits); /* NO_TOKEN */
    for (int32_t token = 0; token < num_tokens; token++) {
        const int is_byte = size_of(r, token) == 1;
        sum_up(r, token);
        *place_of(r, r->text + start_of(r, token), 0, size_of(r, token)) = token;
        r->halves[token] = is_byte ? (halves){token, token} : (halves){NO_TOKEN, NO_TOKEN};
    }
    int64_t count = 0;
    for (int32_t token = 0; token < num_tokens; token++)
        if (size_of(r, token) > 1) count += merges_to(r, token, merges + count);
    return count;
}

int64_t lm_find_merges(const uint8_t *text, const int64_t *ends, int32_t num_tokens, uint64_t seed, int32_t *merges) {
    ranks r = {.text = text, .ends = ends, .bits = 1, .seed = seed};
    int64_t longest = 0, count = -1;
    for (int32_t token = 0; token < num_tokens; token++)
        if (size_of(&r, token) > longest) longest = size_of(&r, token);
    while ((int64_t)1 << r.bits < 2 * (int64_t)num_tokens) r.bits++;

    const size_t num_sums = (size_t)longest + 1;
    r.places = malloc(sizeof *r.places << r.bits);
    r.powers = malloc(3 * num_sums * sizeof *r.powers);
    r.halves = malloc((size_t)num_tokens * sizeof *r.halves);
    r.cuts = malloc(num_sums * sizeof *r.cuts);
    if (r.places && r.powers && r.halves && r.cuts) {
        r.inverses = r.powers + num_sums, r.sums = r.inverses + num_sums;
        count = find_merges(&r, num_tokens, longest, (halves *)merges);
    }
    free(r.places), free(r.powers), free(r.halves), free(r.cuts);
    return count;
}
