"""Single-site proposals on arrays of spins ±1."""

from __future__ import annotations

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..base import validate
from ..base.validate import Checked
from .proposal import NoiseProposal


class SpinFlip(NoiseProposal):
    """Proposes +1 or −1, with probability ½ each, to one site of a ±1 array.

    The site is chosen uniformly, or is always `site` (an index, or a tuple of indices): a sweep in
    fixed order is `Sweep(lambda i: MetropolisHastings(density, SpinFlip(i)), m)`. Half of the
    proposals equal the current state. With common random numbers, its default coupling, both
    chains propose the same spin at the same site: the monotone coupling.

    >>> import diffmh, jax, jax.numpy as jnp
    >>> diffmh.SpinFlip(site=(0, 1)).sample(jax.random.key(1), jnp.ones((2, 2), int)).shape
    (2, 2)
    """

    site: Int[Array, "ndim"] | None
    symmetric: bool = eqx.field(static=True)

    def __init__(self, site: Checked[int | tuple[int, ...]] | None = None):
        self.symmetric = True
        self.site = checked_site(site, "SpinFlip(site=...)")

    def noise(self, key, x, num_steps):
        if not hasattr(x, "dtype") or x.dtype == jnp.bool_ or x.ndim == 0:
            raise TypeError(f"`SpinFlip` moves an array of spins ±1, got {x}.")
        if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
            raise TypeError(
                f"`SpinFlip` moves spins ±1, which {x.dtype} cannot represent: start from a signed"
                " type such as int8, or move labels 0 and 1 with `OneLabel(2)`."
            )
        refuse_site(self.site, x.shape, "SpinFlip(site=...)")
        key_site, key_spin = jax.random.split(key)
        spin = jax.random.rademacher(key_spin, (num_steps,), jnp.int8)
        if self.site is not None:
            return spin, None
        return spin, jax.random.randint(key_site, (num_steps,), 0, x.size)

    def move(self, x, noise):
        spin, site = noise
        if self.site is not None:
            site = ravel_site(self.site, x.shape)
        # A mask, not a scatter: it vectorises over chains.
        flat = jnp.where(jnp.arange(x.size) == site, spin.astype(x.dtype), x.ravel())
        return flat.reshape(x.shape)

    def log_prob(self, x, x_new):
        differs = (x != x_new).ravel()
        same = ~jnp.any(differs)
        if self.site is not None:
            elsewhere = differs & (jnp.arange(x.size) != ravel_site(self.site, x.shape))
            return jnp.where(jnp.any(elsewhere), -jnp.inf, -math.log(2))
        # The state itself is proposed with probability ½, summed over m sites: m · 1/(2m).
        one_site = jnp.where(jnp.sum(differs) == 1, -math.log(2 * x.size), -jnp.inf)
        return jnp.where(same, -math.log(2), one_site)

    def refuse_start(self, x):
        refuse_site(self.site, np.shape(x), "SpinFlip(site=...)")
        spins = np.asarray(x)
        wrong = spins[np.abs(spins) != 1]
        if wrong.size:
            raise ValueError(
                f"`SpinFlip` moves spins ±1, but the start has {wrong.flat[0]}: start from ±1, or"
                " move labels 0 and 1 with `OneLabel(2)`."
            )


def checked_site(
    site: Checked[int | tuple[int, ...]] | None, name: str
) -> Int[Array, "ndim"] | None:
    """The indices of one site as an array, so that a `Cycle` over sites is one loop. They may be
    traced, such as the site of a `Sweep`.
    """
    if site is None:
        return None
    sites = site if isinstance(site, tuple) else (site,)
    return jnp.stack([_checked_index(index, name) for index in sites])


def _checked_index(index: Any, name: str) -> Int[Array, ""]:
    if validate.concrete(index):
        return jnp.asarray(validate.count(index, name, least=0))
    if index.shape != () or not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(f"`{name}` must be an integer or a tuple of integers, got {index}.")
    return index


def refuse_site(site: Int[Array, "ndim"] | None, shape: tuple[int, ...], name: str) -> None:
    if site is None:
        return
    if site.shape != (len(shape),):
        raise ValueError(f"`{name}` needs {len(shape)} indices for an array of shape {shape}.")
    if validate.concrete(site) and np.any(np.asarray(site) >= np.asarray(shape)):
        raise ValueError(
            f"`{name}` is {tuple(np.asarray(site).tolist())}, which is outside of an array of shape"
            f" {shape}."
        )


def ravel_site(site: Int[Array, "ndim"], shape: tuple[int, ...]) -> Array:
    """The index of the site in the flattened array."""
    flat = jnp.zeros((), site.dtype)
    for index, length in enumerate(shape):
        flat = flat * length + site[index]
    return flat
