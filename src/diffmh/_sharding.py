"""Chains over the devices of a mesh, each device running its own share; and the hosts behind them.

What a chain computes depends on its key alone, and each chain has a key of its own; so numbers do
not depend on how many devices there are, up to how averages over chains are rounded.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Key, PyTree

from ._validate import Checked

AXIS = "chains"

# What stands in the errors of a collective whose other end is gone.
_SILENCE = ("Gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "Connection")


def check_mesh(mesh: Checked[Mesh], where: str = "expectation(mesh=...)") -> Mesh:
    """The mesh, if it is one with an axis `chains`."""
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"`{where}` must be a `jax.sharding.Mesh`, got"
            f" {type(mesh).__name__}: make one with `jax.make_mesh((num_devices,), ('chains',))`."
        )
    if AXIS not in mesh.axis_names:
        raise ValueError(f"`{where}` must have an axis named 'chains', got {mesh.axis_names}.")
    # All axes automatic: nobody asks how arrays are laid out.
    return Mesh(mesh.devices, mesh.axis_names)


def check_shares(
    mesh: Checked[Mesh], num_chains: int, where: str = "expectation(mesh=...)"
) -> Mesh:
    """The mesh, if the chains can be shared out evenly over its axis `chains`."""
    mesh = check_mesh(mesh, where)
    num_shards = mesh.shape[AXIS]
    if num_chains % num_shards:
        raise ValueError(
            f"`num_chains={num_chains}` must be a multiple of the {num_shards} devices along the"
            " axis 'chains' of `mesh`."
        )
    return mesh


def over_shards(
    function: Callable[..., PyTree],
    mesh: Mesh,
    keys: Key[Array, "C ..."],
    *common: PyTree,
    like: Callable[..., PyTree] | None = None,
    carry: PyTree = None,
) -> PyTree:
    """`function(keys, carry, *common)`, where each device has its share of the chains' keys and of
    what is carried; without a `carry`, `function(keys, *common)`.

    Results have the chains as their last axis, or are the same whatever the number of chains;
    which of the two is seen from their shapes, or from those of `like(keys, *common)`. What is
    carried is in the form of the first result. `common` goes to every device.
    """
    form, per_chain = _form(like or function, keys, *common)
    structure = jax.tree.structure(form)
    inputs = jax.tree.leaves(carry)

    def on_device(keys, leaves, *common):
        between = () if carry is None else (jax.tree.structure(carry).unflatten(leaves),)
        results = jax.tree.leaves(function(keys, *between, *common))
        pairs = zip(results, per_chain, strict=True)
        return [leaf if mapped else leaf[None] for leaf, mapped in pairs]

    specs = list(map(_spec, jax.tree.leaves(form), per_chain))
    alone = PartitionSpec(AXIS)
    outputs = [spec if each else alone for spec, each in zip(specs, per_chain, strict=True)]
    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(PartitionSpec(AXIS), specs[: len(inputs)], *(PartitionSpec() for _ in common)),
        out_specs=outputs,
        # No result is claimed to be the same on all devices: there is nothing to check.
        check_vma=False,
    )
    results = zip(jax.jit(mapped)(keys, inputs, *common), per_chain, strict=True)
    return structure.unflatten([leaf if mapped else leaf[0] for leaf, mapped in results])


def over_groups(
    function: Callable[..., PyTree],
    num_groups: int,
    keys: Key[Array, "C ..."],
    *common: PyTree,
    like: Callable[..., PyTree],
    carry: PyTree = None,
) -> PyTree:
    """The same as `over_shards`, but one group of chains after the other on one device."""
    form, per_chain = _form(like, keys, *common)
    leaves = jax.tree.leaves(carry)
    mapped = [leaf for leaf, each in zip(leaves, per_chain, strict=False) if each]

    def of_group(given):
        keys, own = given
        own = iter(own)
        whole = [next(own) if each else leaf for leaf, each in zip(leaves, per_chain, strict=False)]
        between = () if carry is None else (jax.tree.structure(carry).unflatten(whole),)
        return jax.tree.leaves(function(keys, *between, *common))

    groups = keys.reshape(num_groups, -1, *keys.shape[1:])
    results = jax.lax.map(of_group, (groups, [_split(leaf, num_groups) for leaf in mapped]))
    pairs = zip(results, per_chain, strict=True)
    joined = [_join(leaf) if each else leaf[0] for leaf, each in pairs]
    return jax.tree.structure(form).unflatten(joined)


def _split(leaf: Array, num_groups: int) -> Array:
    """Groups of chains first, their chains last."""
    return jnp.moveaxis(leaf.reshape(*leaf.shape[:-1], num_groups, -1), -2, 0)


def _join(leaf: Array) -> Array:
    return jnp.moveaxis(leaf, 0, -2).reshape(*leaf.shape[1:-1], -1)


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
        mesh=mesh,
        in_specs=(PartitionSpec(AXIS), last, *(PartitionSpec() for _ in common)),
        out_specs=PartitionSpec(),
    )
    return mapped(keys, per_chain, *common)


def shared_evenly(keys: Key[Array, "C ..."], mesh: Mesh | None) -> Key[Array, "C ..."]:
    """Keys of which each device has its share, if there are equally many for each: then whatever
    is mapped over them is shared out by the compiler.
    """
    if mesh is None or keys.shape[0] % mesh.shape[AXIS]:
        return keys
    return jax.lax.with_sharding_constraint(keys, NamedSharding(mesh, PartitionSpec(AXIS)))


def placed(
    tree: PyTree, like: Callable[..., PyTree], mesh: Mesh, keys: Key[Array, "C ..."], *common
) -> PyTree:
    """A tree of arrays that every host has whole, each device having its share."""
    form, per_chain = _form(like, keys, *common)
    specs = map(_spec, jax.tree.leaves(form), per_chain)
    leaves, structure = jax.tree.flatten(tree)
    shares = [NamedSharding(mesh, spec) for spec in specs]
    return structure.unflatten(jax.jit(lambda leaves: leaves, out_shardings=shares)(leaves))


def _spec(leaf: jax.ShapeDtypeStruct, per_chain: bool) -> PartitionSpec:
    """Shared out along the last axis, or the same everywhere."""
    return PartitionSpec(*(None for _ in leaf.shape[1:]), AXIS) if per_chain else PartitionSpec()


def _form(function: Callable[..., PyTree], keys, *common) -> tuple[PyTree, list[bool]]:
    """The result's form, and which of its leaves have an axis of chains: those that grow with
    their number.
    """
    more = jax.eval_shape(lambda keys: jnp.concatenate([keys, keys]), keys)
    form, larger = (jax.eval_shape(function, some, *common) for some in (keys, more))
    grows = jax.tree.map(lambda one, other: one.shape != other.shape, form, larger)
    return form, jax.tree.leaves(grows)


class Hosts(eqx.Module):
    """The processes whose devices are in a mesh. All run the same lines; what depends on a clock, a
    terminal or a file is decided by the first of them. Without a mesh, or on one host, each is
    alone.
    """

    mesh: Mesh | None = eqx.field(static=True, default=None)

    @property
    def numbers(self) -> list[int]:
        if self.mesh is None:
            return [jax.process_index()]
        return sorted({device.process_index for device in self.mesh.devices.flat})

    @property
    def several(self) -> bool:
        return self.mesh is not None and len(self.numbers) > 1

    @property
    def leads(self) -> bool:
        """Whether this one is the first."""
        return not self.several or jax.process_index() == self.numbers[0]

    def each(self, number: int) -> np.ndarray:
        """The number that each host's first device has; every host waits for all the others."""
        if not self.several:
            return np.array([number])
        assert self.mesh is not None
        everywhere = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        own = lambda _: np.full(1, number, np.int32)
        said = jax.make_array_from_callback((self.mesh.size,), everywhere, own)
        of_device = [device.process_index for device in self.mesh.devices.flat]
        first = [of_device.index(host) for host in self.numbers]
        return np.asarray(self.gathered(said))[first]

    def agree(self, number: int) -> int:
        """The first host's number."""
        return int(self.each(number)[0])

    def gathered(self, tree: PyTree) -> PyTree:
        """The same arrays, whole on every host."""
        if not self.several:
            return tree
        assert self.mesh is not None
        arrays, rest = eqx.partition(tree, eqx.is_array)
        whole = jax.jit(lambda tree: tree, out_shardings=NamedSharding(self.mesh, PartitionSpec()))
        return eqx.combine(whole(arrays), rest)

    def refuse_different(self, what: str, *trees: PyTree) -> None:
        """Refuses values that are not the same on all hosts: their devices would be at work on
        different problems, and nobody would see it.
        """
        if not self.several:
            return
        total = 0
        for leaf in filter(eqx.is_array_like, jax.tree.leaves(trees)):
            is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
            words = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
            total = zlib.crc32(np.ascontiguousarray(words).tobytes(), total)
        if len(set(self.each(int(np.uint32(total).view(np.int32))))) > 1:
            raise ValueError(
                f"{what} must be the same on all hosts of `mesh`, and is not: make it in the same"
                " way on each, or send it from one to the others."
            )

    @contextlib.contextmanager
    def answering(self, advice: str) -> Iterator[None]:
        """What is done with the other hosts; if one is gone, that is said, with advice."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if not self.several or not any(mark in str(error) for mark in _SILENCE):
                raise
            raise ConnectionError(_lost(self, advice, error)) from error


def _lost(hosts: Hosts, advice: str, error: Any) -> str:
    return (
        f"a host of `mesh` no longer answers: process {jax.process_index()} of {hosts.numbers} was"
        f" told {str(error).splitlines()[0][:200]!r}. Its chains are lost with it. {advice}"
    )
