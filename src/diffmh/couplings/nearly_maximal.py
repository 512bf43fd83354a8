"""A coupling of any proposal with a density that is nearly maximal at a fixed cost."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ..base import trees, validate
from ..base.inversion import index_from_uniform
from ..base.validate import Checked
from ..proposals import Proposal, move, proposal_noise
from .coupling import NoiseCoupling


class NearlyMaximal(NoiseCoupling):
    """Keeps `x'` nearly as often as `Maximal`, at the cost of `num_candidates` further proposals at
    every step, never more.

    `Maximal` draws what it does not keep by rejection, and chains that run side by side all wait
    for the unluckiest. Here `M` candidates `c_1, ..., c_M ~ q(· | y)` are drawn. Let `z_0 = x'`,
    `z_i = c_i` and `v = q(· | x) / q(· | y)`. Given the *set* of the z, that `z_j` is the one from
    `q(· | x)` has probability `p_j = v(z_j) / Σ v`, and that `z_j` is `c_1`, which is distributed
    as `y'` should be, has probability `(1 − p_j) / M`. So `y' = z_k` where `k` has these
    probabilities and is coupled maximally with the index of `x'`, which is distributed as `p`: keep
    `x'` with probability

        min(1, (1 − p_0) / (M p_0)) = min(1, (q(x'|y) / q(x'|x)) · (1/M) Σ_i v(c_i)),

    else draw k in proportion to `max(0, (1 − p_k) / M − p_k)`. The marginal is exact for every M;
    `M → ∞` is the maximal coupling, as `E v(c) = 1`. For chains that are close it fails to keep
    `x'` about `√(1 + 1/M)` times as often as it must. The default of proposals that are neither
    Gaussian nor finite and have no noise apart.

    >>> import diffmh
    >>> diffmh.NearlyMaximal(num_candidates=8)
    NearlyMaximal(num_candidates=8)
    """

    num_candidates: int = eqx.field(static=True)

    def __init__(self, num_candidates: Checked[int] = 4):
        self.num_candidates = validate.count(
            num_candidates, "NearlyMaximal(num_candidates=...)", least=1
        )

    def noise(self, key, proposal, x, num_steps):
        key_candidates, key_choose = jax.random.split(key)
        count = self.num_candidates
        flat = proposal_noise(proposal, key_candidates, x, num_steps * count)
        by_step = jax.tree.map(lambda leaf: leaf.reshape(num_steps, count, *leaf.shape[1:]), flat)
        return by_step, jax.random.uniform(key_choose, (num_steps, 2))

    def couple(self, proposal, x, x_new, y, primal_noise, noise):
        candidate_noise, uniforms = noise
        candidates = jax.vmap(lambda one: move(proposal, y, one))(candidate_noise)
        among = jax.tree.map(lambda new, all: jnp.concatenate([new[None], all]), x_new, candidates)
        log_v = jax.vmap(lambda z: _log_ratio(proposal, x, y, z))(among)
        chosen = _choose(log_v, uniforms)
        hot = jnp.arange(self.num_candidates + 1) == chosen
        return _pick(hot, among)


def _log_ratio(proposal: Proposal, x: PyTree, y: PyTree, z: PyTree) -> Float[Array, ""]:
    return proposal.log_prob(x, z) - proposal.log_prob(y, z)


def _choose(log_v: Float[Array, "n"], uniforms: Float[Array, "m"]) -> Array:
    """The index k of `y'` among `x', c_1, ..., c_M`. Where `log_prob` is NaN it is a candidate:
    the comparison is false, and an index drawn from NaNs is the first.
    """
    num_candidates = log_v.shape[0] - 1
    # q(x'|y) may be 0, and v(x') infinite: x' is never kept then, nor does it weigh.
    log_v = jnp.clip(log_v, -1e30, 1e30)
    # (1 − p_0)/(M p_0) = Σ_i v(c_i) / (M v(x')).
    keep = uniforms[0] * num_candidates < jnp.sum(jnp.exp(log_v[1:] - log_v[0]))
    v = jnp.exp(log_v - jnp.max(log_v))
    # max(0, (1 − p_k)/M − p_k), times M Σv. Of k = 0 there is none where x' was not kept.
    residual = jnp.maximum(0.0, jnp.sum(v) - (num_candidates + 1) * v[1:])
    return jnp.where(keep, 0, 1 + index_from_uniform(residual, uniforms[1]))


def _pick(hot, among: PyTree) -> PyTree:
    """The state where `hot` is true, bit for bit."""
    picked = trees.take(among, -1)
    for index in range(hot.shape[0] - 1):
        picked = trees.select(hot[index], trees.take(among, index), picked)
    return picked
