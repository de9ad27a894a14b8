/* The thread pool. Idle threads spin for a while before they sleep: a stage of a job takes microseconds, and the next token usually comes within
 * a millisecond. */
#include "pool.h"

#include <stdlib.h>

#include "llamarium.h"
#include "system.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ __volatile__("yield")
#else
#define RELAX() ((void)0)
#endif

#define MAX_THREADS 1024
#define SPINS 2000 /* about 0.1 ms on Intel processors since Skylake, less on others */
#define PATIENCE_IN_A_JOB_NS 10000000
#define PATIENCE_BETWEEN_JOBS_NS 3000000

static lm_mutex user = LM_MUTEX; /* protects the queue of callers, which take turns in the order of arrival */
static lm_condition next_turn = LM_CONDITION;
static unsigned turns_given, turns_over;
static lm_mutex lock = LM_MUTEX; /* protects sleeping and waking */
static lm_condition changed = LM_CONDITION;

static atomic_int wanted = 1; /* requested number of threads, including the caller's; atomic for lm_threads() */
static int running = 1;
static lm_thread threads[MAX_THREADS];
static atomic_int stopping;

static void (*job)(void *, lm_team);
static void *job_context;
static atomic_uint job_number; /* increases when a job starts */
static atomic_uint passed;     /* increases when all threads have reached a barrier */
static atomic_int arrived, sleepers;
static atomic_int_least64_t patience; /* nanoseconds that threads stay awake after the job */
static atomic_int_least64_t busy;     /* total nanoseconds of all jobs */

static void wake(void) {
    if (atomic_load(&sleepers)) {
        lm_lock(&lock);
        lm_wake_all(&changed);
        lm_unlock(&lock);
    }
}

static void sleep_while(atomic_uint *value, unsigned old) {
    lm_lock(&lock);
    atomic_fetch_add(&sleepers, 1); /* before the value is read again, so that no wake-up is lost */
    while (atomic_load(value) == old) lm_wait(&changed, &lock);
    atomic_fetch_sub(&sleepers, 1);
    lm_unlock(&lock);
}

/* Wait until `value` differs from `old`: spin first, then yield the core, and sleep after `patience_ns`. A virtual machine whose threads sleep
 * loses its cores to other machines for milliseconds, so threads sleep only when there is no work (docs/decisions/0012). */
static void wait_while(atomic_uint *value, unsigned old, int64_t patience_ns) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(value, memory_order_acquire) != old) return;
        RELAX();
    }
    for (const int64_t until = lm_now_ns() + patience_ns; lm_now_ns() < until; lm_yield())
        if (atomic_load_explicit(value, memory_order_acquire) != old) return;
    sleep_while(value, old);
}

unsigned lm_arrive(lm_team team) {
    const unsigned old = atomic_load(&passed);
    if (team.count > 1 && atomic_fetch_add(&arrived, 1) + 1 == team.count) {
        atomic_store(&arrived, 0);
        atomic_fetch_add(&passed, 1);
        wake();
    }
    return old;
}

void lm_await(lm_team team, unsigned arrival) {
    if (team.count > 1) wait_while(&passed, arrival, PATIENCE_IN_A_JOB_NS);
}

void lm_barrier(lm_team team) { lm_await(team, lm_arrive(team)); }

typedef struct {
    int index;
    unsigned seen;
} start_state;

static void work(void *start) {
    int index = ((start_state *)start)->index;
    unsigned seen = ((start_state *)start)->seen;
    free(start);
    for (;;) {
        wait_while(&job_number, seen, atomic_load(&patience));
        seen++;
        if (atomic_load(&stopping)) return;
        lm_team team = {index, running};
        job(job_context, team);
        lm_barrier(team);
    }
}

static void stop_workers(void) {
    atomic_store(&stopping, 1);
    atomic_fetch_add(&job_number, 1);
    wake();
    for (int i = 1; i < running; i++) lm_join_thread(threads[i]);
    atomic_store(&stopping, 0);
    running = 1;
}

static void start_workers(void) {
    while (running < wanted) {
        start_state *start = malloc(sizeof *start);
        if (start == NULL) return;
        *start = (start_state){running, atomic_load(&job_number)};
        if (!lm_start_thread(&threads[running], work, start)) { /* continue with the threads that exist */
            free(start);
            return;
        }
        running++;
    }
}

/* Tickets make the queue fair: with a mutex alone, a thread with thousands of small products could overtake an engine step again and again. */
int lm_enter(void) {
    lm_lock(&user);
    const unsigned turn = turns_given++;
    while (turn != turns_over) lm_wait(&next_turn, &user);
    if (running != wanted) {
        if (running > wanted) stop_workers();
        start_workers();
        wanted = running;
    }
    const int count = running;
    lm_unlock(&user);
    return count;
}

void lm_leave(void) {
    lm_lock(&user);
    if (++turns_over != turns_given) lm_wake_all(&next_turn);
    lm_unlock(&user);
}

static void run(void (*next)(void *, lm_team), void *context, int64_t patience_ns) {
    const int64_t begin = lm_now_ns();
    atomic_store(&patience, patience_ns);
    lm_team team = {0, running};
    if (running > 1) {
        job = next;
        job_context = context;
        atomic_fetch_add_explicit(&job_number, 1, memory_order_seq_cst);
        wake();
    }
    next(context, team);
    lm_barrier(team);
    atomic_fetch_add(&busy, lm_now_ns() - begin);
}

void lm_parallel(void (*next)(void *, lm_team), void *context) { run(next, context, PATIENCE_BETWEEN_JOBS_NS); }

typedef void parallel_function(void (*)(void *), void *, unsigned num_threads, unsigned flags);

typedef struct {
    void (*job)(void *);
    void *context;
} own_job;

static void run_own(void *context, lm_team team) {
    (void)team;
    ((own_job *)context)->job(((own_job *)context)->context);
}

static atomic_int forked; /* in a forked child, OpenMP would wait for threads that exist only in the parent */

void lm_parallel_beside_others(void (*next)(void *), void *context) {
    static _Atomic(parallel_function *) found;
    parallel_function *parallel = atomic_load(&found);
    if (parallel == NULL) atomic_store(&found, parallel = (parallel_function *)lm_find_function("GOMP_parallel"));
    if (parallel == NULL || atomic_load(&forked)) {
        lm_enter();
        run(run_own, &(own_job){next, context}, 0);
        lm_leave();
        return;
    }
    const int64_t begin = lm_now_ns();
    parallel(next, context, 0, 0); /* 0: as many threads as PyTorch uses */
    atomic_fetch_add(&busy, lm_now_ns() - begin);
}

int64_t lm_busy_ns(void) { return atomic_load(&busy); }

void lm_set_threads(int32_t num_threads) {
    lm_lock(&user);
    wanted = num_threads < 1 ? 1 : num_threads > MAX_THREADS ? MAX_THREADS : num_threads;
    lm_unlock(&user);
}

int32_t lm_threads(void) { return wanted; }

/* Reset the pool in a forked child, which has none of the threads, and may have inherited a locked mutex. */
static void forget(void) {
    running = 1;
    atomic_store(&forked, 1);
    atomic_store(&stopping, 0);
    atomic_store(&sleepers, 0);
    atomic_store(&arrived, 0);
    lm_reset_mutex(&user);
    lm_reset_condition(&next_turn);
    turns_given = turns_over = 0;
    lm_reset_mutex(&lock);
    lm_reset_condition(&changed);
}

__attribute__((constructor)) static void on_load(void) { lm_on_fork(forget); }
