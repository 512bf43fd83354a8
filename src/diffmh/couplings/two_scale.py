"""One coupling for chains that are far from each other, another for chains that are close."""

from __future__ import annotations

import equinox as eqx
import jax

from ..base import trees, validate
from ..base.validate import Checked
from ..proposals import GaussianProposal
from .coupling import GaussianCoupling, NoiseCoupling
from .maximal_reflection import MaximalReflection


class TwoScale(GaussianCoupling):
    """For Gaussian steps: `far` until the chains are within `distance` steps of each other, then
    `near` (Papp and Sherlock, arXiv 2211.12585).

    The distance is `‖L⁻¹(m(y) − m(x))‖`, in units of the proposal's step. It depends only on the
    current states, so the marginals are those of `far` and `near`. With reflection alone, the
    number of steps until chains meet grows fast with the dimension;
    `far=GradientReflection(gradient)` brings them close first.

    >>> import diffmh
    >>> diffmh.TwoScale(diffmh.CommonRandomNumbers(), distance=0.5)
    TwoScale(far=CommonRandomNumbers(), distance=0.5, near=MaximalReflection())
    """

    far: NoiseCoupling
    distance: float = eqx.field(static=True)
    near: NoiseCoupling

    def __init__(
        self,
        far: Checked[NoiseCoupling],
        distance: Checked[float] = 1.0,
        near: Checked[NoiseCoupling] | None = None,
    ):
        where = "TwoScale(far, distance, near)"
        self.far = validate.instance(far, NoiseCoupling, where, "far")
        chosen = MaximalReflection() if near is None else near
        self.near = validate.instance(chosen, NoiseCoupling, where, "near")
        self.distance = validate.number(distance, "TwoScale(distance=...)", above=0)

    def mismatch(self, proposal):
        reason = super().mismatch(proposal)
        return reason or self.far.mismatch(proposal) or self.near.mismatch(proposal)

    def keeps_apart(self, kind):
        return self.far.keeps_apart(kind) and self.near.keeps_apart(kind)

    def noise(self, key, proposal, x, num_steps):
        key_far, key_near = jax.random.split(key)
        return (
            self.far.noise(key_far, proposal, x, num_steps),
            self.near.noise(key_near, proposal, x, num_steps),
        )

    def couple(self, proposal, x, x_new, y, primal_noise, noise):
        # Both use their own noise, and the choice depends only on x and y, before anything random:
        # it changes neither marginal.
        far, near = (
            coupling.couple(proposal, x, x_new, y, primal_noise, own)
            for coupling, own in zip((self.far, self.near), noise, strict=True)
        )
        assert isinstance(proposal, GaussianProposal)
        apart = proposal.whiten(trees.subtract(proposal.mean(y), proposal.mean(x)))
        return trees.select(trees.dot(apart, apart) < self.distance**2, near, far)
