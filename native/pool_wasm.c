/* The pool in WebAssembly. JavaScript starts its threads (web/src/engine/threads.ts): each is a worker with an instance of this module
 * over the same memory, which calls lm_work and stays there. Where memory is not shared, the caller is the only thread. */
#include "pool.h"

#include <limits.h>

#include "llamarium.h"

static int running = 1; /* threads, the caller's included */
static void (*job)(void *, lm_team);
static void *job_context;
static atomic_uint job_number, passed; /* change when a job begins; when all have reached a barrier */
static atomic_int arrived;

#if defined(__wasm_atomics__)

/* Some tenths of a millisecond: to be woken takes longer than most stages, and a waiting thread cannot yield its core here. */
#define SPINS 400000

static atomic_int sleepers;

static void wake(atomic_uint *value) {
    if (atomic_load(&sleepers)) __builtin_wasm_memory_atomic_notify((int *)value, UINT_MAX);
}

static void wait_while(atomic_uint *value, unsigned old) {
    for (int i = 0; i < SPINS; i++)
        if (atomic_load_explicit(value, memory_order_acquire) != old) return;
    atomic_fetch_add(&sleepers, 1); /* before the last look, so that no wake is missed */
    while (atomic_load(value) == old) __builtin_wasm_memory_atomic_wait32((int *)value, (int)old, -1);
    atomic_fetch_sub(&sleepers, 1);
}

#else

static void wake(atomic_uint *value) { (void)value; }

static void wait_while(atomic_uint *value, unsigned old) {
    (void)value;
    (void)old;
}

#endif

int lm_enter(void) { return running; }

void lm_leave(void) {}

unsigned lm_arrive(lm_team team) {
    const unsigned old = atomic_load(&passed);
    if (team.count > 1 && atomic_fetch_add(&arrived, 1) + 1 == team.count) {
        atomic_store(&arrived, 0);
        atomic_fetch_add(&passed, 1);
        wake(&passed);
    }
    return old;
}

void lm_await(lm_team team, unsigned arrival) {
    if (team.count > 1) wait_while(&passed, arrival);
}

void lm_barrier(lm_team team) { lm_await(team, lm_arrive(team)); }

void lm_parallel(void (*next)(void *, lm_team), void *context) {
    const lm_team team = {0, running};
    if (team.count > 1) {
        job = next;
        job_context = context;
        atomic_fetch_add(&job_number, 1);
        wake(&job_number);
    }
    next(context, team);
    lm_barrier(team);
}

/* How many threads there are, the caller's included; those from 1 on have been started. */
void lm_set_threads(int32_t num_threads) { running = num_threads; }

#if defined(__wasm_atomics__)

/* The life of a thread. No job begins before lm_set_threads, which counts it. */
void lm_work(int32_t index) {
    for (unsigned seen = 0;; seen++) {
        wait_while(&job_number, seen);
        const lm_team team = {index, running};
        job(job_context, team);
        lm_barrier(team);
    }
}

#endif
