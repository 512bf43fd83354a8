"""What `tests/test_sharding.py` runs with some number of devices: numbers by name, as JSON."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import diffmh
from diffmh._sharding import over_shards

MESH = Mesh(np.array(jax.devices()), ("chains",))
KEY = jax.random.key(0)


def start(key):
    return jax.random.normal(key)


MEAN = diffmh.expectation(
    lambda theta, x, scale: jnp.stack([x, theta * x**2]),
    diffmh.MetropolisHastings(
        lambda theta, x, scale: -0.5 * ((x - theta) / scale) ** 2, diffmh.GaussianWalk(2.38)
    ),
    init=start,
    num_samples=10,
    num_chains=8,
    mesh=MESH,
)


def draws(keys, common):
    """What has an axis of chains, and what has none."""
    drawn = jax.vmap(lambda key: jax.random.normal(key, (3,)), out_axes=-1)(keys)
    return {"each": drawn + common, "all": jnp.arange(3.0) * common}


def results():
    report = MEAN.run(0.5, KEY, 1.2)
    gradients = jax.jit(jax.vmap(jax.jacobian(MEAN), (0, None, None)))
    return {
        "each chain": MEAN.per_chain(0.5, KEY, 1.2),
        "gradients": gradients(jnp.array([0.5, -0.5]), KEY, 1.2),
        "report": [report.value, report.value_error, report.gradient, report.gradient_error],
        "effective samples": report.effective_samples,
        **over_shards(draws, MESH, jax.random.split(KEY, 8), 2.0),
    }


if __name__ == "__main__":
    assert len(jax.devices()) == MESH.size
    plain = lambda value: np.concatenate(
        [np.ravel(np.asarray(leaf, float)) for leaf in jax.tree.leaves(value)]
    ).tolist()
    print(json.dumps({name: plain(value) for name, value in results().items()}))
