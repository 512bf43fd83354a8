"""A nearly maximal coupling, at a fixed cost, of any proposal with a density."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ..base import trees, validate
from ..base.inversion import index_from_uniform
from ..base.validate import Checked
from ..proposals import move, proposal_noise
from .coupling import NoiseCoupling


class NearlyMaximal(NoiseCoupling):
    """Keeps `x'` nearly as often as `Maximal`, at the fixed cost of `num_candidates` more proposals
    in every step.

    `Maximal` draws from the residual by rejection, and chains that run in parallel all wait for the
    slowest. Here `M` candidates `c_1, ..., c_M ~ q(· | y)` are drawn. Let `z_0 = x'`, `z_i = c_i`
    and `v = q(· | x) / q(· | y)`. Given the *set* of the z, the one from `q(· | x)` is `z_j` with
    probability `p_j = v(z_j) / Σ v`. `c_1`, which is distributed as `y'` should be, is `z_j` with
    probability `(1 − p_j) / M`. So let `y' = z_k` where `k` has these probabilities and is coupled
    maximally with the index of `x'`, which has the distribution `p`: keep `x'` with probability

        min(1, (1 − p_0) / (M p_0)) = min(1, (q(x'|y) / q(x'|x)) · (1/M) Σ_i v(c_i)),

    otherwise draw k with probability proportional to `max(0, (1 − p_k) / M − p_k)`. The marginal is
    exact for every M. The limit `M → ∞` is the maximal coupling, since `E v(c) = 1`. Close chains
    fail to keep `x'` about `√(1 + 1/M)` times as often as under `Maximal`. This is the default for
    proposals that are neither Gaussian nor finite nor a `NoiseProposal`.

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
        log_v = jax.vmap(lambda z: proposal.log_prob(x, z) - proposal.log_prob(y, z))(among)
        chosen = _choose(log_v, uniforms)
        hot = jnp.arange(self.num_candidates + 1) == chosen
        return _pick(hot, among)


def _choose(log_v: Float[Array, "n"], uniforms: Float[Array, "m"]) -> Array:
    """The index k of `y'` among `x', c_1, ..., c_M`. If `log_prob` is NaN it is a candidate: the
    comparison is False, and an index drawn from NaNs is the first.
    """
    num_candidates = log_v.shape[0] - 1
    # If q(x'|y) is 0, v(x') is infinite: then x' is never kept and has weight 0.
    log_v = jnp.clip(log_v, -1e30, 1e30)
    # (1 − p_0)/(M p_0) = Σ_i v(c_i) / (M v(x')).
    keep = uniforms[0] * num_candidates < jnp.sum(jnp.exp(log_v[1:] - log_v[0]))
    v = jnp.exp(log_v - jnp.max(log_v))
    # max(0, (1 − p_k)/M − p_k), times M Σv. It is 0 for k = 0 if x' was not kept.
    residual = jnp.maximum(0.0, jnp.sum(v) - (num_candidates + 1) * v[1:])
    return jnp.where(keep, 0, 1 + index_from_uniform(residual, uniforms[1]))


def _pick(hot, among: PyTree) -> PyTree:
    """The state at which `hot` is True, bit for bit."""
    picked = trees.take(among, -1)
    for index in range(hot.shape[0] - 1):
        picked = trees.select(hot[index], trees.take(among, index), picked)
    return picked
