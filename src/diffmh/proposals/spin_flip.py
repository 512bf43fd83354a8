"""Single-site proposals on arrays of spins ±1."""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .. import _validate
from .proposal import NoiseProposal


class SpinFlip(NoiseProposal):
    """One site of a ±1 array is proposed to be +1 or −1 with probability ½ each.

    The site is drawn uniformly, or is always `site` (an index, or a tuple of them): a sweep in
    fixed order is a `Cycle` of those. Half of the proposals leave the state as it is. With common
    random numbers, its default coupling, both chains are proposed the same spin at the same site:
    the monotone coupling.

    >>> import diffmh, jax, jax.numpy as jnp
    >>> diffmh.SpinFlip(site=(0, 1)).sample(jax.random.key(1), jnp.ones((2, 2), int)).shape
    (2, 2)
    """

    site: Int[Array, "ndim"] | None
    symmetric: bool = eqx.field(static=True)

    def __init__(self, site: int | tuple[int, ...] | None = None):
        self.symmetric = True
        self.site = None
        if site is not None:
            sites = site if isinstance(site, tuple) else (site,)
            self.site = jnp.array(
                [_validate.count(index, "SpinFlip(site=...)", least=0) for index in sites]
            )

    def noise(self, key, x, num_steps):
        if not hasattr(x, "dtype") or x.dtype == jnp.bool_ or x.ndim == 0:
            raise TypeError(f"`SpinFlip` moves an array of spins ±1, got {x}.")
        if self.site is not None and self.site.shape != (x.ndim,):
            raise ValueError(
                f"`SpinFlip(site=...)` needs {x.ndim} indices for spins of shape {x.shape}."
            )
        key_site, key_spin = jax.random.split(key)
        spin = jax.random.rademacher(key_spin, (num_steps,), jnp.int8)
        if self.site is not None:
            return spin, None
        return spin, jax.random.randint(key_site, (num_steps,), 0, x.size)

    def move(self, x, noise):
        spin, site = noise
        if self.site is not None:
            site = _ravel(self.site, x.shape)
        flat = jnp.where(jnp.arange(x.size) == site, spin.astype(x.dtype), x.ravel())
        return flat.reshape(x.shape)

    def log_prob(self, x, x_new):
        differs = (x != x_new).ravel()
        same = ~jnp.any(differs)
        if self.site is not None:
            elsewhere = differs & (jnp.arange(x.size) != _ravel(self.site, x.shape))
            return jnp.where(jnp.any(elsewhere), -jnp.inf, -math.log(2))
        one_site = jnp.where(jnp.sum(differs) == 1, -math.log(2 * x.size), -jnp.inf)
        return jnp.where(same, -math.log(2), one_site)


def _ravel(site: Int[Array, "ndim"], shape: tuple[int, ...]) -> Array:
    flat = jnp.zeros((), site.dtype)
    for index, length in enumerate(shape):
        flat = flat * length + site[index]
    return flat
