/* Intel's tile registers (AMX): whether this process may use them, and how their shapes are described. */
#ifndef LLAMARIUM_AMX_H
#define LLAMARIUM_AMX_H

#ifdef LM_EMULATE_AMX /* in tests, on processors without AMX */
#include "emulated_amx.h"
#else
#include <immintrin.h>

#include "processor.h"
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Whether the processor has tile registers and multiplies bytes in them, and the system saves them when it switches threads. Linux
 * does so for a process that has asked, since they take 8 KB a thread. Asking again changes nothing. */
static inline int may_use_amx(void) {
#ifdef __linux__
    enum { REQUEST_PERMISSION = 0x1023, TILES = 18 }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    if (!cpuid_bit(7, 0, EDX, 24) || !cpuid_bit(7, 0, EDX, 25)) return 0; /* AMX-TILE, AMX-INT8 */
    if (!saves_registers(AMX_REGISTERS)) return 0;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILES) == 0;
#else
    return 0;
#endif
}
#endif

/* The tiles' shapes, as `ldtilecfg` reads them. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

#endif
