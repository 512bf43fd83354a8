"""Chains over the devices of a mesh, each device running its own share.

What a chain computes depends on its key alone, and each chain has a key of its own; so numbers do
not depend on how many devices there are, up to how averages over chains are rounded.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Key, PyTree

AXIS = "chains"


def check_mesh(mesh: Mesh, num_chains: int) -> Mesh:
    """The mesh, if the chains can be shared out evenly over its axis `chains`."""
    if not isinstance(mesh, Mesh):
        raise TypeError(
            "`expectation(mesh=...)` must be a `jax.sharding.Mesh`, got"
            f" {type(mesh).__name__}: make one with `jax.make_mesh((num_devices,), ('chains',))`."
        )
    if AXIS not in mesh.axis_names:
        raise ValueError(
            f"`expectation(mesh=...)` must have an axis named 'chains', got {mesh.axis_names}."
        )
    num_shards = mesh.shape[AXIS]
    if num_chains % num_shards:
        raise ValueError(
            f"`num_chains={num_chains}` must be a multiple of the {num_shards} devices along the"
            " axis 'chains' of `mesh`."
        )
    return mesh


def over_shards(
    function: Callable[..., PyTree], mesh: Mesh, keys: Key[Array, "C ..."], *common: PyTree
) -> PyTree:
    """`function(keys, *common)`, where each device has its share of the chains' keys.

    Results have the chains as their last axis, or are the same whatever the number of chains;
    which of the two is seen from their shapes. `common` goes to every device.
    """
    form, per_chain = _form(function, keys, *common)
    structure = jax.tree.structure(form)

    def on_device(keys, *common):
        leaves = zip(jax.tree.leaves(function(keys, *common)), per_chain, strict=True)
        return [leaf if mapped else leaf[None] for leaf, mapped in leaves]

    def spec(leaf, mapped):
        before = (None for _ in leaf.shape[1:]) if mapped else ()
        return PartitionSpec(*before, AXIS)

    mapped = jax.shard_map(
        on_device,
        # All axes automatic: nobody within asks how arrays are laid out.
        mesh=Mesh(mesh.devices, mesh.axis_names),
        in_specs=(PartitionSpec(AXIS), *(PartitionSpec() for _ in common)),
        out_specs=list(map(spec, jax.tree.leaves(form), per_chain)),
    )
    results = zip(mapped(keys, *common), per_chain, strict=True)
    return structure.unflatten([leaf if mapped else leaf[0] for leaf, mapped in results])


def summed_over_shards(
    function: Callable[..., PyTree],
    mesh: Mesh,
    keys: Key[Array, "C ..."],
    per_chain: Float[Array, "... C"],
    *common: PyTree,
) -> PyTree:
    """The sum over devices of `function(keys, per_chain, *common)`, where each has its share of the
    chains' keys and of an array with the chains last.
    """
    last = PartitionSpec(*(None for _ in per_chain.shape[1:]), AXIS)
    mapped = jax.shard_map(
        lambda *given: jax.lax.psum(function(*given), AXIS),
        mesh=Mesh(mesh.devices, mesh.axis_names),
        in_specs=(PartitionSpec(AXIS), last, *(PartitionSpec() for _ in common)),
        out_specs=PartitionSpec(),
    )
    return mapped(keys, per_chain, *common)


def _form(function: Callable[..., PyTree], keys, *common) -> tuple[PyTree, list[bool]]:
    """The result's form, and which of its leaves have an axis of chains: those that grow with
    their number.
    """
    more = jax.eval_shape(lambda keys: jnp.concatenate([keys, keys]), keys)
    form, larger = (jax.eval_shape(function, some, *common) for some in (keys, more))
    grows = jax.tree.map(lambda one, other: one.shape != other.shape, form, larger)
    return form, jax.tree.leaves(grows)
