/* A part of a set: products of packed weights, as its own file has them. */
#include "parts.h"
#include LM_OF_THE_SET

#ifndef PREFETCHES_COMING
#define PREFETCHES_COMING 0
#endif
#ifndef LEAVE_JOB
#define LEAVE_JOB NULL
#endif

const tile_products TILES = {tile_product, PREFETCHES_COMING, LEAVE_JOB};
