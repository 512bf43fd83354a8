"""The paper's mixture: for which observation is its component most uncertain?

make example
"""

import time

import jax
import jax.numpy as jnp

import diffmh

means = jnp.array([-2.5, 2.0, 5.0])


def log_density(h, j):
    """The log posterior of component j given the observation h, unnormalised."""
    return -0.5 * ((h - means[j]) / 4.0) ** 2


def plain_chain(h, key):
    """Metropolis–Hastings in plain JAX: the fraction of steps in component 1."""

    def step(j, key):
        key_propose, key_accept = jax.random.split(key)
        proposed = (j + jax.random.randint(key_propose, (), 1, 3)) % 3
        accept = jnp.log(jax.random.uniform(key_accept)) < log_density(h, proposed) - log_density(
            h, j
        )
        j = jnp.where(accept, proposed, j)
        return j, (j == 0).astype(float)

    return jax.lax.scan(step, 0, jax.random.split(key, 5_000))[1].mean()


def exact_entropy(h):
    p = jax.nn.softmax(-0.5 * ((h - means) / 4.0) ** 2)
    return -jnp.sum(p * jnp.log(p))


sampler = diffmh.MetropolisHastings(log_density, diffmh.OtherState(3))
probabilities = diffmh.expectation(
    lambda h, j: jax.nn.one_hot(j, 3), sampler, init=0, num_samples=5_000, burn_in=50, num_chains=16
)
entropy = diffmh.compose(lambda h, p: -jnp.sum(p * jnp.log(p)), probabilities)


def by_estimator(h, key):
    """The variance of one chain's derivative of P(component 1), relative to the default
    estimator.
    """
    estimators = {
        "StochasticDerivative()": diffmh.StochasticDerivative(),
        "StochasticDerivative(alternatives=1)": diffmh.StochasticDerivative(alternatives=1),
        "StochasticDerivative(weights='one-sided')": diffmh.StochasticDerivative(
            weights="one-sided"
        ),
        "Covariance()": diffmh.Covariance(),
        "Score()": diffmh.Score(),
    }
    variances = {}
    for name, estimator in estimators.items():
        occupancy = diffmh.expectation(
            lambda h, j: j == 0,
            sampler,
            init=0,
            num_samples=1_000,
            burn_in=50,
            num_chains=1_024,
            estimator=estimator,
        )
        variances[name] = jnp.var(jax.jacfwd(occupancy.per_chain)(h, key))
    return {
        name: variance / variances["StochasticDerivative()"] for name, variance in variances.items()
    }


def plug_in(h, key):
    """The derivative of the entropy with both factors of the chain rule from one chain of 50
    samples, averaged over many chains.
    """
    short = diffmh.expectation(
        lambda h, j: jax.nn.one_hot(j, 3),
        sampler,
        init=0,
        num_samples=50,
        burn_in=50,
        num_chains=50_000,
        estimator=diffmh.StochasticDerivative(weights="one-sided"),
    )
    p, slope = jax.jvp(lambda h: short.per_chain(h, key), (h,), (1.0,))
    seen = jnp.all(p > 0, axis=1)  # the entropy has no derivative if a component was never visited
    return jnp.sum(
        jnp.where(seen, -jnp.sum(jnp.log(jnp.where(p > 0, p, 1.0)) * slope, axis=1), 0.0)
    ) / jnp.sum(seen)


def main():
    h, key = 0.4, jax.random.key(0)
    exact_p = lambda h: jax.nn.softmax(-0.5 * ((h - means) / 4.0) ** 2)
    print(f"P(component 1 | h = {h}) and its derivative")
    value, gradient = jax.value_and_grad(plain_chain)(h, key)
    print(f"  a plain chain, jax.grad      {value:.4f}   {gradient:.4f}")
    report = probabilities.run(h, key)
    value, error = report.value[0], report.value_error[0]
    print(
        f"  diffmh                       {value:.4f} ± {error:.4f}   {report.gradient[0]:.4f} ±"
        f" {report.gradient_error[0]:.4f}"
    )
    print(f"  exact                        {exact_p(h)[0]:.4f}   {jax.jacobian(exact_p)(h)[0]:.4f}")
    print(f"\nAll three components\n{report}")
    print(f"\nPosterior entropy, through `diffmh.compose`\n{entropy.run(h, key)}")
    print(f"exact    {exact_entropy(h):.5f}, gradient {jax.grad(exact_entropy)(h):.5f}")

    biased, exact = plug_in(h, key), jax.grad(exact_entropy)(h)
    print(
        f"The same from one chain of 50 samples at a time, plugged in: {biased:.4f} on average,"
        f" {biased / exact - 1:+.0%}"
    )

    print(
        "\nVariance of one chain's derivative of P(component 1), N = 1000, relative to the"
        " default's"
    )
    for name, ratio in by_estimator(h, key).items():
        print(f"  {name:<44}{ratio:10.3g}")

    began, h = time.perf_counter(), 8.0
    ascend = jax.jit(jax.grad(entropy))
    for iteration in range(60):
        h = h + 10.0 * ascend(h, jax.random.fold_in(key, iteration))
    best = jnp.linspace(-14, 14, 28_001)
    best = best[jnp.argmax(jax.vmap(exact_entropy)(best))]
    seconds = time.perf_counter() - began
    print(
        f"\nThe most ambiguous observation, by 60 steps of gradient ascent from 8: {h:.2f} (exact"
        f" {best:.2f}), in {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
