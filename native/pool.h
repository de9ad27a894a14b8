/* One pool of threads for the whole process; each call is run by all of them at once, in step. */
#ifndef LLAMARIUM_POOL_H
#define LLAMARIUM_POOL_H

#include <stdatomic.h>
#include <stdint.h>

typedef struct {
    int index, count;
} lm_team;

/* Take the pool for one caller, until lm_leave; returns its number of threads. */
int lm_enter(void);
void lm_leave(void);

/* Run `job` on every thread of the pool that was taken; returns when all are done. */
void lm_parallel(void (*job)(void *context, lm_team team), void *context);

/* Run `job`, whose threads do not wait for each other, between work of PyTorch's threads, without lm_enter. Those take it, if they are an
 * OpenMP's that has GOMP_parallel: the pool's would find the cores taken, since PyTorch's spin. Else the pool's, which sleep at once. */
void lm_parallel_beside_others(void (*job)(void *context), void *context);

/* A clock that only goes forward. */
int64_t lm_now_ns(void);

/* Wait until all threads of the job are here. */
void lm_barrier(lm_team team);

/* The same in two steps, between which a thread works alone: lm_await(team, lm_arrive(team)) is a barrier. To await the same
 * arrival again takes no time; a thread must have done so before it arrives once more. */
unsigned lm_arrive(lm_team team);
void lm_await(lm_team team, unsigned arrival);

/* Take the next piece of work of a stage: each number from 0 on goes to one thread. */
static inline int lm_next(atomic_int *counter) { return atomic_fetch_add_explicit(counter, 1, memory_order_relaxed); }

#endif
