"""propose: use a proposal of the core in a program; alternatives propose with a coupling."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from .. import couplings, proposals
from ..base import trees, validate
from ..base.validate import Checked
from ..couplings import Coupling
from ..fast import rounding
from ..jaxprs import compat
from ..proposals import Proposal
from .draw import mapped

PROPOSE = "sad_propose"


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """The static part of a proposal, which rebuilds it from its operands."""

    structure: Any
    sizes: tuple[int, ...]
    static: Any

    def unflatten(self, operands):
        """`(proposal, coupling), noise, x`."""
        _, arrays, noise, x = jax.tree.unflatten(self.structure, operands)
        return eqx.combine(arrays, self.static), _settled(noise), x

    def propose(self, *operands):
        """`x'`, flat."""
        (proposal, _), noise, x = self.unflatten(operands)
        return jax.tree.leaves(_settled(proposals.move(proposal, x, noise)))

    def coupling_noise(self, key, arrays, x, num_steps):
        """The coupling's own randomness for several steps, given the proposal's noise and arrays.
        Only the shapes of `x` are used.
        """
        structures = jax.tree.structure(self.structure.unflatten(range(self.structure.num_leaves)))
        _, array_structure, _, x_structure = structures.children()
        proposal, coupling = eqx.combine(jax.tree.unflatten(array_structure, arrays), self.static)
        return couplings.coupling_noise(
            coupling, proposal, key, jax.tree.unflatten(x_structure, x), num_steps
        )

    def couple(self, x_new, operands, alternative_x, coupling_noise):
        """`y'`, coupled to `x'`, as a flat list."""
        (proposal, coupling), noise, x = self.unflatten(operands)
        structure = jax.tree.structure(x)
        y, x_new = (jax.tree.unflatten(structure, leaves) for leaves in (alternative_x, x_new))
        return jax.tree.leaves(
            couplings.couple(coupling, proposal, x, x_new, y, noise, coupling_noise)
        )


def propose(
    key: Checked[Key[Array, ""]],
    proposal: Checked[Proposal],
    coupling: Checked[Coupling] | None,
    x: PyTree,
) -> PyTree:
    """Draw `x' ~ q(· | x)`. In an alternative run of the program, `y'` is drawn with the coupling,
    given `x'`; `None` is the proposal's default coupling.

    **Refused**: a proposal that depends on theta or on a draw of the program, and a coupling that
    does not fit the proposal.

    >>> import jax, diffmh
    >>> from diffmh import sad
    >>> sad.propose(jax.random.key(0), diffmh.GaussianWalk(1.0), None, jax.numpy.zeros(3)).shape
    (3,)
    """
    where = "sad.propose(key, proposal, coupling, x)"
    validate.instance(proposal, Proposal, where, "proposal")
    chosen = (
        couplings.best_coupling(proposal)
        if coupling is None
        else validate.instance(coupling, Coupling, where, "coupling")
    )
    couplings.refuse_mismatch(chosen, proposal)
    key, x = validate.typed_key(key), trees.strong(validate.state(x, "`x`"))
    # The key is an operand too: an alternative that continues alone in a loop compares keys to find
    # out if the noise is the primal's or its own.
    noise = proposals.proposal_noise(proposal, jax.random.clone(key), x, 1)
    noise = jax.tree.map(lambda leaf: leaf[0], noise)
    arrays, static = eqx.partition((proposal, chosen), eqx.is_array)
    parts = (key, arrays, noise, x)
    operands, structure = jax.tree.flatten(parts)
    form = Form(structure, tuple(len(jax.tree.leaves(part)) for part in parts), static)
    return jax.tree.unflatten(jax.tree.structure(x), _propose(*operands, form=form, batches=0))


def _settled(tree: PyTree) -> PyTree:
    """Round here, so that every use of `x'` sees the same bits: two chains that met must stay
    together.
    """

    def rounded(leaf):
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return rounding.round_here(leaf, jnp.isnan(leaf)) if is_float else leaf

    return jax.tree.map(rounded, tree)


def _implementation(*operands, form, batches):
    return mapped(form.propose, batches)(*operands)


def _abstract(*operands, form, batches):
    return [
        compat.shaped(operand.shape, operand.dtype)
        for operand in operands[len(operands) - form.sizes[-1] :]
    ]


def _batched(*, form, batches):
    return {"form": form, "batches": batches + 1}


_propose = compat.new_primitive(PROPOSE, _implementation, _abstract, _batched)
