/* The tile products with Arm's dot products. */
#include "few_rows_neon_dotprod.h"

#include "tile_product.h"
