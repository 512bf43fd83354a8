/* The afternoon's C loop: checkerboard Metropolis on a periodic L×L Ising lattice, with its stochastic derivative in T.

   The same algorithm as diffmh.models.ising: per site one random word (the proposed spin, and the accept uniform), one
   alternative per chain that gets the same words, two-sided weights, pruning per half-sweep in proportion to |weight|, and
   the energy once per sweep. One chain after the other, one core. Prints E and dE/dT. */
#include "lattice.h"

void ising(int size, int chains, int sweeps, float temperature, uint64_t seed, double *averages) {
    int sites = size * size;
    int8_t *x = malloc(sites), *y = malloc(sites);
    float *weights = malloc(sizeof(float) * sites);
    int *where = malloc(sizeof(int) * sites);
    int8_t *other = malloc(sites);
    double value = 0, slope = 0;
    Random random = {seed * 0x9E3779B97F4A7C15ull + 1};
    for (int chain = 0; chain < chains; chain++) {
        for (int i = 0; i < sites; i++) x[i] = y[i] = 1;
        float weight = 0;
        for (int sweep = 0; sweep < sweeps; sweep++) {
            for (int colour = 0; colour < 2; colour++) {
                float total = 0;
                int count = 0;
                for (int row = 0; row < size; row++)
                    for (int column = (row + colour) & 1; column < size; column += 2) {
                        int i = row * size + column;
                        uint32_t w = word(&random);
                        int8_t proposed = (w & 1) ? 1 : -1;
                        float u = uniform_of(w);
                        float log_ratio = (proposed - x[i]) * around(x, size, row, column) / temperature;
                        float alpha = log_ratio < 0 ? expf(log_ratio) : 1.0f;
                        float share = log_ratio < 0 ? 1.0f : log_ratio == 0 ? 0.5f : 0.0f;
                        float slope_alpha = -share * alpha * log_ratio / temperature;
                        int accepted = u < alpha;
                        other[count] = accepted ? x[i] : proposed;
                        if (accepted) x[i] = proposed;
                        weights[count] = accepted ? -slope_alpha : slope_alpha;
                        where[count] = i;
                        total += fabsf(weights[count]);
                        count++;
                        if (weight != 0) {
                            float log_ratio_y = (proposed - y[i]) * around(y, size, row, column) / temperature;
                            float alpha_y = log_ratio_y < 0 ? expf(log_ratio_y) : 1.0f;
                            if (u < alpha_y) y[i] = proposed;
                        }
                    }
                if (weight != 0) {
                    int met = 1;
                    for (int i = 0; i < sites; i++) met &= x[i] == y[i];
                    if (met) weight = 0;
                }
                float old = fabsf(weight), position = uniform_of(word(&random)) * (total + old);
                if (total > 0 && (position < total || old == 0)) {
                    int pick = 0;
                    float cumulative = fabsf(weights[0]);
                    while (cumulative <= position && pick + 1 < count) cumulative += fabsf(weights[++pick]);
                    for (int i = 0; i < sites; i++) y[i] = x[i];
                    y[where[pick]] = other[pick];
                    weight = weights[pick] > 0 ? total + old : -(total + old);
                } else if (old > 0) {
                    weight *= (total + old) / old;
                }
            }
            int here = energy(x, size);
            value += here;
            if (weight != 0) slope += weight * (double)(energy(y, size) - here);
        }
    }
    averages[0] = value / chains / sweeps;
    averages[1] = slope / chains / sweeps;
    free(x), free(y), free(weights), free(where), free(other);
}
