/* The AVX-512 VNNI set. */
#include "packed_avx512_vnni.h"

#define PREFETCHES_COMING 1

#include "tile_product.h"
