"""Cost and errors of long runs: `python benchmarks/long_runs.py [cost] [until] [draws] [nuts]`.

cost   the progress bar and checkpoints at their default spacing, as fractions of the run time
until  over 200 runs, how often the true gradient is within the requested error of the estimate
draws  how often the intervals of `from_draws` contain the truth, for autocorrelated draws
nuts   `from_draws` on NumPyro's NUTS draws of eight schools, compared with our own chains
"""

from __future__ import annotations

import io
import pathlib
import sys
import tempfile
import time

import jax
import numpy as np

import diffmh
from diffmh.core.execute import loop_of
from diffmh.models import gaussian, mixture
from diffmh.runs import rounds
from diffmh.runs.progress import Bar

compiled = sys.modules["diffmh.core.compiled"]
KEY = jax.random.key(0)


class Screen(io.StringIO):
    def isatty(self):
        return True


def stretch_overhead(mean: diffmh.Expectation) -> float:
    """Seconds for a stretch without blocks and its bar, the minimum of many. Comparing two complete
    runs would not work: on a shared machine their times vary by more than the overhead.
    """
    admitted, theta, key, args = mean._admit(0.5, KEY, ())
    loop = loop_of(admitted.admission.plan, theta, key, args, diagnose=True)
    begin, nowhere = compiled._unbegun(loop), jax.numpy.int32(1)
    best = float("inf")
    screen, sys.stderr = sys.stderr, Screen()
    with Bar("run", 10**6, True) as bar:
        for i in range(100):
            began = time.perf_counter()
            jax.block_until_ready(compiled._advance(loop, begin, nowhere, nowhere))
            bar.reached(i)
            best = min(best, time.perf_counter() - began)
    sys.stderr = screen
    return best


def cost() -> None:
    f = lambda theta, x: (x, x**2)
    length = {"num_samples": 200_000, "num_chains": 64}
    mean = diffmh.expectation(f, gaussian.sampler(), init=0.0, **length)
    mean.run(0.5, KEY)
    between, shortest = stretch_overhead(mean), rounds._STRETCH
    print(
        f"between two stretches of at least {shortest} s: {1e3 * between:.2f} ms for the call and"
        f" the bar, {100 * between / shortest:.2f} %   (bar: < 1 %)"
    )

    saves: list[float] = []
    with tempfile.TemporaryDirectory() as parent:
        from diffmh.runs.checkpoint import Store

        save = Store.save

        def timed(store, *given):
            began = time.monotonic()
            save(store, *given)
            saves.append(time.monotonic() - began)

        Store.save = timed
        try:
            place = diffmh.Checkpoint(pathlib.Path(parent) / "c", seconds=0.5)
            mean.run(0.5, KEY, checkpoint=place)
        finally:
            Store.save = save
    middle, most = np.median(saves), max(saves)
    spacing = diffmh.Checkpoint("c").seconds
    print(
        f"a checkpoint takes {middle:.2f} s (median of {len(saves)}, at most {most:.2f} s), one"
        f" every {spacing:.0f} s: {100 * middle / spacing:.2f} % (at most"
        f" {100 * most / spacing:.2f} %)   (bar: < 3 %)"
    )


def until(num_runs: int = 200) -> None:
    chain = {"init": 0, "num_samples": 20, "num_chains": 16}
    p = diffmh.expectation(mixture.indicator, mixture.sampler(), **chain)
    normal = diffmh.expectation(
        lambda theta, x: x,
        gaussian.sampler(),
        init=lambda key: 0.5 + jax.random.normal(key),
        num_samples=2_000,
        burn_in=200,
        num_chains=16,
    )
    occupancy = np.array([-0.081439, 0.021855, 0.059584])
    problems = [
        ("mixture, N = 20", p, 0.4, occupancy, 0.1),
        ("N(θ, 1), N = 2,000", normal, 0.5, np.array([1.0]), 0.02),
    ]
    for name, expectation, theta, exact, asked in problems:
        inside, counts = [], []
        for seed in range(num_runs):
            report = expectation.run(theta, jax.random.key(seed), until=asked)
            gradient = np.ravel(report.gradient)
            inside.append(np.abs(gradient - exact) <= asked * np.abs(gradient).max())
            counts.append(report.num_chains // 16)
        shares = ", ".join(f"{100 * share:.1f} %" for share in np.mean(inside, axis=0))
        print(
            f"until={asked}, {name}: within the asked error {shares} of {num_runs} runs,"
            f" {np.mean(counts):.1f} rounds on average   (bar: ≥ 93 %)",
            flush=True,
        )


def draws(num_runs: int = 200, rho: float = 0.9) -> None:
    """x ~ N(θ, 2), y = 1.3 ~ N(x, 1); 4 chains of 2,000 draws with autocorrelation ρ."""
    variance = 1 / (1 / 2 + 1)
    mean, slope = variance * (0.4 / 2 + 1.3), variance / 2
    keys = jax.random.split(KEY, 2)
    step = lambda x, noise: (rho * x + (1 - rho**2) ** 0.5 * noise,) * 2
    noise = jax.random.normal(keys[1], (2_000, num_runs, 4))
    _, paths = jax.lax.scan(step, jax.random.normal(keys[0], (num_runs, 4)), noise)
    f = lambda theta, x: x
    log_density = lambda theta, x: -0.5 * (x - theta) ** 2 / 2
    held = []
    for path in np.moveaxis(np.asarray(paths), 0, -1):
        report = diffmh.from_draws(f, log_density, mean + variance**0.5 * path).run(0.4)
        ends = report.interval(0.95)
        held.append([low <= exact <= high for (low, high), exact in zip(ends, (mean, slope))])  # noqa: B905
    value, derivative = 100 * np.mean(held, axis=0)
    print(
        f"from_draws, conjugate model, ρ = {rho}: 95 % intervals of value and derivative held in"
        f" {value:.1f} % and {derivative:.1f} % of {num_runs} runs",
        flush=True,
    )


def nuts() -> None:
    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests"))
    import eight_schools
    import jax.numpy as jnp
    import numpyro

    kernel = numpyro.infer.NUTS(eight_schools.model, target_accept_prob=0.9)
    options = {"chain_method": "vectorized", "progress_bar": False}
    mcmc = numpyro.infer.MCMC(kernel, num_warmup=500, num_samples=2_000, num_chains=4, **options)
    mcmc.run(KEY)
    draws = mcmc.get_samples(group_by_chain=True)
    f = lambda theta, x: {"mu": x["mu"], "tau": x["tau"]}
    theirs = diffmh.from_draws(f, eight_schools.log_prior, draws).run(eight_schools.THETA)
    print(f"NUTS and from_draws:\n{theirs}")
    scale = {"mu": 3.0, "log_tau": 0.8, "eta": jnp.full(8, 0.45)}
    walk = diffmh.MetropolisHastings(eight_schools.log_density, diffmh.GaussianWalk(scale))
    f = lambda theta, x: {"mu": x["mu"], "tau": jnp.exp(x["log_tau"])}
    length = {"num_samples": 20_000, "burn_in": 2_000, "num_chains": 32}
    estimators = (diffmh.Covariance(), diffmh.StochasticDerivative(alternatives=8))
    for estimator in estimators:
        ours = diffmh.expectation(
            f, walk, init=eight_schools.START, estimator=estimator, **length
        ).run(eight_schools.THETA, KEY)
        flat = lambda tree: np.array([float(leaf) for leaf in jax.tree.leaves(tree)])
        wrong = np.hypot(flat(theirs.gradient_error), flat(ours.gradient_error))
        z = (flat(theirs.gradient) - flat(ours.gradient)) / wrong
        print(f"our own chains, {estimator}:\n{ours}")
        print(f"z of the gradient's entries: {np.round(z, 2)}   (bar: |z| < 4)", flush=True)


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["cost", "until", "draws", "nuts"]
    for name in chosen:
        {"cost": cost, "until": until, "draws": draws, "nuts": nuts}[name]()
