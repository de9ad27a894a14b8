/* The system on Windows 10 and later. */
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include "system.h"

#include <malloc.h>
#include <stdlib.h>

#define LARGEST_READ (1u << 30) /* ReadFile counts in 32 bits */

_Static_assert(sizeof(lm_mutex) == sizeof(SRWLOCK) && sizeof(lm_condition) == sizeof(CONDITION_VARIABLE), "system.h");

void *lm_allocate(size_t bytes) { return _aligned_malloc(bytes ? bytes : 1, 64); }

void lm_free(void *memory) { _aligned_free(memory); }

/* Windows grants large pages only to accounts with a privilege that users rarely have. */
void lm_use_huge_pages(void *memory, size_t bytes) { (void)memory, (void)bytes; }

/* An offset in `at` makes ReadFile independent of the handle's own position. */
int lm_read_file(int32_t file, void *to, size_t bytes, int64_t offset) {
    const HANDLE handle = (HANDLE)(intptr_t)file;
    for (char *next = to; bytes > 0;) {
        const DWORD wanted = bytes < LARGEST_READ ? (DWORD)bytes : LARGEST_READ;
        OVERLAPPED at = {.Offset = (DWORD)offset, .OffsetHigh = (DWORD)(offset >> 32)};
        DWORD got = 0;
        if (!ReadFile(handle, next, wanted, &got, &at) || got == 0) return 0;
        next += got, bytes -= got, offset += got;
    }
    return 1;
}

void lm_lock(lm_mutex *mutex) { AcquireSRWLockExclusive((SRWLOCK *)mutex); }
void lm_unlock(lm_mutex *mutex) { ReleaseSRWLockExclusive((SRWLOCK *)mutex); }
void lm_wake_all(lm_condition *condition) { WakeAllConditionVariable((CONDITION_VARIABLE *)condition); }

void lm_wait(lm_condition *condition, lm_mutex *mutex) {
    SleepConditionVariableSRW((CONDITION_VARIABLE *)condition, (SRWLOCK *)mutex, INFINITE, 0);
}

typedef struct {
    void (*work)(void *);
    void *context;
} thread_start;

static DWORD WINAPI run_thread(void *start) {
    const thread_start own = *(thread_start *)start;
    free(start);
    own.work(own.context);
    return 0;
}

int lm_start_thread(lm_thread *thread, void (*work)(void *context), void *context) {
    thread_start *start = malloc(sizeof *start);
    if (start == NULL) return 0;
    *start = (thread_start){work, context};
    *thread = CreateThread(NULL, 0, run_thread, start, 0, NULL);
    if (*thread != NULL) return 1;
    free(start);
    return 0;
}

void lm_join_thread(lm_thread thread) {
    WaitForSingleObject(thread, INFINITE);
    CloseHandle(thread);
}

void lm_yield(void) { SwitchToThread(); }

int64_t lm_now_ns(void) {
    LARGE_INTEGER count, per_second;
    QueryPerformanceCounter(&count);
    QueryPerformanceFrequency(&per_second);
    const int64_t seconds = count.QuadPart / per_second.QuadPart, rest = count.QuadPart % per_second.QuadPart;
    return seconds * 1000000000 + rest * 1000000000 / per_second.QuadPart;
}

void lm_on_fork(void (*forget)(void)) { (void)forget; }
void lm_reset_mutex(lm_mutex *mutex) { InitializeSRWLock((SRWLOCK *)mutex); }
void lm_reset_condition(lm_condition *condition) { InitializeConditionVariable((CONDITION_VARIABLE *)condition); }

/* PyTorch's OpenMP on Windows is not libgomp, of which alone a function is looked for. */
void *lm_find_function(const char *name) {
    (void)name;
    return NULL;
}
