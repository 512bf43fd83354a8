/* Random words and the energy of a periodic lattice of spins, for the C loops beside it. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct {
    uint64_t s;
} Random;

static uint32_t word(Random *random) { /* xorshift64*, Vigna 2016 */
    uint64_t s = random->s;
    s ^= s >> 12;
    s ^= s << 25;
    s ^= s >> 27;
    random->s = s;
    return (uint32_t)((s * 2685821657736338717ull) >> 32);
}

static float uniform_of(uint32_t w) { return (float)(w >> 8) * 0x1p-24f; }

static int around(const int8_t *x, int size, int row, int column) {
    int up = row ? row - 1 : size - 1, down = row + 1 < size ? row + 1 : 0;
    int left = column ? column - 1 : size - 1, right = column + 1 < size ? column + 1 : 0;
    return x[up * size + column] + x[down * size + column] + x[row * size + left] + x[row * size + right];
}

static int energy(const int8_t *x, int size) {
    int total = 0;
    for (int row = 0; row < size; row++)
        for (int column = 0; column < size; column++) {
            int down = row + 1 < size ? row + 1 : 0, right = column + 1 < size ? column + 1 : 0;
            total -= x[row * size + column] * (x[down * size + column] + x[row * size + right]);
        }
    return total;
}

/* Fills averages[0], averages[1] with E[H] and dE[H]/dT, averaged over chains and sweeps from a cold start. */
