"""Single-site proposals on arrays of labels."""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..base import validate
from ..base.validate import Checked
from .finite import check_label_dtype, refuse_labels, shifted
from .proposal import NoiseProposal
from .spin_flip import checked_site, ravel_site, refuse_site


class OneLabel(NoiseProposal):
    """Proposes one of the other values, each with probability `1/(n − 1)`, to one entry of an array
    of labels `0, ..., n − 1`.

    The entry is chosen uniformly, or is always `site` (an index, or a tuple of indices): a sweep in
    fixed order is `Sweep(lambda i: MetropolisHastings(density, OneLabel(n, site=i)), m)`.
    The best coupling is `SameSite`: it proposes the same value at the same site to the alternative
    or, if that is its value already, the primal's value.

    Raises an error for arrays that are not integers, for integer types too small for `n − 1`, and
    for labels that are not below n.

    >>> import diffmh, jax, jax.numpy as jnp
    >>> labels = jnp.array([0, 1, 2, 0])
    >>> moved = diffmh.OneLabel(3).sample(jax.random.key(0), labels)
    >>> int(jnp.sum(moved != labels))
    1
    """

    num_values: int = eqx.field(static=True)
    site: Int[Array, "ndim"] | None
    symmetric: bool = eqx.field(static=True)

    def __init__(
        self, num_values: Checked[int], site: Checked[int | tuple[int, ...]] | None = None
    ):
        self.num_values = validate.count(num_values, "OneLabel(num_values=...)", least=2)
        self.site = checked_site(site, "OneLabel(site=...)")
        self.symmetric = True

    def noise(self, key, x, num_steps):
        if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.integer) or x.ndim == 0:
            raise TypeError(
                f"`OneLabel` moves an array of integers, got {x}: start from one such as"
                " `jnp.zeros(10, int)`. For a single label use `OtherState`."
            )
        check_label_dtype(x.dtype, self.num_values, "OneLabel")
        refuse_site(self.site, x.shape, "OneLabel(site=...)")
        key_shift, key_site = jax.random.split(key)
        # A shift of 1 to n − 1 modulo n: each of the other values with the same probability.
        shift = jax.random.randint(key_shift, (num_steps,), 1, self.num_values)
        if self.site is not None:
            return shift, None
        return shift, jax.random.randint(key_site, (num_steps,), 0, x.size)

    def move(self, x, noise):
        shift, site = noise
        if self.site is not None:
            site = ravel_site(self.site, x.shape)
        # A mask, not a scatter: it vectorises over chains.
        here = jnp.arange(x.size).reshape(x.shape) == site
        return jnp.where(here, shifted(x, shift, self.num_values), x)

    def log_prob(self, x, x_new):
        differs = (x != x_new).ravel()
        sites = 1 if self.site is not None else x.size
        # One of m sites and one of the n − 1 other values, all equally probable: symmetric.
        possible = jnp.sum(differs) == 1
        if self.site is not None:
            possible &= jnp.any(differs & (jnp.arange(x.size) == ravel_site(self.site, x.shape)))
        return jnp.where(possible, -math.log(sites * (self.num_values - 1)), -jnp.inf)

    def refuse_start(self, x):
        refuse_site(self.site, np.shape(x), "OneLabel(site=...)")
        refuse_labels(x, self.num_values, f"OneLabel({self.num_values})")
