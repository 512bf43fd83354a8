"""The cases that `tests/test_sharding.py` runs with some number of devices: numbers by name, as
JSON. With the argument `mistake`, chains that get their keys from their device.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import diffmh
from diffmh import sad
from diffmh.core.plan import Plan

MESH = jax.make_mesh((jax.device_count(),), ("chains",))
KEY = jax.random.key(0)


def start(key):
    return jax.random.normal(key)


KERNEL = diffmh.MetropolisHastings(
    lambda theta, x, scale: -0.5 * ((x - theta) / scale) ** 2, diffmh.GaussianWalk(2.38)
)
MEAN = diffmh.expectation(
    lambda theta, x, scale: jnp.stack([x, theta * x**2]),
    KERNEL,
    init=start,
    num_samples=10,
    num_chains=8,
    mesh=MESH,
)


def drawn(mesh):
    options = {"init": start, "num_samples": 5, "num_chains": 8, "thinning": 2, "burn_in": 3}
    tree = diffmh.sample(KERNEL, 0.5, KEY, 1.2, mesh=mesh, **options)
    stats = tree.sample_stats
    return [tree.posterior.x.values, stats.acceptance_rate.values, stats.lp.values]


def program(theta, key):
    """A short walk whose steps depend on where it is."""

    def step(total, key):
        up = sad.bernoulli(key, jax.nn.sigmoid(theta[0] * total - theta[1]))
        return total + up.astype(float), None

    return jax.lax.scan(step, 0.0, jax.random.split(key, 3))[0]


def replicates(mesh):
    """As many as cannot be shared out evenly."""
    report = sad.run(program, jnp.array([0.5, 0.2]), KEY, num_replicates=42, mesh=mesh)
    return _numbers(report)


def _numbers(report):
    return [report.value, report.value_error, report.gradient, report.gradient_error]


def results():
    report = MEAN.run(0.5, KEY, 1.2)
    births = MEAN.by(diffmh.StochasticDerivative(births=True))
    gradients = jax.jit(jax.vmap(jax.jacobian(MEAN), (0, None, None)))
    return {
        "each chain": MEAN.per_chain(0.5, KEY, 1.2),
        "gradients": gradients(jnp.array([0.5, -0.5]), KEY, 1.2),
        "report": _numbers(report),
        "backward by births": jax.jacrev(births)(0.5, KEY, 1.2),
        "linearised by births": jax.linearize(lambda theta: births(theta, KEY, 1.2), 0.5)[1](1.0),
        "report by births": _numbers(births.run(0.5, KEY, 1.2)),
        "report by covariance": _numbers(MEAN.by(diffmh.Covariance()).run(0.5, KEY, 1.2)),
        "effective samples": report.effective_samples,
        "draws": drawn(MESH),
        "sad": replicates(MESH),
    }


def mistaken():
    share = Plan.share

    def same_on_every_device(self, keys):
        anew = jax.vmap(jax.random.split)(jax.random.split(KEY, keys.shape[0]))
        return share(self, anew)

    Plan.share = same_on_every_device
    return {"each chain": MEAN.per_chain(0.5, KEY, 1.2)}


if __name__ == "__main__":
    plain = lambda value: np.concatenate(
        [np.ravel(np.asarray(leaf, float)) for leaf in jax.tree.leaves(value)]
    ).tolist()
    computed = mistaken() if sys.argv[1:] == ["mistake"] else results()
    print(json.dumps({name: plain(value) for name, value in computed.items()}))
