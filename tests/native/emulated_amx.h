/* AMX in plain C, as Intel's manual (Software Developer's Manual, volume 2, "TDPBSSD" and the chapters around it) says what
 * its instructions do: so that the set that uses them can be run where there are none. What the processor refuses ends the
 * program with a message. */
#ifndef LLAMARIUM_EMULATED_AMX_H
#define LLAMARIUM_EMULATED_AMX_H

#include <immintrin.h>
#include <stddef.h>

static inline int may_use_amx(void) { return 1; }

void amx_load_config(const void *shapes);
void amx_release(void);
void amx_zero(int tile);
void amx_load(int tile, const void *from, ptrdiff_t stride);
void amx_store(int tile, void *to, ptrdiff_t stride);
void amx_multiply_bytes(int sums, int a, int b);

/* Whether this thread's tiles have shapes; how many products there were, of all threads. */
int amx_is_in_use(void);
int amx_num_products(void);

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#define _tile_loadconfig amx_load_config
#define _tile_release amx_release
#define _tile_zero amx_zero
#define _tile_loadd amx_load
#define _tile_stored amx_store
#define _tile_dpbssd amx_multiply_bytes

#endif
