/* The process's thread pool. All threads run each job together; barriers separate its stages. */
#ifndef LLAMARIUM_POOL_H
#define LLAMARIUM_POOL_H

#include <stdatomic.h>
#include <stdint.h>

typedef struct {
    int index, count;
} lm_team;

/* Acquire the pool until lm_leave; callers are served in order of arrival. Returns the number of threads. */
int lm_enter(void);
void lm_leave(void);

/* Run `job` on every thread of the acquired pool; returns when all are done. */
void lm_parallel(void (*job)(void *context, lm_team team), void *context);

/* Run `job`, which must not use barriers, between operations of PyTorch, without lm_enter. It runs on PyTorch's OpenMP threads if
 * GOMP_parallel exists: they spin between operations, so the pool's threads would find the cores occupied. Otherwise it runs on the pool, whose
 * threads then sleep immediately. */
void lm_parallel_beside_others(void (*job)(void *context), void *context);

/* Wait until all threads of the job have reached the barrier. */
void lm_barrier(lm_team team);

/* A barrier in two steps, between which a thread can do independent work: lm_await(team, lm_arrive(team)) is lm_barrier(team). A thread must
 * await an arrival before it arrives again; awaiting it twice is harmless. */
unsigned lm_arrive(lm_team team);
void lm_await(lm_team team, unsigned arrival);

/* Return the number of the next piece of work of a stage; each number is returned once, to one thread. */
static inline int lm_next(atomic_int *counter) { return atomic_fetch_add_explicit(counter, 1, memory_order_relaxed); }

#endif
