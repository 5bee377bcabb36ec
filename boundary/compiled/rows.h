/* Rows of numbers: their sum, and the norm of the sum. See rows.c. */
#ifndef BOUNDARY_ROWS_H
#define BOUNDARY_ROWS_H

#include <stdint.h>

/* The library exports what has this; all else stays inside. */
#define EXPORTED __attribute__((visibility("default")))

enum dtype { FLOAT32, BFLOAT16, FLOAT16, FLOAT64 };
enum norm_kind { NO_NORM, RMS_NORM, LAYER_NORM };

/* A norm over rows of a width. `weight` and `bias` may be null; the gain is `offset + weight`. */
typedef struct {
    int32_t kind;
    int32_t weight_dtype;
    const void *weight;
    const void *bias;
    double eps;
    double offset;
} norm_t;

/* What norms are made into instead, one byte an element: the integers or the float8_e4m3fn from `low` to `high`.
   `scales` gets a scale of each row, at least `floor`, or without it `scale` is that of all. */
typedef struct {
    uint8_t *rows;
    float *scales;
    int32_t to_integers;
    float scale, low, high, floor;
} quantized_t;

/* `count` rows of `width` elements each, `strides` counted in elements. What is to be summed are `num_terms` values
   and, last, `residual`, which may be null; `total` and `normed` are contiguous, and either may be null. With
   `quantized`, which has as many rows, the norm goes there and not to `normed`. */
typedef struct {
    int64_t count;
    int64_t width;
    const void *const *terms;
    const int64_t *term_strides;
    int64_t num_terms;
    const void *residual;
    int64_t residual_stride;
    void *total;
    void *normed;
    const quantized_t *quantized;
} rows_t;

int dtype_size(int dtype);

/* Sum, round and normalize. `scratch` is what rows_scratch returned for the same dtype, width and norm; `norm` may be
   null where `normed` and `quantized` are. */
void rows_run(const rows_t *rows, int dtype, const norm_t *norm, void *scratch);

/* Memory for rows_run, with the gain and the bias laid out in it; free() it. Null if there is none. */
void *rows_scratch(int dtype, int64_t width, const norm_t *norm);

/* The sum of `num_terms` vectors of `count` elements, rounded once. */
void vector_sum(const void *const *terms, int64_t num_terms, void *total, int64_t count, int dtype);

#endif
