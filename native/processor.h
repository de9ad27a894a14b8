/* Whether this processor has the instructions of a set of kernels.
 *
 * On x86-64 the processor is asked by CPUID, and the system by XGETBV whether it saves the registers. The compilers' own
 * __builtin_cpu_supports needs a run-time library that not every one brings, and does not know all names. */
#ifndef LLAMARIUM_PROCESSOR_H
#define LLAMARIUM_PROCESSOR_H

#if defined(__x86_64__)
#include <cpuid.h>

enum { EAX, EBX, ECX, EDX };

/* A bit of a CPUID leaf; 0 if the processor lacks the leaf. */
static inline int cpuid_bit(unsigned leaf, unsigned part, int reg, int bit) {
    unsigned r[4];
    if (part > 0 && (!__get_cpuid_count(leaf, 0, &r[EAX], &r[EBX], &r[ECX], &r[EDX]) || r[EAX] < part)) return 0;
    return __get_cpuid_count(leaf, part, &r[EAX], &r[EBX], &r[ECX], &r[EDX]) && (r[reg] >> bit & 1);
}

/* Whether the system saves these parts of a thread's registers, as bits of XCR0. */
static inline int saves_registers(unsigned parts) {
    unsigned low, high;
    if (!cpuid_bit(1, 0, ECX, 27)) return 0; /* OSXSAVE: XGETBV may be used */
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & parts) == parts;
}

#define AVX_REGISTERS 0x6u     /* XMM and YMM */
#define AVX512_REGISTERS 0xe6u /* also the masks and ZMM */
#define AMX_REGISTERS 0x60000u /* the shapes of tiles, and tiles */

static inline int has_avx2(void) {
    return saves_registers(AVX_REGISTERS) && cpuid_bit(1, 0, ECX, 28) && cpuid_bit(1, 0, ECX, 12) /* AVX, FMA */
           && cpuid_bit(1, 0, ECX, 29) && cpuid_bit(7, 0, EBX, 5);                               /* F16C, AVX2 */
}

#ifdef LM_EMULATE_AVX_VNNI /* in tests, on processors without AVX-VNNI */
static inline int has_avx_vnni(void) { return has_avx2(); }
#else
static inline int has_avx_vnni(void) { return has_avx2() && cpuid_bit(7, 1, EAX, 4); }
#endif

static inline int has_avx512_vnni(void) {
    return saves_registers(AVX512_REGISTERS) && has_avx2() && cpuid_bit(7, 0, EBX, 16) && cpuid_bit(7, 0, EBX, 17) /* F, DQ */
           && cpuid_bit(7, 0, EBX, 30) && cpuid_bit(7, 0, EBX, 31) && cpuid_bit(7, 0, ECX, 11);                   /* BW, VL, VNNI */
}

static inline int has_avx512_bf16(void) { return has_avx512_vnni() && cpuid_bit(7, 1, EAX, 5); }

#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

static inline int has_neon_dotprod(void) { return getauxval(AT_HWCAP) >> 20 & 1; } /* HWCAP_ASIMDDP */
static inline int has_neon_i8mm(void) { return has_neon_dotprod() && (getauxval(AT_HWCAP2) >> 13 & 1); } /* HWCAP2_I8MM */

#elif defined(__aarch64__) && defined(__APPLE__)
#include <stddef.h>
#include <sys/sysctl.h>

static inline int has_neon_dotprod(void) { return 1; } /* every Mac with an Arm processor */

static inline int has_neon_i8mm(void) { /* the M2 and later */
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, NULL, 0) == 0 && has;
}
#endif

#endif
