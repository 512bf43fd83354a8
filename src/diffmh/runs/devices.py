"""Distribute chains over the devices of a mesh, and coordinate its hosts.

Each chain has its own key, on which alone its numbers depend. So results do not depend on the
number of devices, except for the rounding of averages over chains.
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

from ..base.validate import Checked

AXIS = "chains"

# Phrases in the error messages of a collective operation with a lost peer.
_SILENCE = ("Gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "Connection")


def check_mesh(mesh: Checked[Mesh], where: str = "expectation(mesh=...)") -> Mesh:
    """The mesh, after checking that it has an axis `chains`."""
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"`{where}` must be a `jax.sharding.Mesh`, got"
            f" {type(mesh).__name__}: make one with `jax.make_mesh((num_devices,), ('chains',))`."
        )
    if AXIS not in mesh.axis_names:
        raise ValueError(f"`{where}` must have an axis named 'chains', got {mesh.axis_names}.")
    # All axes are automatic: the layout of arrays is left to the compiler.
    return Mesh(mesh.devices, mesh.axis_names)


def check_shares(
    mesh: Checked[Mesh], num_chains: int, where: str = "expectation(mesh=...)"
) -> Mesh:
    """The mesh, after checking that the axis `chains` divides the chains evenly."""
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
    carry: PyTree,
    *common: PyTree,
) -> PyTree:
    """`function(keys, carry, *common)`, where each device has its share of the chains' keys and of
    the carry. Chains are the last axis of every array that is carried or returned; `common` goes
    to every device.
    """
    leaves, structure = jax.tree.flatten(carry)

    def on_device(keys, leaves, *common):
        results = function(keys, structure.unflatten(leaves), *common)
        # The ranks of the results are unknown before tracing, so no specification can name their
        # last axis. With chains first, one specification fits all of them.
        return jax.tree.map(_chains_first, _chains_last(results, keys.shape[0]))

    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(PartitionSpec(AXIS), [_share(leaf) for leaf in leaves], *_everywhere(common)),
        out_specs=PartitionSpec(AXIS),
        # No result is declared to be the same on all devices, so there is nothing to check.
        check_vma=False,
    )

    @jax.jit
    def joined(*given):
        return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, -1), mapped(*given))

    return joined(keys, leaves, *common)


def over_groups(
    function: Callable[..., PyTree],
    num_groups: int,
    keys: Key[Array, "C ..."],
    carry: PyTree,
    *common: PyTree,
) -> PyTree:
    """The same as `over_shards`, but on one device, one group of chains after the other."""
    # `Plan.num_groups` divides the number of chains on each device.
    size = keys.shape[0] // num_groups

    def split(leaf: Array) -> Array:
        """Groups of chains as the first axis, chains of a group as the last."""
        return jnp.moveaxis(leaf.reshape(*leaf.shape[:-1], num_groups, size), -2, 0)

    def join(leaf: Array) -> Array:
        return jnp.moveaxis(leaf, 0, -2).reshape(*leaf.shape[1:-1], num_groups * size)

    def of_group(given):
        return _chains_last(function(*given, *common), size)

    groups = keys.reshape(num_groups, size, *keys.shape[1:])
    carry = jax.tree.map(split, _chains_last(carry, keys.shape[0]))
    return jax.tree.map(join, jax.lax.map(of_group, (groups, carry)))


def _chains_last(tree: PyTree, num_chains: int) -> PyTree:
    """The same tree. Raises `ValueError` unless chains are the last axis of every array."""
    # The chains' axis is declared, not guessed from a shape: an array of C numbers per chain, or
    # one shared by all chains, would silently be split along the wrong axis. An error here is a
    # bug in a recorder or an estimator.
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.shape(leaf)[-1:] != (num_chains,):
            raise ValueError(
                f"`{jax.tree_util.keystr(path)}` is carried from block to block or returned for"
                f" {num_chains} chains, so chains must be its last axis, got the shape"
                f" {jnp.shape(leaf)}."
            )
    return tree


def _chains_first(leaf: Array) -> Array:
    return jnp.moveaxis(leaf, -1, 0)


def _share(leaf: Array) -> PartitionSpec:
    """Sharded along the last axis."""
    return PartitionSpec(*(None for _ in leaf.shape[1:]), AXIS)


def _everywhere(common: tuple[PyTree, ...]) -> tuple[PartitionSpec, ...]:
    return tuple(PartitionSpec() for _ in common)


def summed_over_shards(
    function: Callable[..., PyTree],
    mesh: Mesh,
    keys: Key[Array, "C ..."],
    per_chain: Float[Array, "... C"],
    *common: PyTree,
) -> PyTree:
    """The sum over devices of `function(keys, per_chain, *common)`, where each has its share of the
    chains' keys and of an array with chains as the last axis.
    """

    def summed(*given):
        return jax.lax.psum(function(*given), AXIS)

    # A sum over all devices is the same on each of them, which an empty specification states.
    in_specs = (PartitionSpec(AXIS), _share(per_chain), *_everywhere(common))
    mapped = jax.shard_map(summed, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec())
    return mapped(keys, per_chain, *common)


def shared_evenly(keys: Key[Array, "C ..."], mesh: Mesh | None) -> Key[Array, "C ..."]:
    """Keys sharded over the devices, if their number is a multiple of the number of devices. Then
    the compiler distributes everything that is mapped over them.
    """
    if mesh is None or keys.shape[0] % mesh.shape[AXIS]:
        return keys
    return jax.lax.with_sharding_constraint(keys, NamedSharding(mesh, PartitionSpec(AXIS)))


def on_every_device(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """The same arrays, needed in full by all devices of the mesh.

    JAX finds out on which devices a program runs from the program's own equations. A linear map
    that is traced only when it is compiled (`fast.linear`) hides its mesh. This equation names the
    mesh, and so do its derivative and its transpose, on either side of such a map.
    """
    if mesh is None:
        return tree
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, whole), tree)


def placed(tree: PyTree, mesh: Mesh) -> PyTree:
    """A tree of arrays, chains last, that every host has in full, sharded over the devices."""
    leaves, structure = jax.tree.flatten(tree)
    shares = [NamedSharding(mesh, _share(leaf)) for leaf in leaves]
    return structure.unflatten(jax.jit(lambda leaves: leaves, out_shardings=shares)(leaves))


def as_numpy(leaf: Any) -> np.ndarray:
    """An array as a NumPy array; for a key, its data."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


class Hosts(eqx.Module):
    """The processes whose devices are in a mesh. All run the same code; decisions that depend on a
    clock, a terminal or a file are made by the first of them. Without a mesh, or on a single host,
    each is on its own.
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
        """True on the first host."""
        return not self.several or jax.process_index() == self.numbers[0]

    def each(self, number: int) -> np.ndarray:
        """The number given by each host. Every host waits for all the others."""
        if not self.several:
            return np.array([number])
        assert self.mesh is not None
        everywhere = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        # Every device of a host holds the host's number; the first of them is read.
        own = np.full(1, number, np.int32)
        said = jax.make_array_from_callback((self.mesh.size,), everywhere, lambda _: own)
        of_device = [device.process_index for device in self.mesh.devices.flat]
        first = [of_device.index(host) for host in self.numbers]
        return np.asarray(self.gathered(said))[first]

    def agree(self, number: int) -> int:
        """The first host's number."""
        return int(self.each(number)[0])

    def gathered(self, tree: PyTree) -> PyTree:
        """The same arrays in full on every host."""
        if not self.several:
            return tree
        assert self.mesh is not None
        arrays, rest = eqx.partition(tree, eqx.is_array)
        whole = jax.jit(lambda tree: tree, out_shardings=NamedSharding(self.mesh, PartitionSpec()))
        return eqx.combine(whole(arrays), rest)

    def refuse_different(self, what: str, *trees: PyTree) -> None:
        """Raise `ValueError` for values that differ between hosts: their devices would silently
        work on different problems.
        """
        if not self.several:
            return
        total = 0
        for leaf in filter(eqx.is_array_like, jax.tree.leaves(trees)):
            # A checksum, since only one number can be exchanged. Different values collide with
            # probability 2⁻³².
            total = zlib.crc32(as_numpy(leaf).tobytes(), total)
        if len(set(self.each(int(np.uint32(total).view(np.int32))))) > 1:
            raise ValueError(
                f"{what} must be the same on all hosts of `mesh`, but is not: create it in the same"
                " way on each, or send it from one to the others."
            )

    @contextlib.contextmanager
    def answering(self, advice: str) -> Iterator[None]:
        """A context in which hosts work together; raises `ConnectionError`, with advice, if one of
        them is lost.
        """
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if not self.several or not any(mark in str(error) for mark in _SILENCE):
                raise
            told = str(error).splitlines()[0][:200]
            raise ConnectionError(
                f"a host of `mesh` no longer answers: process {jax.process_index()} of"
                f" {self.numbers} got the error {told!r}. The chains of that host are lost."
                f" {advice}"
            ) from error
