/* The AVX-512 VNNI set, with BF16 weights multiplied by `vdpbf16ps`: two products of a lane are added up in one instruction, in half of
 * the time of plain multiplications. It takes inputs of BF16, to which they are rounded, for one token as for many (inputs.h).
 */
#include "products_avx512_vnni.h"
#undef NAME
#define NAME "avx512_bf16"
