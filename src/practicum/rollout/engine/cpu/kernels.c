/* What the native engine does most on a CPU, in float32, for the few rows of a decoding step. See kernels.py.

   Weights lie as torch has them, one row for each output. Libraries rearrange such a matrix before they multiply with it,
   which for few rows takes as long as the product. Here a product is made of dot products along the rows as they are, a
   tile of them at a time: see tile.h. A row's result never depends on other rows. */

#include "tile.h"

#define BLOCK 64 /* tokens, as in kernels.py */

int omp_get_thread_num(void); /* not from omp.h, which not every compiler brings */

/* Rows of x, or those that `index` names: several entries in a row of it may stand for one. */
typedef struct {
    const float *x;
    const int64_t *index;
    long each;
    long width;
} Rows;

/* Where fewer than ROWS are left, the first stands in for the others: their results are dropped. */
INLINE long choose_rows(const float **chosen, Rows rows, long first, long end) {
    long num = least(ROWS, end - first);
    for (int i = 0; i < ROWS; i++) {
        long at = first + (i < num ? i : 0);
        chosen[i] = rows.x + (rows.index ? rows.index[at] / rows.each : at) * rows.width;
    }
    return num;
}

INLINE long choose_columns(const float **chosen, const float *w, long width, long first, long end) {
    long num = least(COLS, end - first);
    for (int i = 0; i < COLS; i++) chosen[i] = w + (first + (i < num ? i : 0)) * width;
    return num;
}

INLINE long columns_near(long width) {
    long num = NEAR_FLOATS / width / COLS * COLS;
    return num < COLS ? COLS : num;
}

/* The part of all columns that falls to a thread. */
INLINE void share(long num, int thread, int threads, long *first, long *end) {
    long blocks = (num + COLS - 1) / COLS;
    *first = least(num, blocks * thread / threads * COLS);
    *end = least(num, blocks * (thread + 1) / threads * COLS);
}

/* silu(rows x gate) * (rows x up), for some of the rows and the columns. */
static void gated_part(Rows rows, long first_row, long end_row, const float *gate, const float *up, float *out,
                       long inner, long first, long end) {
    long near = columns_near(2 * rows.width);
    for (long block = first; block < end; block += near) {
        long stop = least(end, block + near);
        for (long r = first_row; r < end_row; r += ROWS) {
            const float *x[ROWS], *w[COLS];
            long num_rows = choose_rows(x, rows, r, end_row);
            for (long c = block; c < stop; c += COLS) {
                float gates[TILE], ups[TILE];
                long num = choose_columns(w, gate, rows.width, c, stop);
                tile(x, w, rows.width, gates);
                choose_columns(w, up, rows.width, c, stop);
                tile(x, w, rows.width, ups);
                for (int i = 0; i < TILE; i += LANES) {
                    vec own = load(gates + i);
                    store(gates + i, own / (1.0f + exponential(-own)) * load(ups + i));
                }
                for (long i = 0; i < num_rows; i++)
                    memcpy(out + (r + i) * inner + c, gates + i * COLS, num * sizeof(float));
            }
        }
    }
}

/* rows x w + bias, for some of the columns; a row of the result is so many numbers long. */
static void linear_part(Rows rows, long num_rows, const float *w, const float *bias, float *out, long out_row,
                        long first, long end) {
    long near = columns_near(rows.width);
    for (long block = first; block < end; block += near) {
        long stop = least(end, block + near);
        for (long r = 0; r < num_rows; r += ROWS) {
            const float *x[ROWS], *columns[COLS];
            long own_rows = choose_rows(x, rows, r, num_rows);
            for (long c = block; c < stop; c += COLS) {
                float sums[TILE];
                long own = choose_columns(columns, w, rows.width, c, stop);
                tile(x, columns, rows.width, sums);
                for (long i = 0; i < own_rows; i++)
                    for (long j = 0; j < own; j++)
                        out[(r + i) * out_row + c + j] = sums[i * COLS + j] + (bias ? bias[c + j] : 0.0f);
            }
        }
    }
}

/* out [rows, num] = x [rows, width] x w [num, width] + bias [num] */
void linear(const float *x, const float *w, const float *bias, float *out, long num_rows, long width, long num,
            int threads) {
    Rows rows = {x, 0, 1, width};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; thread++) {
        long first, end;
        share(num, thread, threads, &first, &end);
        linear_part(rows, num_rows, w, bias, out, num, first, end);
    }
}

/* out [rows, inner] = silu(x x gate) * (x x up), both [inner, width] */
void gated(const float *x, const float *gate, const float *up, float *out, long num_rows, long width, long inner,
           int threads) {
    Rows rows = {x, 0, 1, width};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; thread++) {
        long first, end;
        share(inner, thread, threads, &first, &end);
        gated_part(rows, 0, num_rows, gate, up, out, inner, first, end);
    }
}

/* Experts. `order` has room for tokens * each + num_experts + 1, `hidden` for [tokens * each, inner]. */

INLINE void sort_by_expert(const int64_t *chosen, long num, long num_experts, int64_t *order, int64_t *starts) {
    memset(starts, 0, (num_experts + 1) * sizeof(int64_t));
    for (long i = 0; i < num; i++) starts[chosen[i] + 1]++;
    for (long e = 0; e < num_experts; e++) starts[e + 1] += starts[e];
    for (long i = 0; i < num; i++) order[starts[chosen[i]]++] = i;
    for (long e = num_experts; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;
}

static void down_part(Rows rows, const int64_t *order, const float *shares, long first_row, long end_row, const float *w,
                      float *out, long num, long first, long end) {
    long near = columns_near(rows.width);
    for (long block = first; block < end; block += near) {
        long stop = least(end, block + near);
        for (long r = first_row; r < end_row; r += ROWS) {
            const float *x[ROWS], *columns[COLS];
            long own_rows = choose_rows(x, rows, r, end_row);
            for (long c = block; c < stop; c += COLS) {
                float sums[TILE];
                long own = choose_columns(columns, w, rows.width, c, stop);
                tile(x, columns, rows.width, sums);
                for (long i = 0; i < own_rows; i++) {
                    long sent = order[r + i];
                    for (long j = 0; j < own; j++) out[sent * num + c + j] = sums[i * COLS + j] * shares[sent];
                }
            }
        }
    }
}

void experts(const float *x, const int64_t *chosen, const float *shares, const float *gate_up, const float *down,
             int64_t *order, float *hidden, float *parts, float *out, long tokens, long each, long num_experts,
             long width, long inner, int threads) {
    int64_t *starts = order + tokens * each;
    sort_by_expert(chosen, tokens * each, num_experts, order, starts);
    Rows sent = {x, order, each, width}, between = {hidden, 0, 1, inner};
#pragma omp parallel num_threads(threads)
    {
        long first, end;
#pragma omp for schedule(static)
        for (int thread = 0; thread < threads; thread++) {
            share(inner, thread, threads, &first, &end);
            for (long e = 0; e < num_experts; e++) {
                const float *gate = gate_up + e * 2 * inner * width;
                gated_part(sent, starts[e], starts[e + 1], gate, gate + inner * width, hidden, inner, first, end);
            }
        }
#pragma omp for schedule(static)
        for (int thread = 0; thread < threads; thread++) {
            share(width, thread, threads, &first, &end);
            for (long e = 0; e < num_experts; e++)
                down_part(between, order, shares, starts[e], starts[e + 1], down + e * width * inner, parts, width,
                          first, end);
            for (long t = 0; t < tokens; t++)
                for (long c = first; c < end; c++) {
                    float sum = 0;
                    for (long i = 0; i < each; i++) sum += parts[(t * each + i) * width + c];
                    out[t * width + c] = sum;
                }
        }
    }
}

/* ---- norms ---- */

INLINE void norm_row(const float *x, const float *w, float *out, long width, float eps) {
    vec squares = {0};
    for (long i = 0; i < width; i += LANES) {
        vec own = load_up_to(x + i, width - i);
        squares += own * own;
    }
    float scale = 1.0 / sqrt(total(squares) / width + eps);
    for (long i = 0; i < width; i += LANES)
        store_up_to(out + i, load_up_to(x + i, width - i) * scale * load_up_to(w + i, width - i), width - i);
}

/* out = x / sqrt(mean(x * x) + eps) * w, for each row of width numbers */
void rms_norm(const float *x, const float *w, float *out, long num_rows, long width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (num_rows * width > 65536)
    for (long r = 0; r < num_rows; r++) norm_row(x + r * width, w, out + r * width, width, eps);
}

/* ---- attention ---- */

INLINE void softmax(float *scores, long num) {
    float most = -INFINITY;
    double sum = 0;
    for (long i = 0; i < num; i++) most = scores[i] > most ? scores[i] : most;
    vec sums = {0};
    long i = 0;
    for (; i + LANES <= num; i += LANES) {
        vec own = exponential(load(scores + i) - most);
        store(scores + i, own);
        sums += own;
    }
    for (; i < num; i++) sum += scores[i] = expf(scores[i] - most);
    sum += total(sums);
    float scale = 1.0 / sum;
    for (long j = 0; j < num; j++) scores[j] *= scale;
}

/* Keys and values lie in blocks [*, heads, BLOCK, width]. A place is the number of a block times BLOCK, and where in it;
   the table of a row says in which blocks its tokens are. What is returned is in units of width. */
INLINE long at_place(uint64_t place, long head, long heads) {
    return (place / BLOCK * heads + head) * BLOCK + place % BLOCK;
}

INLINE long at_token(const int64_t *table, uint64_t token, long head, long heads) {
    return at_place(table[token / BLOCK] * BLOCK + token % BLOCK, head, heads);
}

/* How many of the next tokens lie one after the other. */
INLINE long run_from(uint64_t token, long num) { return least(num, BLOCK - token % BLOCK); }

/* out [width]: the values of tokens from `first` on, weighed. */
INLINE void weigh(const float *weights, const float *values, const int64_t *table, long head, long heads, long first,
                  long num, long width, float *out) {
    for (long at = 0; at < width; at += 4 * LANES) {
        vec sums[4] = {0};
        for (long done = 0, run; done < num; done += run) {
            run = run_from(first + done, num - done);
            const float *own = values + at_token(table, first + done, head, heads) * width + at;
            if (at + 4 * LANES <= width) {
                for (long i = 0; i < run; i++)
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++) sums[j] += weights[done + i] * load(own + i * width + j * LANES);
            } else {
                for (long i = 0; i < run; i++)
                    for (int j = 0; at + j * LANES < width; j++)
                        sums[j] += weights[done + i] * load_up_to(own + i * width + j * LANES, width - at - j * LANES);
            }
        }
        for (int j = 0; j < 4 && at + j * LANES < width; j++)
            store_up_to(out + at + j * LANES, sums[j], width - at - j * LANES);
    }
}

/* The new key or value [rows, heads, width] of each row to its place in the blocks. */
void keep(const float *given, const int64_t *places, float *kept, long num_rows, long heads, long width) {
    for (long i = 0; i < num_rows * heads; i++)
        memcpy(kept + at_place(places[i / heads], i % heads, heads) * width, given + i * width, width * sizeof(float));
}

/* The first `turned` numbers, a half with the other half, by the angles of a position. */
INLINE void rotate(float *x, const float *cosines, const float *sines, long turned) {
    long half = turned / 2;
    for (long i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = b * cosines[i + half] + a * sines[i + half];
    }
}

typedef struct {
    const float *weight, *bias, *norm; /* [heads * width, *], [heads * width] or none, [width] or none */
    long heads;
} Projection;

/* What comes before attention in a step: query [rows, heads, width], normed and rotated, and keys and values to their
   places. x is [rows, hidden], cosines and sines [rows, turned]; between has room for [2 * key heads, rows, width]. */
void project(const float *x, const Projection *projections, const float *cosines, const float *sines,
             const int64_t *places, float *query, float *keys, float *values, float *between, long num_rows,
             long hidden, long width, long turned, float eps, int threads) {
    Rows rows = {x, 0, 1, hidden};
    long heads = projections[0].heads, key_heads = projections[1].heads;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (long task = 0; task < heads + 2 * key_heads; task++) {
        int kind = task < heads ? 0 : task < heads + key_heads ? 1 : 2;
        long head = kind == 0 ? task : (task - heads) % key_heads;
        Projection own = projections[kind];
        float *out = kind == 0 ? query + head * width : between + (task - heads) * num_rows * width;
        long out_row = kind == 0 ? heads * width : width;
        linear_part(rows, num_rows, own.weight + head * width * hidden, own.bias ? own.bias + head * width : 0, out,
                    out_row, 0, width);
        for (long r = 0; r < num_rows; r++) {
            float *row = out + r * out_row;
            if (own.norm) norm_row(row, own.norm, row, width, eps);
            if (kind < 2) rotate(row, cosines + r * turned, sines + r * turned, turned);
            if (kind > 0)
                memcpy((kind == 1 ? keys : values) + at_place(places[r], head, key_heads) * width, row,
                       width * sizeof(float));
        }
    }
}

/* Of one token for each row to those up to its position, from the last `window` of them if that is not 0.

   query [rows, heads, width], keys and values in blocks, tables [rows, table_row]; scores has room for
   [threads, heads / key_heads, longest]. */
void attend(const float *query, const float *keys, const float *values, const int64_t *tables, const int64_t *positions,
            float *scores, float *out, long num_rows, long heads, long key_heads, long width, long value_width,
            long table_row, long longest, long window, float scaling, int threads) {
    long group = heads / key_heads;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
    for (long task = 0; task < num_rows * key_heads; task++) {
        long row = task / key_heads, head = task % key_heads, end = positions[row] + 1;
        long first = window && end > window ? end - window : 0, num = end - first;
        const int64_t *table = tables + row * table_row;
        float *own = scores + omp_get_thread_num() * group * longest;
        Rows queries = {query + task * group * width, 0, 1, width};
        for (long q = 0; q < group; q += ROWS)
            for (long done = 0, run; done < num; done += run) {
                run = run_from(first + done, num - done);
                const float *block = keys + at_token(table, first + done, head, key_heads) * width;
                long next = least(first + done + BLOCK, end - 1);
                long ahead = keys + at_token(table, next, head, key_heads) * width - block;
                for (long k = 0; k < run; k += COLS) {
                    const float *x[ROWS], *columns[COLS];
                    float sums[TILE];
                    long num_queries = choose_rows(x, queries, q, group);
                    long num_keys = choose_columns(columns, block, width, k, run);
                    tile_of(x, columns, width, ahead, sums);
                    for (long i = 0; i < num_queries; i++)
                        for (long j = 0; j < num_keys; j++)
                            own[(q + i) * longest + done + k + j] = sums[i * COLS + j] * scaling;
                }
            }
        for (long q = 0; q < group; q++) {
            softmax(own + q * longest, num);
            weigh(own + q * longest, values, table, head, key_heads, first, num, value_width,
                  out + (task * group + q) * value_width);
        }
    }
}
