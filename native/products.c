/* A part of a set: products of packed weights, as its own file has them. */
#include "parts.h"
#include LM_OF_THE_SET

#ifndef ROWS_TO_PREFETCH
#define ROWS_TO_PREFETCH 0
#endif
#ifndef LEAVE_JOB
#define LEAVE_JOB NULL
#endif

const tile_products TILES = {tile_product, ROWS_TO_PREFETCH, LEAVE_JOB};
