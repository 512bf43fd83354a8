/* N(θ,1) by a Gaussian walk, and its stochastic derivative, written for SIMD over chains: one loop over all chains per step,
   no branches, cheap random words (xorshift, one state per chain), libm's vector functions. The limit of one core.

   The algorithm of diffmh's default: maximal reflection coupling, two-sided weights, one alternative, pruned by |weight|.
   cc -O3 -march=native -ffast-math. Returns E[x] and dE[x]/dθ. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

static inline uint32_t next(uint32_t *s) {
    uint32_t w = *s;
    w ^= w << 13;
    w ^= w >> 17;
    w ^= w << 5;
    *s = w;
    return w;
}

static inline float uniform_of(uint32_t w) { return (float)(int32_t)(w >> 8) * 0x1p-24f; }

void normal(int chains, int steps, float theta, float scale, uint64_t seed, double *averages) {
    float *x = malloc(4 * chains), *y = malloc(4 * chains), *w = malloc(4 * chains);
    float *value = malloc(4 * chains), *slope = malloc(4 * chains);
    uint32_t *state = malloc(4 * chains);
    for (int c = 0; c < chains; c++) {
        x[c] = y[c] = w[c] = value[c] = slope[c] = 0;
        uint64_t z = (seed * 1000003 + c + 1) * 0x9E3779B97F4A7C15ull;
        state[c] = (uint32_t)(z >> 32) | 1;
        for (int i = 0; i < 16; i++) next(&state[c]);
    }
    for (int t = 0; t < steps; t++) {
#pragma GCC ivdep
        for (int c = 0; c < chains; c++) {
            uint32_t s = state[c];
            float radius = sqrtf(-2.0f * logf(uniform_of(next(&s)) + 0x1p-25f));
            float z = radius * cosf(6.2831853f * uniform_of(next(&s)));
            float u = uniform_of(next(&s)), keep = uniform_of(next(&s)), prune = uniform_of(next(&s));
            state[c] = s;
            float here = x[c], other = y[c], weight = w[c];
            float proposed = here + scale * z;
            float delta = (other - here) / scale, apart = z - delta;
            float log_keep = 0.5f * (z * z - apart * apart);
            float proposed_y = logf(keep + 1e-30f) < log_keep ? proposed : other - scale * z;
            float log_r = 0.5f * ((here - theta) * (here - theta) - (proposed - theta) * (proposed - theta));
            float log_ry =
                0.5f * ((other - theta) * (other - theta) - (proposed_y - theta) * (proposed_y - theta));
            float alpha = expf(fminf(0.0f, log_r)), alpha_y = expf(fminf(0.0f, log_ry));
            int accepted = u < alpha;
            float after = accepted ? proposed : here, flipped = accepted ? here : proposed;
            float moved = u < alpha_y ? proposed_y : other;
            weight = moved == after ? 0.0f : weight;
            float gradient = log_r < 0 ? alpha * (proposed - here) : 0.0f;
            float candidate = accepted ? -gradient : gradient;
            float total = fabsf(weight) + fabsf(candidate);
            int born = prune * total < fabsf(candidate);
            y[c] = born ? flipped : moved;
            w[c] = born ? copysignf(total, candidate) : copysignf(weight != 0 ? total : 0.0f, weight);
            x[c] = after;
            value[c] += after;
            slope[c] += w[c] * (y[c] - after);
        }
    }
    double sum = 0, sum_slope = 0;
    for (int c = 0; c < chains; c++) {
        sum += value[c];
        sum_slope += slope[c];
    }
    averages[0] = sum / ((double)chains * steps);
    averages[1] = sum_slope / ((double)chains * steps);
    free(x), free(y), free(w), free(value), free(slope), free(state);
}
