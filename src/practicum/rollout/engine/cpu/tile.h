/* Vectors of the width that the machine has, and the tile: the dot products of ROWS rows with COLS others.

   Its sums stay in registers, and each number that is loaded counts for as many products as the tile is wide or high. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 4
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif defined(__AVX__)
#define LANES 8
#define ROWS 2
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define LANES 4
#define ROWS 4
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif
#define COLS 4
#define TILE (ROWS * COLS)
#define NEAR_FLOATS 4096 /* of weights that are used again while they are in the nearest cache; then come the next */
#define INLINE static inline __attribute__((always_inline))

/* Without this, compilers load a value from memory again for each of its uses. */
#if defined(__x86_64__)
#define KEEP_IN_REGISTER(value) __asm__("" : "+v"(value))
#elif defined(__aarch64__)
#define KEEP_IN_REGISTER(value) __asm__("" : "+w"(value))
#else
#define KEEP_IN_REGISTER(value)
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef float unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE long least(long a, long b) { return a < b ? a : b; }

/* ---- vectors ---- */

INLINE vec load(const float *from) { return *(const unaligned *)from; }
INLINE void store(float *to, vec value) { *(unaligned *)to = value; }

INLINE vec load_some(const float *from, long num) {
    vec value = {0};
    memcpy(&value, from, num * sizeof(float));
    return value;
}

INLINE vec load_up_to(const float *from, long num) { return num >= LANES ? load(from) : load_some(from, num); }

INLINE void store_up_to(float *to, vec value, long num) {
    if (num >= LANES) store(to, value);
    else memcpy(to, &value, num * sizeof(float));
}

INLINE double total(vec value) {
    double sum = 0;
    for (int i = 0; i < LANES; i++) sum += value[i];
    return sum;
}

INLINE vec where(ints mask, vec yes, vec no) { return (vec)((mask & (ints)yes) | (~mask & (ints)no)); }

/* To a unit or two in the last place; what is no number stays so. */
INLINE vec exponential(vec x) {
    const vec zero = {0}, low = zero - 87.0f, high = zero + 88.0f;
    x = where(x < low, low, where(x > high, high, x));
    vec whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    vec rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec power = zero + 1.9875691500e-4f;
    power = power * rest + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    return power * (vec)((__builtin_convertvector(whole, ints) + 127) << 23);
}

/* ---- products ---- */

INLINE void add_products(vec *sums, const float *const *x, const float *const *w, long ahead, long at, long num) {
    vec columns[COLS];
#pragma GCC unroll 4
    for (int c = 0; c < COLS; c++) {
        columns[c] = load_up_to(w[c] + at, num);
        __builtin_prefetch(w[c] + at + ahead, 0, 2); /* without it, weights come at half the memory's pace */
        KEEP_IN_REGISTER(columns[c]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
        vec row = load_up_to(x[r] + at, num);
        KEEP_IN_REGISTER(row);
#pragma GCC unroll 4
        for (int c = 0; c < COLS; c++) sums[r * COLS + c] += row * columns[c];
    }
}

/* out [ROWS, COLS]: each of the rows with each of the columns. The columns that come later are so far ahead. */
INLINE void tile_of(const float *const *x, const float *const *w, long width, long ahead, float *out) {
    vec sums[TILE] = {0};
    long at = 0;
    for (; at + LANES <= width; at += LANES) add_products(sums, x, w, ahead, at, LANES);
    if (at < width) add_products(sums, x, w, ahead, at, width - at);
    int num = TILE;
#pragma GCC unroll 4
    for (int lanes = LANES; lanes > 1; lanes /= 2, num /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < num; i += 2)
            sums[i / 2] = __builtin_shufflevector(sums[i], sums[i + 1], EVEN) +
                          __builtin_shufflevector(sums[i], sums[i + 1], ODD);
#pragma GCC unroll 4
    for (int i = 0; i < TILE / LANES; i++) store(out + i * LANES, sums[i]);
}

INLINE void tile(const float *const *x, const float *const *w, long width, float *out) {
    tile_of(x, w, width, NEAR_FLOATS, out);
}
