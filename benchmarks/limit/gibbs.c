/* The C loop of `benchmarks/gibbs.py`: checkerboard Gibbs (heat bath) on a periodic L×L Ising lattice, with its
   stochastic derivative in T.

   The same algorithm as two `BlockGibbs` kernels in turn: per site one uniform, one alternative per chain that gets the
   same uniforms, weights ∓dp, pruning per colour in proportion to |weight|, and the energy once per sweep. One chain after
   the other, one core. */
#include "lattice.h"

void gibbs(int size, int chains, int sweeps, float temperature, uint64_t seed, double *averages) {
    int sites = size * size;
    int8_t *x = malloc(sites), *y = malloc(sites);
    float *weights = malloc(sizeof(float) * sites);
    int *where = malloc(sizeof(int) * sites);
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
                        float u = uniform_of(word(&random));
                        float log_odds = 2 * around(x, size, row, column) / temperature;
                        float p = 1 / (1 + expf(-log_odds));
                        float slope_p = -p * (1 - p) * log_odds / temperature;
                        int up = u < p;
                        x[i] = up ? 1 : -1;
                        weights[count] = up ? -slope_p : slope_p;
                        where[count] = i;
                        total += fabsf(weights[count]);
                        count++;
                        if (weight != 0) {
                            float log_odds_y = 2 * around(y, size, row, column) / temperature;
                            y[i] = u < 1 / (1 + expf(-log_odds_y)) ? 1 : -1;
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
                    y[where[pick]] = -x[where[pick]];
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
    free(x), free(y), free(weights), free(where);
}
