/* The system on Linux and macOS, and the part of it that WebAssembly has. */
#define _GNU_SOURCE /* RTLD_DEFAULT, MADV_HUGEPAGE */
#include "system.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#ifndef __wasm__
#include <dlfcn.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#endif

void *lm_allocate(size_t bytes) {
    void *memory;
    return posix_memalign(&memory, 64, bytes) == 0 ? memory : NULL;
}

void lm_free(void *memory) { free(memory); }

void lm_use_huge_pages(void *memory, size_t bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = ((uintptr_t)memory + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)memory + bytes) / page * page;
    if (end > first) madvise((void *)first, end - first, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

int lm_read_file(int32_t file, void *to, size_t bytes, int64_t offset) {
    for (char *at = to; bytes > 0;) {
        const ssize_t got = pread(file, at, bytes, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return 0;
        at += got, bytes -= (size_t)got, offset += got;
    }
    return 1;
}

#ifndef __wasm__

void lm_lock(lm_mutex *mutex) { pthread_mutex_lock(mutex); }
void lm_unlock(lm_mutex *mutex) { pthread_mutex_unlock(mutex); }
void lm_wait(lm_condition *condition, lm_mutex *mutex) { pthread_cond_wait(condition, mutex); }
void lm_wake_all(lm_condition *condition) { pthread_cond_broadcast(condition); }

typedef struct {
    void (*work)(void *);
    void *context;
} thread_start;

static void *run_thread(void *start) {
    const thread_start own = *(thread_start *)start;
    free(start);
    own.work(own.context);
    return NULL;
}

int lm_start_thread(lm_thread *thread, void (*work)(void *context), void *context) {
    thread_start *start = malloc(sizeof *start);
    if (start == NULL) return 0;
    *start = (thread_start){work, context};
    if (pthread_create(thread, NULL, run_thread, start) == 0) return 1;
    free(start);
    return 0;
}

void lm_join_thread(lm_thread thread) { pthread_join(thread, NULL); }

void lm_yield(void) { sched_yield(); }

int64_t lm_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void lm_on_fork(void (*forget)(void)) { pthread_atfork(NULL, NULL, forget); }
void lm_reset_mutex(lm_mutex *mutex) { pthread_mutex_init(mutex, NULL); }
void lm_reset_condition(lm_condition *condition) { pthread_cond_init(condition, NULL); }

void *lm_find_function(const char *name) { return dlsym(RTLD_DEFAULT, name); }

#endif
