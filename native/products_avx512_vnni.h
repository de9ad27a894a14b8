/* The AVX-512 VNNI set: weights are multiplied as they are stored with a few rows of inputs, and unpacked first with many. */
#include "many_rows_avx512_vnni.h"

/* From so many on it pays to unpack weights first: of types whose codes lie in two lines sooner than of others. */
INLINE int rows_to_unpack(const int kind) { return needs_copy(kind) ? 20 : 96; }

#define PREFETCHES_COMING 1

/* As in tile_product.h. */
INLINE void blocked_product(const lm_matrix *w, int panel, int num_panels, const uint8_t *coming, const lm_block *x, int num_rows,
                            const int kind, float *out) {
    if (num_rows < rows_to_unpack(kind))
        packed_product(w, panel, num_panels, coming, x, num_rows, kind, out);
    else
        unpacked_product(w, panel, num_panels, coming, x, num_rows, kind, out);
}

#include "tile_product.h"
