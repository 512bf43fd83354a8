"""The cases that `tests/test_shard_map.py` runs in a process of two devices: pairs of found and
wanted numbers, by name, as JSON.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import diffmh
from diffmh import sad

MESH = Mesh(np.array(jax.devices()), ("chains",))
ALL, EACH = PartitionSpec(), PartitionSpec("chains")
KEYS = jax.random.split(jax.random.key(0), 2)
THETAS = jnp.array([0.5, -0.25])


def shard_map(function, in_specs, out_specs=EACH, **options):
    return jax.jit(
        jax.shard_map(function, mesh=MESH, in_specs=in_specs, out_specs=out_specs, **options)
    )


def log_density(theta, x):
    """N(θ, 1) by a loop that starts from a constant: JAX itself refuses it where θ or x varies."""
    return jax.lax.fori_loop(0, 2, lambda i, total: total - 0.25 * (x - theta) ** 2, 0.0)


MEAN = diffmh.expectation(
    lambda theta, x: x,
    diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(2.38)),
    init=0.0,
    num_samples=10,
    num_chains=4,
)


def program(theta, key):
    def step(total, key):
        return total + sad.bernoulli(key, jax.nn.sigmoid(theta)).astype(float), None

    return jax.lax.scan(step, 0.0, jax.random.split(key, 3))[0]


COUNT = sad.expectation(program)
SLOPE = jax.grad(MEAN)


def call():
    mapped = shard_map(lambda theta, keys: MEAN(theta, keys[0])[None], (ALL, EACH))
    return mapped(0.5, KEYS), [MEAN(0.5, key) for key in KEYS]


def call_unchecked():
    one = lambda theta, keys: MEAN(theta, keys[0])[None]
    return shard_map(one, (ALL, EACH), check_vma=False)(0.5, KEYS), call()[1]


def own_theta():
    mapped = shard_map(lambda thetas, key: MEAN(thetas[0], key)[None], (EACH, ALL))
    return mapped(THETAS, KEYS[0]), [MEAN(theta, KEYS[0]) for theta in THETAS]


def gradient_inside():
    """Of what all devices share, JAX adds up the gradients."""
    mapped = shard_map(lambda theta, keys: SLOPE(theta, keys[0]), (ALL, EACH), ALL)
    return mapped(0.5, KEYS), sum(SLOPE(0.5, key) for key in KEYS)


def gradient_inside_of_its_own():
    mapped = shard_map(lambda thetas, key: SLOPE(thetas[0], key)[None], (EACH, ALL))
    return mapped(THETAS, KEYS[0]), [SLOPE(theta, KEYS[0]) for theta in THETAS]


def gradient_outside():
    one = lambda theta, keys: jax.lax.pmean(MEAN(theta, keys[0]), "chains")
    mapped = shard_map(one, (ALL, EACH), ALL)
    return jax.grad(mapped)(0.5, KEYS), np.mean([SLOPE(0.5, key) for key in KEYS])


def vmap_inside():
    one = lambda theta, keys: jax.vmap(MEAN, (0, None))(theta, keys[0])[None]
    wanted = [[MEAN(theta, key) for theta in THETAS] for key in KEYS]
    return shard_map(one, (ALL, EACH))(THETAS, KEYS), wanted


def vmap_outside():
    mapped = shard_map(lambda theta, keys: MEAN(theta, keys[0])[None], (ALL, EACH))
    wanted = [[MEAN(theta, key) for key in KEYS] for theta in THETAS]
    return jax.vmap(mapped, (0, None))(THETAS, KEYS), wanted


def sad_gradient():
    one = lambda theta, keys: jax.grad(COUNT)(theta, keys[0])
    wanted = sum(jax.grad(COUNT)(0.5, key) for key in KEYS)
    return shard_map(one, (ALL, EACH), ALL)(0.5, KEYS), wanted


def sad_gradients_of_many():
    """Mapped within a device: chains last."""
    keys = jax.random.split(jax.random.key(1), 8)
    each = jax.vmap(jax.value_and_grad(COUNT), (None, 0))
    one = lambda theta, keys: jnp.stack(each(jax.lax.pcast(theta, "chains", to="varying"), keys), 1)
    return shard_map(one, (ALL, EACH))(0.5, keys), jnp.stack(each(0.5, keys), 1)


def sad_by_score_is_refused():
    by_score = sad.expectation(program, estimator=sad.Score())
    one = lambda theta, keys: jax.grad(by_score)(theta, keys[0])
    try:
        shard_map(one, (ALL, EACH), ALL)(0.5, KEYS)
    except diffmh.NotDifferentiable:
        return 1.0, 1.0
    return 0.0, 1.0


CASES = {
    case.__name__: case
    for case in (
        call,
        call_unchecked,
        own_theta,
        gradient_inside,
        gradient_inside_of_its_own,
        gradient_outside,
        vmap_inside,
        vmap_outside,
        sad_gradient,
        sad_gradients_of_many,
        sad_by_score_is_refused,
    )
}

if __name__ == "__main__":
    assert len(jax.devices()) == 2
    plain = lambda value: np.asarray(value, float).tolist()
    print(json.dumps({name: [plain(value) for value in case()] for name, case in CASES.items()}))
