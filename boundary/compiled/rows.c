/* Sums of rows and the norms of the sums: accumulated in float32 (float64 where the elements are), each result
   rounded once, the norm taken of the sum before it is rounded. */
#include "rows.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LANES 32
#define BLOCK 1024 /* elements that are summed at a time: they stay in the first cache while terms pass */

enum { ONE, TWO, MORE };

typedef float float_v __attribute__((vector_size(64)));
typedef double double_v __attribute__((vector_size(64)));
typedef uint32_t bits_v __attribute__((vector_size(64)));
typedef uint16_t halves_v __attribute__((vector_size(32)));

static inline float_v vload_float32(const float *from) {
    float_v value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline void vstore_float32(float *to, float_v value) { memcpy(to, &value, sizeof value); }

static inline double_v vload_float64(const double *from) {
    double_v value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline void vstore_float64(double *to, double_v value) { memcpy(to, &value, sizeof value); }

static inline float of_bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* To nearest, ties to even. */
static inline uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float_v vload_bfloat16(const uint16_t *from) {
    halves_v halves;
    memcpy(&halves, from, sizeof halves);
    bits_v bits = __builtin_convertvector(halves, bits_v) << 16;
    return (float_v)bits;
}

static inline void vstore_bfloat16(uint16_t *to, float_v value) {
    bits_v bits = (bits_v)value, nan = (bits_v)(value != value);
    bits_v rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    halves_v halves = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), halves_v);
    memcpy(to, &halves, sizeof halves);
}

#define T float
#define A float
#define LOAD(x) (x)
#define STORE(a) (a)
#define VLOAD(p) vload_float32(p)
#define VSTORE(p, v) vstore_float32(p, v)
#define V float_v
#define WIDE 16
#define SQRT(a) sqrtf(a)
#define NAME(f) f##_float32
#include "rows_typed.h"

#define T double
#define A double
#define LOAD(x) (x)
#define STORE(a) (a)
#define VLOAD(p) vload_float64(p)
#define VSTORE(p, v) vstore_float64(p, v)
#define V double_v
#define WIDE 8
#define SQRT(a) sqrt(a)
#define NAME(f) f##_float64
#include "rows_typed.h"

#define T uint16_t
#define A float
#define LOAD(x) of_bfloat16(x)
#define STORE(a) to_bfloat16(a)
#define VLOAD(p) vload_bfloat16(p)
#define VSTORE(p, v) vstore_bfloat16(p, v)
#define V float_v
#define WIDE 16
#define SQRT(a) sqrtf(a)
#define NAME(f) f##_bfloat16
#include "rows_typed.h"

#ifdef __FLT16_MAX__
static inline float_v vload_float16(const _Float16 *from) {
    float_v value;
    for (int i = 0; i < 16; i++) value[i] = (float)from[i];
    return value;
}

static inline void vstore_float16(_Float16 *to, float_v value) {
    for (int i = 0; i < 16; i++) to[i] = (_Float16)value[i];
}

#define T _Float16
#define A float
#define LOAD(x) ((float)(x))
#define STORE(a) ((_Float16)(a))
#define VLOAD(p) vload_float16(p)
#define VSTORE(p, v) vstore_float16(p, v)
#define V float_v
#define WIDE 16
#define SQRT(a) sqrtf(a)
#define NAME(f) f##_float16
#include "rows_typed.h"
#endif

int dtype_size(int dtype) {
    switch (dtype) {
    case FLOAT64: return 8;
    case FLOAT32: return 4;
    default: return 2;
    }
}

/* Whether the compiler knew the dtype. */
EXPORTED int knows_dtype(int dtype) {
#ifndef __FLT16_MAX__
    if (dtype == FLOAT16) return 0;
#endif
    return FLOAT32 <= dtype && dtype <= FLOAT64;
}

static double element(const void *values, int dtype, int64_t i) {
    switch (dtype) {
    case FLOAT32: return ((const float *)values)[i];
    case FLOAT64: return ((const double *)values)[i];
#ifdef __FLT16_MAX__
    case FLOAT16: return (float)((const _Float16 *)values)[i];
#endif
    default: return of_bfloat16(((const uint16_t *)values)[i]);
    }
}

/* `offset + values` in the accumulator's dtype, the addition in that dtype too. */
static void widen(void *out, const void *values, int dtype, double offset, int64_t count, int wide) {
    if (!wide && dtype == FLOAT32 && offset == 0)
        memcpy(out, values, (size_t)count * 4);
    else if (wide)
        for (int64_t i = 0; i < count; i++) ((double *)out)[i] = offset + element(values, dtype, i);
    else
        for (int64_t i = 0; i < count; i++) ((float *)out)[i] = (float)offset + (float)element(values, dtype, i);
}

/* The scratch memory: one row of sums, the gain, the bias. */
void *rows_scratch(int dtype, int64_t width, const norm_t *norm) {
    int wide = dtype == FLOAT64;
    size_t row = (size_t)width * (wide ? 8 : 4);
    char *scratch = malloc(3 * row + 1);
    if (scratch && norm) {
        if (norm->weight) widen(scratch + row, norm->weight, norm->weight_dtype, norm->offset, width, wide);
        if (norm->bias) widen(scratch + 2 * row, norm->bias, norm->weight_dtype, 0, width, wide);
    }
    return scratch;
}

#define RUN(f, A)                                                                                     \
    f(rows, norm, norm && norm->weight ? (A *)scratch + rows->width : 0,                              \
      norm && norm->bias ? (A *)scratch + 2 * rows->width : 0, (A *)scratch)

void rows_run(const rows_t *rows, int dtype, const norm_t *norm, void *scratch) {
    switch (dtype) {
    case FLOAT32: RUN(rows_run_float32, float); break;
    case FLOAT64: RUN(rows_run_float64, double); break;
    case BFLOAT16: RUN(rows_run_bfloat16, float); break;
#ifdef __FLT16_MAX__
    case FLOAT16: RUN(rows_run_float16, float); break;
#endif
    }
}

void vector_sum(const void *const *terms, int64_t num_terms, void *total, int64_t count, int dtype) {
    switch (dtype) {
    case FLOAT32: vector_sum_float32(terms, num_terms, total, count); break;
    case FLOAT64: vector_sum_float64(terms, num_terms, total, count); break;
    case BFLOAT16: vector_sum_bfloat16(terms, num_terms, total, count); break;
#ifdef __FLT16_MAX__
    case FLOAT16: vector_sum_float16(terms, num_terms, total, count); break;
#endif
    }
}

/* norm(value + residual), and the sum: `residual`, `total` and `normed` may be null. 0, or -1 without memory. */
EXPORTED int add_norm(const void *value, int64_t value_stride, const void *residual, int64_t residual_stride,
                      void *total, void *normed, int64_t count, int64_t width, int dtype, const norm_t *norm) {
    void *scratch = rows_scratch(dtype, width, norm);
    if (!scratch) return -1;
    rows_t rows = {count, width, &value, &value_stride, 1, residual, residual_stride, total, normed};
    rows_run(&rows, dtype, norm, scratch);
    free(scratch);
    return 0;
}
