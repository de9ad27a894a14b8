/* A part of a set: what a training step computes between its products, token by token: norms, rotations, SwiGLU and their
 * gradients. Each reads and writes what the products beside it take and give, float32 or bfloat16, and computes in float32.
 *
 * A task is some rows; its number decides what it sums, so the same bits come for every number of threads.
 */
#include "parts.h"

#include <float.h>
#include <stdlib.h>

#define ROWS_OF_A_TASK 32
#define FEW 16384 /* numbers: sooner done than another thread is awake */

typedef struct {
    const lm_pointwise *call;
    int num_tasks;
    float *sums; /* of a norm's backward pass: a task's gradient of the weight */
    atomic_int next;
} pointwise_job;

/* `store_lanes`, sooner where the processor rounds to bfloat16; `dtype` is a constant. */
INLINE void put_lanes(const int dtype, void *to, size_t place, lanes values) {
#if defined __AVX512BF16__
    if (dtype == LM_BFLOAT16) { /* numbers below 2^-126 become zero */
        const __m256bh halves = _mm512_cvtneps_pbh((__m512)values);
        memcpy((uint16_t *)to + place, &halves, sizeof halves);
        return;
    }
#endif
    store_lanes(dtype, to, place, values);
}

INLINE float total_of(lanes values) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) values[i] += values[i + half];
    return values[0];
}

/* in: x, weight (float32), and what is added to x first, of `dtype`, or NULL; out: weight * x / root, of `dtype`, 1 / root of each row,
 * and the sum, of `x_dtype`. */
INLINE void rms_norm(const int dtype, const int x_dtype, const lm_pointwise *call, int row) {
    const int size = call->columns;
    const size_t at = (size_t)row * size;
    for (int i = 0; call->in[2] != NULL && i < size; i += LANES)
        put_lanes(x_dtype, call->out[2], at + i, load_lanes(x_dtype, call->in[0], at + i) + load_lanes(dtype, call->in[2], at + i));
    const void *from = call->in[2] == NULL ? call->in[0] : call->out[2];
    const float factor = inverse_root(x_dtype, from, at, size, call->eps);
    ((float *)call->out[1])[row] = factor;
    for (int i = 0; i < size; i += LANES) {
        const lanes x = load_lanes(x_dtype, from, at + i), weight = load_lanes(LM_FLOAT32, call->in[1], i);
        lanes normalised = x * (factor * weight); /* as a pass does */
        if (x_dtype == LM_BFLOAT16) {
            uint16_t rounded[LANES];
            put_lanes(x_dtype, rounded, 0, x * factor);
            normalised = load_lanes(x_dtype, rounded, 0) * weight;
        }
        put_lanes(dtype, call->out[0], at + i, normalised);
    }
}

/* in: x, weight, 1 / root of each row, the output's gradient, of `dtype`, and x's own, or NULL; out: x's gradient, which that is added to,
 * the same in `dtype`, or NULL, and `sums` += the weight's. */
INLINE void rms_norm_backward(const int dtype, const int x_dtype, const lm_pointwise *call, int row, float *sums) {
    const int size = call->columns;
    const size_t at = (size_t)row * size;
    const float factor = ((const float *)call->in[2])[row];
    lanes products = {0};
    for (int i = 0; i < size; i += LANES) {
        const lanes x = load_lanes(x_dtype, call->in[0], at + i), grad = load_lanes(dtype, call->in[3], at + i);
        products += grad * load_lanes(LM_FLOAT32, call->in[1], i) * x;
        put_lanes(LM_FLOAT32, sums, i, load_lanes(LM_FLOAT32, sums, i) + grad * (x * factor));
    }
    const float share = total_of(products) / size * factor * factor;
    for (int i = 0; i < size; i += LANES) {
        const lanes x = load_lanes(x_dtype, call->in[0], at + i), grad = load_lanes(dtype, call->in[3], at + i);
        lanes total = (grad * load_lanes(LM_FLOAT32, call->in[1], i) - x * share) * factor;
        if (call->in[4] != NULL) total += load_lanes(x_dtype, call->in[4], at + i);
        put_lanes(x_dtype, call->out[0], at + i, total);
        if (call->out[2] != NULL) put_lanes(dtype, call->out[2], at + i, total);
    }
}

/* in: gate, up, and backward the output's gradient; out: silu(gate) * up, or the gradients of gate and up. */
INLINE void swiglu(const int dtype, const lm_pointwise *call, const int backward, int row) {
    const void *gates = call->in[0], *ups = call->in[1], *grads = call->in[2];
    void *out = call->out[0], *out_up = call->out[1];
    const size_t begin = (size_t)row * call->columns, end = begin + call->columns;
    for (size_t at = begin; at < end; at += LANES) {
        const lanes x = load_lanes(dtype, gates, at), up = load_lanes(dtype, ups, at);
        if (!backward) {
            put_lanes(dtype, out, at, silu(x) * up);
            continue;
        }
        const lanes grad = load_lanes(dtype, grads, at), e = exp_of_minus(x), sigmoid = 1 / (e + 1);
        put_lanes(dtype, out, at, grad * up * (sigmoid + x * sigmoid * (e * sigmoid)));
        put_lanes(dtype, out_up, at, grad * (x * sigmoid));
    }
}

/* in: vectors of heads, cosines and signed sines (table_rows, head_dim); backward the same two, and the output's gradient; out: the vectors
 * turned, backward by the opposite angle. */
INLINE void rotate_row(const int dtype, const lm_pointwise *call, const int backward, int row) {
    const int size = call->head_dim, half = size / 2;
    const void *from = call->in[backward ? 2 : 0], *cosines = call->in[!backward], *sines = call->in[1 + !backward];
    const size_t angles = (size_t)(row % call->table_rows) * size, begin = (size_t)row * call->columns;
    for (size_t at = begin; at < begin + call->columns; at += size)
        for (int i = 0; i < half; i += LANES) {
            const lanes a = load_lanes(dtype, from, at + i), b = load_lanes(dtype, from, at + half + i);
            const lanes cos_a = load_lanes(LM_FLOAT32, cosines, angles + i), cos_b = load_lanes(LM_FLOAT32, cosines, angles + half + i);
            const lanes sin_a = load_lanes(LM_FLOAT32, sines, angles + i), sin_b = load_lanes(LM_FLOAT32, sines, angles + half + i);
            put_lanes(dtype, call->out[0], at + i, a * cos_a + b * (backward ? sin_b : sin_a));
            put_lanes(dtype, call->out[0], at + half + i, b * cos_b + a * (backward ? sin_a : sin_b));
        }
}

INLINE void run_rows(const int dtype, const int x_dtype, pointwise_job *job, int task) {
    const lm_pointwise *call = job->call;
    const int begin = task * ROWS_OF_A_TASK, left = call->num_rows - begin, count = left < ROWS_OF_A_TASK ? left : ROWS_OF_A_TASK;
    float *sums = job->sums == NULL ? NULL : job->sums + (size_t)task * call->columns;
    for (int row = begin; row < begin + count; row++) switch (call->op) {
        case LM_RMS_NORM: rms_norm(dtype, x_dtype, call, row); break;
        case LM_RMS_NORM_BACKWARD: rms_norm_backward(dtype, x_dtype, call, row, sums); break;
        case LM_SWIGLU: swiglu(dtype, call, 0, row); break;
        case LM_SWIGLU_BACKWARD: swiglu(dtype, call, 1, row); break;
        case LM_ROTATE: rotate_row(dtype, call, 0, row); break;
        case LM_ROTATE_BACKWARD: rotate_row(dtype, call, 1, row); break;
        }
}

static void run_pointwise(void *context) {
    pointwise_job *job = context;
    for (int task; (task = lm_next(&job->next)) < job->num_tasks;)
        if (job->call->dtype == LM_FLOAT32)
            run_rows(LM_FLOAT32, LM_FLOAT32, job, task);
        else if (job->call->x_dtype == LM_FLOAT32)
            run_rows(LM_BFLOAT16, LM_FLOAT32, job, task);
        else
            run_rows(LM_BFLOAT16, LM_BFLOAT16, job, task);
}

int compute_pointwise(const lm_pointwise *call) {
    pointwise_job job = {.call = call, .num_tasks = (call->num_rows + ROWS_OF_A_TASK - 1) / ROWS_OF_A_TASK};
    const int columns = call->columns;
    if (call->op == LM_RMS_NORM_BACKWARD && (job.sums = calloc((size_t)job.num_tasks * columns, sizeof(float))) == NULL) return LM_NO_MEMORY;
    if ((int64_t)call->num_rows * columns <= FEW)
        run_pointwise(&job);
    else
        lm_parallel_beside_others(run_pointwise, &job);
    if (call->op == LM_RMS_NORM_BACKWARD) {
        float *total = call->out[1];
        memset(total, 0, columns * sizeof(float));
        for (int task = 0; task < job.num_tasks; task++)
            for (int i = 0; i < columns; i++) total[i] += job.sums[(size_t)task * columns + i];
        free(job.sums);
    }
    return LM_OK;
}

/* --- clipping ---------------------------------------------------------------------------------------------------- */

#define NUMBERS_OF_A_TASK 65536

typedef struct {
    float *const *grads;
    const int64_t *counts;
    double *sums; /* of each task's squares; NULL: multiply by `factor` */
    float factor;
    int num_tasks;
    atomic_int next;
} clip_job;

static int tasks_of(int64_t count) { return (int)((count + NUMBERS_OF_A_TASK - 1) / NUMBERS_OF_A_TASK); }

static double sum_of_squares(const float *values, int64_t count) {
    double sums[16] = {0}, sum = 0;
    for (int64_t i = 0; i < count - count % 16; i += 16)
        for (int j = 0; j < 16; j++) sums[j] += (double)values[i + j] * values[i + j];
    for (int64_t i = count - count % 16; i < count; i++) sum += (double)values[i] * values[i];
    for (int j = 0; j < 16; j++) sum += sums[j];
    return sum;
}

static void run_clip(void *context) {
    clip_job *job = context;
    int nth = 0, first = 0; /* task of gradient nth */
    for (int task; (task = lm_next(&job->next)) < job->num_tasks;) {
        for (; task - first >= tasks_of(job->counts[nth]); nth++) first += tasks_of(job->counts[nth]);
        const int64_t begin = (int64_t)(task - first) * NUMBERS_OF_A_TASK, left = job->counts[nth] - begin;
        const int64_t count = left < NUMBERS_OF_A_TASK ? left : NUMBERS_OF_A_TASK;
        float *values = job->grads[nth] + begin;
        if (job->sums != NULL) job->sums[task] = sum_of_squares(values, count);
        for (int64_t i = 0; job->sums == NULL && i < count; i++) values[i] *= job->factor;
    }
}

int clip(float *const *grads, const int64_t *counts, int32_t num_grads, double max_norm, double *norm) {
    clip_job job = {.grads = grads, .counts = counts}, scaling = job;
    for (int i = 0; i < num_grads; i++) job.num_tasks += tasks_of(counts[i]);
    if ((job.sums = malloc((job.num_tasks + 1) * sizeof(double))) == NULL) return LM_NO_MEMORY;
    lm_parallel_beside_others(run_clip, &job);
    double sum = 0;
    for (int task = 0; task < job.num_tasks; task++) sum += job.sums[task];
    free(job.sums);
    *norm = sum > FLT_MAX ? INFINITY : sqrt(sum); /* optimizers keep squares, in float32 */
    scaling.num_tasks = job.num_tasks;
    scaling.factor = (float)(max_norm / (*norm + 1e-6)); /* as PyTorch's */
    if (*norm > max_norm && isfinite(*norm)) lm_parallel_beside_others(run_clip, &scaling);
    return LM_OK;
}
