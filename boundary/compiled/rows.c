/* Sums of rows, the norms of the sums, and rows moved by an index: accumulated in float32 (float64 where the elements
   are), each result rounded once, the norm taken of the sum before it is rounded. */
#include "rows.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LANES 32
#define BLOCK 1024 /* elements that are summed at a time: they stay in the first cache while terms pass */

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

static inline void vsingle_float64(float *to, double_v value) {
    for (int i = 0; i < 8; i++) to[i] = (float)value[i];
}

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

/* `count` tokens' outputs of `choices` experts, `width` elements each, with their weights, of any dtype. `shared`,
   `residual` and `normed` may be null; `total` and `normed` are contiguous. */
typedef struct {
    int64_t count, width, choices;
    const void *outputs;
    int64_t outputs_stride, choice_stride;
    const void *weights;
    int64_t weights_stride, weight_stride;
    int weights_dtype;
    double scaling;
    const void *shared;
    int64_t shared_stride;
    const void *residual;
    int64_t residual_stride;
    void *total, *normed;
} finalized_t;

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

/* The largest magnitude: a NaN counts as nothing, and what is beyond float32 as its largest. */
static float largest(const float *row, int64_t width) {
    uint32_t most = 0;
    for (int64_t i = 0; i < width; i++) {
        uint32_t bits;
        memcpy(&bits, row + i, 4);
        bits &= 0x7fffffff;
        bits &= -(uint32_t)(bits <= 0x7f800000); /* rather than a branch, so that the loop is vectorized */
        most = bits > most ? bits : most;
    }
    most = most < 0x7f7fffff ? most : 0x7f7fffff;
    float found;
    memcpy(&found, &most, 4);
    return found;
}

/* All to nearest, ties to even. Adding 1.5 * 2^23 leaves no bits for a fraction, and the integer in the lowest ones. */
static inline uint8_t to_int8(float x) {
    float shifted = x + 12582912.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    return (uint8_t)(x == x ? bits : 0);
}

/* Of a magnitude up to 448, or a NaN. Below 2^-6 all have one exponent: adding 2^14 leaves the bits of 2^-9 and up. */
static inline uint8_t to_float8(float x) {
    uint32_t bits, sign, small_bits;
    memcpy(&bits, &x, 4);
    sign = bits & 0x80000000;
    bits ^= sign;
    float small;
    memcpy(&small, &bits, 4);
    small += 16384.0f;
    memcpy(&small_bits, &small, 4);
    uint32_t rounded = (bits - (120u << 23) + 0x7ffff + ((bits >> 20) & 1)) >> 20;
    rounded = bits < 121u << 23 ? small_bits - (141u << 23) : rounded;
    rounded = bits > 0x7f800000 ? 0x7f : rounded;
    return (uint8_t)(rounded | sign >> 24);
}

/* These comparisons leave a NaN what it is. */
static inline float clamped(float x, float low, float high) {
    x = x > high ? high : x;
    return x < low ? low : x;
}

/* Row r of the result, of its norm. */
static void quantize(const quantized_t *made, int64_t r, int64_t width, const float *restrict normed) {
    uint8_t *restrict out = made->rows + r * width;
    float scale = made->scale, low = made->low, high = made->high;
    if (made->scales) {
        scale = largest(normed, width) / high;
        made->scales[r] = scale = scale > made->floor ? scale : made->floor;
    }
    if (made->to_integers)
        for (int64_t i = 0; i < width; i++) out[i] = to_int8(clamped(normed[i] / scale, low, high));
    else
        for (int64_t i = 0; i < width; i++) out[i] = to_float8(clamped(normed[i] / scale, low, high));
}

#define T float
#define A float
#define LOAD(x) (x)
#define STORE(a) (a)
#define VLOAD(p) vload_float32(p)
#define VSTORE(p, v) vstore_float32(p, v)
#define VSINGLE(p, v) vstore_float32(p, v)
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
#define VSINGLE(p, v) vsingle_float64(p, v)
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
#define VSINGLE(p, v) vstore_float32(p, v)
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
#define VSINGLE(p, v) vstore_float32(p, v)
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

/* `offset + values` in the accumulator's dtype, the addition in that dtype too. */
static void widen(void *out, const void *values, int dtype, double offset, int64_t count, int wide) {
    if (offset == 0) offset = -0.0; /* which leaves zeros their sign */
    if (!wide && dtype == FLOAT32 && offset == 0)
        memcpy(out, values, (size_t)count * 4);
    else if (wide)
        for (int64_t i = 0; i < count; i++) ((double *)out)[i] = offset + element(values, dtype, i);
    else
        for (int64_t i = 0; i < count; i++) ((float *)out)[i] = (float)offset + (float)element(values, dtype, i);
}

/* The scratch memory: one row of sums, the gain, the bias, and `more` elements. */
static void *scratch_of(int dtype, int64_t width, const norm_t *norm, int64_t more) {
    int wide = dtype == FLOAT64;
    size_t size = wide ? 8 : 4, row = (size_t)width * size;
    char *scratch = malloc(3 * row + (size_t)more * size + 1);
    if (scratch && norm) {
        if (norm->weight) widen(scratch + row, norm->weight, norm->weight_dtype, norm->offset, width, wide);
        if (norm->bias) widen(scratch + 2 * row, norm->bias, norm->weight_dtype, 0, width, wide);
    }
    return scratch;
}

void *rows_scratch(int dtype, int64_t width, const norm_t *norm) { return scratch_of(dtype, width, norm, width); }

#define RUN(f, A)                                                                                     \
    f(rows, norm, norm && norm->weight ? (A *)scratch + rows->width : 0,                              \
      norm && norm->bias ? (A *)scratch + 2 * rows->width : 0, (A *)scratch)

#ifdef __FLT16_MAX__
#define RUN_FLOAT16(f) case FLOAT16: RUN(f##_float16, float); break;
#else
#define RUN_FLOAT16(f)
#endif

/* f of the dtype, over `rows`. */
#define RUN_TYPED(f)                                                                                  \
    switch (dtype) {                                                                                  \
    case FLOAT32: RUN(f##_float32, float); break;                                                     \
    case FLOAT64: RUN(f##_float64, double); break;                                                    \
    case BFLOAT16: RUN(f##_bfloat16, float); break;                                                   \
    RUN_FLOAT16(f)                                                                                    \
    }

void rows_run(const rows_t *rows, int dtype, const norm_t *norm, void *scratch) { RUN_TYPED(rows_run) }

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

/* norm(value + residual), and the sum. See rows_t; 0, or -1 without memory. */
EXPORTED int add_norm(const void *value, int64_t value_stride, const void *residual, int64_t residual_stride,
                      void *total, void *normed, const quantized_t *quantized, int64_t count, int64_t width, int dtype,
                      const norm_t *norm) {
    void *scratch = rows_scratch(dtype, width, norm);
    if (!scratch) return -1;
    rows_t rows = {count, width, &value, &value_stride, 1, residual, residual_stride, total, normed, quantized};
    rows_run(&rows, dtype, norm, scratch);
    free(scratch);
    return 0;
}

/* The experts' outputs of each token, combined; onto `residual`, and normalized, if these are not null. See
   finalized_t. */
EXPORTED int moe_finalize(const void *outputs, int64_t outputs_stride, int64_t choice_stride, int64_t choices,
                          const void *weights, int64_t weights_stride, int64_t weight_stride, int weights_dtype,
                          double scaling, const void *shared, int64_t shared_stride, const void *residual,
                          int64_t residual_stride, void *total, void *normed, int64_t count, int64_t width, int dtype,
                          const norm_t *norm) {
    void *scratch = scratch_of(dtype, width, norm, choices);
    if (!scratch) return -1;
    finalized_t made = {count, width, choices, outputs, outputs_stride, choice_stride, weights, weights_stride,
                        weight_stride, weights_dtype, scaling, shared, shared_stride, residual, residual_stride, total,
                        normed};
    const finalized_t *rows = &made;
    RUN_TYPED(finalize_run)
    free(scratch);
    return 0;
}

/* The rows of `value`, of which there are `rows`, `bytes` long and `stride` bytes apart, that `index` names; zeros
   where it names none. */
EXPORTED void gather_rows(const char *value, int64_t rows, int64_t stride, const int64_t *index, char *out,
                          int64_t count, int64_t bytes) {
    for (int64_t i = 0; i < count; i++, out += bytes)
        if (0 <= index[i] && index[i] < rows)
            memcpy(out, value + index[i] * stride, (size_t)bytes);
        else
            memset(out, 0, (size_t)bytes);
}

/* Row i of `value`, of which there are `count`, added to row index[i] of `out`, if there is one; what comes to one row
   in its order. 0, or -1 without memory. */
EXPORTED int scatter_rows(const void *value, int64_t stride, const int64_t *index, int64_t count, void *out,
                          int64_t rows, int64_t width, int dtype) {
    /* Where the places that name each row begin, and the places. */
    int64_t *starts = calloc((size_t)(rows + 2 + count), sizeof(int64_t)), *places = starts + rows + 2;
    void *scratch = scratch_of(dtype, width, 0, 0);
    if (!starts || !scratch) {
        free(starts);
        free(scratch);
        return -1;
    }
    /* A row's count is kept two entries on, its beginning one on; that moves to its end as its places come. */
    for (int64_t i = 0; i < count; i++)
        if (0 <= index[i] && index[i] < rows) starts[index[i] + 2]++;
    for (int64_t r = 0; r < rows; r++) starts[r + 2] += starts[r + 1];
    for (int64_t i = 0; i < count; i++)
        if (0 <= index[i] && index[i] < rows) places[starts[index[i] + 1]++] = i;
    switch (dtype) {
    case FLOAT32: scatter_run_float32(value, stride, starts, places, out, rows, width, scratch); break;
    case FLOAT64: scatter_run_float64(value, stride, starts, places, out, rows, width, scratch); break;
    case BFLOAT16: scatter_run_bfloat16(value, stride, starts, places, out, rows, width, scratch); break;
#ifdef __FLT16_MAX__
    case FLOAT16: scatter_run_float16(value, stride, starts, places, out, rows, width, scratch); break;
#endif
    }
    free(starts);
    free(scratch);
    return 0;
}
