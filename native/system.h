/* What the kernels need from the operating system: aligned memory, files, threads and a clock. system_posix.c and
 * system_windows.c implement it; no other file calls the system. */
#ifndef LLAMARIUM_SYSTEM_H
#define LLAMARIUM_SYSTEM_H

#include <stddef.h>
#include <stdint.h>

/* Memory aligned to a cache line; NULL if there is none. lm_free releases it, free() does not. */
void *lm_allocate(size_t bytes);
void lm_free(void *memory);

/* Request huge pages for memory, where the system offers them. This is only advice. */
void lm_use_huge_pages(void *memory, size_t bytes);

/* Read exactly `bytes` at an offset of a file; returns 0 if it cannot be read or is shorter. `file` is a descriptor, or a handle on
 * Windows, whose descriptors belong to the C library that made them. Several threads may read one file. */
int lm_read_file(int32_t file, void *to, size_t bytes, int64_t offset);

#ifdef _WIN32
typedef struct {
    void *state; /* an SRWLOCK */
} lm_mutex;
typedef struct {
    void *state; /* a CONDITION_VARIABLE */
} lm_condition;
typedef void *lm_thread; /* a handle */
#define LM_MUTEX {NULL}
#define LM_CONDITION {NULL}
#elif !defined(__wasm__)
#include <pthread.h>
typedef pthread_mutex_t lm_mutex;
typedef pthread_cond_t lm_condition;
typedef pthread_t lm_thread;
#define LM_MUTEX PTHREAD_MUTEX_INITIALIZER
#define LM_CONDITION PTHREAD_COND_INITIALIZER
#endif

#ifndef __wasm__ /* in WebAssembly, JavaScript starts the threads (pool_wasm.c) */
void lm_lock(lm_mutex *mutex);
void lm_unlock(lm_mutex *mutex);
void lm_wait(lm_condition *condition, lm_mutex *mutex);
void lm_wake_all(lm_condition *condition);

/* Return whether the thread was started. */
int lm_start_thread(lm_thread *thread, void (*work)(void *context), void *context);
void lm_join_thread(lm_thread thread);

/* Give the core to another thread that is ready. */
void lm_yield(void);

/* A monotonic clock. */
int64_t lm_now_ns(void);

/* Call `forget` in each forked child; where processes do not fork, never. */
void lm_on_fork(void (*forget)(void));

/* Reset a mutex or a condition in a forked child, whatever state it was in. */
void lm_reset_mutex(lm_mutex *mutex);
void lm_reset_condition(lm_condition *condition);

/* Return a function of any library in this process, by name; NULL if there is none. */
void *lm_find_function(const char *name);
#endif

#endif
