/* The arithmetic for one dtype; included once for each, with
     T                how an element is stored
     A                what sums are accumulated in
     LOAD(x)          a T as an A
     STORE(a)         an A, rounded once, as a T
     VLOAD(p)         WIDE elements from p on as a vector
     VSTORE(p, v)     the reverse, rounded once
     VSINGLE(p, v)    the same to floats
     V, WIDE          the vector of A, and how many elements it has
     SQRT(a)          the square root of an A
     NAME(f)          f's name for this dtype

   Sums over a row run in LANES partial sums, element i in lane i % LANES, which are then added in pairs. So the bits
   are the same whatever the machine's vectors are, and the error grows with width / LANES instead of width. */

static A NAME(pairwise)(A *lanes) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* The partial sums of row, or with `squared` those of (row - center)^2. */
static inline __attribute__((always_inline)) A NAME(reduced)(int squared, const A *row, int64_t width, A center) {
    V wide[LANES / WIDE];
    A lanes[LANES];
    memset(wide, 0, sizeof wide);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        for (int j = 0; j < LANES / WIDE; j++) {
            V value;
            memcpy(&value, row + i + j * WIDE, sizeof value);
            wide[j] += squared ? (value - center) * (value - center) : value;
        }
    memcpy(lanes, wide, sizeof lanes);
    for (int j = 0; i + j < width; j++) {
        A value = row[i + j] - (squared ? center : 0);
        lanes[j] += squared ? value * value : value;
    }
    return NAME(pairwise)(lanes);
}

static A NAME(sum)(const A *row, int64_t width) { return NAME(reduced)(0, row, width, 0); }

static A NAME(squares)(const A *row, int64_t width, A center) { return NAME(reduced)(1, row, width, center); }

/* row = the sum of all values, in their order; `total`, which may be null or `row` itself, the same rounded. Returns
   the sum of the squares. */
static inline __attribute__((always_inline)) A NAME(sum_of)(A *row, T *total, const T *const *values,
                                                            int64_t num_values, int64_t width) {
    V wide[LANES / WIDE];
    A lanes[LANES];
    memset(wide, 0, sizeof wide);
    int store = total && (const void *)total != (const void *)row;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        V sums[LANES / WIDE];
        for (int j = 0; j < LANES / WIDE; j++) sums[j] = VLOAD(values[0] + i + j * WIDE);
        for (int64_t t = 1; t < num_values; t++)
            for (int j = 0; j < LANES / WIDE; j++) sums[j] += VLOAD(values[t] + i + j * WIDE);
        for (int j = 0; j < LANES / WIDE; j++) {
            int64_t at = i + j * WIDE;
            memcpy(row + at, &sums[j], sizeof(V));
            if (store) VSTORE(total + at, sums[j]);
            wide[j] += sums[j] * sums[j];
        }
    }
    memcpy(lanes, wide, sizeof lanes);
    for (int j = 0; i + j < width; j++) {
        int64_t at = i + j;
        A value = LOAD(values[0][at]);
        for (int64_t t = 1; t < num_values; t++) value += LOAD(values[t][at]);
        row[at] = value;
        if (store) total[at] = STORE(value);
        lanes[j] += value * value;
    }
    return NAME(pairwise)(lanes);
}

static void NAME(add)(A *restrict out, const T *restrict in, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] += LOAD(in[i]);
}

static void NAME(add_two)(A *restrict out, const T *restrict first, const T *restrict second, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = LOAD(first[i]) + LOAD(second[i]);
}

static void NAME(store)(T *restrict out, const A *restrict in, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = STORE(in[i]);
}

/* `sum_of`, with a loop of its own for each of the usual numbers of values. */
static A NAME(sum_values)(A *row, T *total, const T *const *values, int64_t num_values, int64_t width) {
    /* Copies, which stores into the row cannot change. */
    const T *few[4];
    for (int i = 0; i < 4 && i < num_values; i++) few[i] = values[i];
    switch (num_values) {
    case 1: return NAME(sum_of)(row, total, few, 1, width);
    case 2: return NAME(sum_of)(row, total, few, 2, width);
    case 3: return NAME(sum_of)(row, total, few, 3, width);
    case 4: return NAME(sum_of)(row, total, few, 4, width);
    default: return NAME(sum_of)(row, total, values, num_values, width);
    }
}

/* With `single` `out` takes floats instead of Ts. */
static inline __attribute__((always_inline)) void NAME(scaled)(int single, int centered, int has_gain, int has_bias,
                                                               void *out, const A *row, A center, A factor,
                                                               const A *gain, const A *bias, int64_t width) {
    int64_t i = 0;
    for (; i + WIDE <= width; i += WIDE) {
        V value, other;
        memcpy(&value, row + i, sizeof value);
        if (centered) value -= center;
        value *= factor;
        if (has_gain) memcpy(&other, gain + i, sizeof other), value *= other;
        if (has_bias) memcpy(&other, bias + i, sizeof other), value += other;
        if (single)
            VSINGLE((float *)out + i, value);
        else
            VSTORE((T *)out + i, value);
    }
    for (; i < width; i++) {
        A value = (centered ? row[i] - center : row[i]) * factor;
        if (has_gain) value *= gain[i];
        if (has_bias) value += bias[i];
        if (single)
            ((float *)out)[i] = (float)value;
        else
            ((T *)out)[i] = STORE(value);
    }
}

/* out = the norm of `row`, of which `squares` is the sum of the squares. */
static inline __attribute__((always_inline)) void NAME(normalize)(int single, void *out, const A *row, A squares,
                                                                  int64_t width, const norm_t *norm, const A *gain,
                                                                  const A *bias) {
    A center = 0;
    if (norm->kind == LAYER_NORM) {
        center = NAME(sum)(row, width) / (A)width;
        squares = NAME(squares)(row, width, center);
    }
    A factor = 1 / SQRT(squares / (A)width + (A)norm->eps);
    if (center != 0 || bias)
        NAME(scaled)(single, 1, gain != 0, bias != 0, out, row, center, factor, gain, bias, width);
    else if (gain)
        NAME(scaled)(single, 0, 1, 0, out, row, 0, factor, gain, 0, width);
    else
        NAME(scaled)(single, 0, 0, 0, out, row, 0, factor, 0, 0, width);
}

static void NAME(rows_run)(const rows_t *rows, const norm_t *norm, const A *gain, const A *bias, A *scratch) {
    int64_t width = rows->width, num_values = rows->num_terms + (rows->residual != 0);
    const T *values[num_values];
    float *singles = (float *)(scratch + 3 * width);
    for (int64_t r = 0; r < rows->count; r++) {
        for (int64_t t = 0; t < rows->num_terms; t++)
            values[t] = (const T *)rows->terms[t] + r * rows->term_strides[t];
        if (rows->residual) values[num_values - 1] = (const T *)rows->residual + r * rows->residual_stride;
        T *total = rows->total ? (T *)rows->total + r * width : 0;
        /* A sum that is not rounded needs no place besides its result. */
        A *row = total && sizeof(T) == sizeof(A) ? (A *)total : scratch;
        A squares = NAME(sum_values)(row, total, values, num_values, width);
        if (rows->quantized) {
            NAME(normalize)(1, singles, row, squares, width, norm, gain, bias);
            quantize(rows->quantized, r, width, singles);
        } else if (rows->normed)
            NAME(normalize)(0, (T *)rows->normed + r * width, row, squares, width, norm, gain, bias);
    }
}

/* row = the choices of one token, `apart` elements from each other, each weighed by its factor, added up in their
   order and scaled; `shared` and `residual`, which may be null, added to that. `total`, which may be null or `row`
   itself, is the same rounded. Returns the sum of the squares. */
static A NAME(weighed)(A *row, T *total, const T *first, int64_t apart, const A *factors, int64_t choices, A scaling,
                       const T *shared, const T *residual, int64_t width) {
    V wide[LANES / WIDE];
    A lanes[LANES];
    memset(wide, 0, sizeof wide);
    int store = (const void *)total != (const void *)row;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        V sums[LANES / WIDE];
        memset(sums, 0, sizeof sums);
        const T *choice = first + i;
        for (int64_t c = 0; c < choices; c++, choice += apart)
            for (int j = 0; j < LANES / WIDE; j++) sums[j] += VLOAD(choice + j * WIDE) * factors[c];
        for (int j = 0; j < LANES / WIDE; j++) {
            int64_t at = i + j * WIDE;
            V value = sums[j] * scaling;
            if (shared) value += VLOAD(shared + at);
            if (residual) value += VLOAD(residual + at);
            memcpy(row + at, &value, sizeof value);
            if (store) VSTORE(total + at, value);
            wide[j] += value * value;
        }
    }
    memcpy(lanes, wide, sizeof lanes);
    for (int j = 0; i + j < width; j++) {
        int64_t at = i + j;
        A value = 0;
        for (int64_t c = 0; c < choices; c++) value += LOAD(first[c * apart + at]) * factors[c];
        value *= scaling;
        if (shared) value += LOAD(shared[at]);
        if (residual) value += LOAD(residual[at]);
        row[at] = value;
        if (store) total[at] = STORE(value);
        lanes[j] += value * value;
    }
    return NAME(pairwise)(lanes);
}

static void NAME(finalize_run)(const finalized_t *rows, const norm_t *norm, const A *gain, const A *bias, A *scratch) {
    int64_t width = rows->width;
    A *factors = scratch + 3 * width;
    for (int64_t r = 0; r < rows->count; r++) {
        for (int64_t c = 0; c < rows->choices; c++)
            factors[c] =
                (A)element(rows->weights, rows->weights_dtype, r * rows->weights_stride + c * rows->weight_stride);
        const T *first = (const T *)rows->outputs + r * rows->outputs_stride;
        const T *shared = rows->shared ? (const T *)rows->shared + r * rows->shared_stride : 0;
        const T *residual = rows->residual ? (const T *)rows->residual + r * rows->residual_stride : 0;
        T *total = (T *)rows->total + r * width;
        A *row = sizeof(T) == sizeof(A) ? (A *)total : scratch;
        A squares = NAME(weighed)(row, total, first, rows->choice_stride, factors, rows->choices, (A)rows->scaling,
                                  shared, residual, width);
        if (rows->normed) NAME(normalize)(0, (T *)rows->normed + r * width, row, squares, width, norm, gain, bias);
    }
}

/* Row r of `out` is the sum of the rows of `value` that `places` has from starts[r] to starts[r + 1]. */
static void NAME(scatter_run)(const T *value, int64_t stride, const int64_t *starts, const int64_t *places, T *out,
                              int64_t rows, int64_t width, A *scratch) {
    for (int64_t r = 0; r < rows; r++, out += width) {
        A *row = sizeof(T) == sizeof(A) ? (A *)out : scratch;
        memset(row, 0, (size_t)width * sizeof(A));
        for (int64_t i = starts[r]; i < starts[r + 1]; i++) NAME(add)(row, value + places[i] * stride, width);
        if ((void *)row != (void *)out) NAME(store)(out, row, width);
    }
}

static void NAME(vector_sum)(const void *const *terms, int64_t num_terms, T *out, int64_t count) {
    const T *const *values = (const T *const *)terms;
    A block[BLOCK];
    for (int64_t start = 0; start < count; start += BLOCK) {
        int64_t here = count - start < BLOCK ? count - start : BLOCK;
        NAME(add_two)(block, values[0] + start, values[1] + start, here);
        for (int64_t i = 2; i < num_terms; i++) NAME(add)(block, values[i] + start, here);
        NAME(store)(out + start, block, here);
    }
}

#undef T
#undef A
#undef LOAD
#undef STORE
#undef VLOAD
#undef VSTORE
#undef VSINGLE
#undef V
#undef WIDE
#undef SQRT
#undef NAME
