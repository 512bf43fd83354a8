"""sample: the draws themselves, as ArviZ has them, written out block by block."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key, PyTree

from . import _admission, _validate
from ._lowering.chains import over_chains
from ._lowering.manual import varying
from ._sharding import Hosts, check_shares
from ._validate import Checked
from .bar import Bar
from .chain import Chain
from .checkpoint import DRAWS, Checkpoint, Store, checkpoint_of, fingerprint, lowered, restored
from .decisions import acceptances
from .estimators import ValueOnly
from .kernel import Kernel
from .loop import Loop
from .running import at_home, shared_out
from .simulation import Simulation, nothing

if TYPE_CHECKING:
    from xarray import DataTree

# Bytes of draws that wait on the device to be written out, unless the user says otherwise; and
# into how many stretches a run is cut at least, for its bar and its checkpoints.
_WAITING, _STRETCHES = 2**26, 64


class Rows(eqx.Module):
    """Draws along the leading axis, chains last: states, how many decisions led from the one before
    and how many of them accepted, and the log density.
    """

    x: PyTree
    decisions: Int[Array, "n C"]
    accepted: Int[Array, "n C"]
    lp: Float[Array, "n C"] | None = None


def sample(
    kernel: Checked[Kernel],
    theta: PyTree,
    key: Checked[Key[Array, ""]],
    *args: Any,
    init: PyTree | Callable[[Key[Array, ""]], PyTree],
    num_samples: Checked[int],
    num_chains: Checked[int] = 16,
    burn_in: Checked[int] = 0,
    thin: Checked[int] = 1,
    block_size: Checked[int] | None = None,
    progress: bool = False,
    checkpoint: Checked[Checkpoint | str | os.PathLike] | None = None,
    mesh: Checked[Mesh] | None = None,
) -> DataTree:
    """The states of a kernel's chains, as an ArviZ `DataTree` with `posterior` and `sample_stats`.

    They are the chains, bit for bit, that an `expectation` with the same kernel, key and `init`
    averages over: draw `i` of chain `c` is its state after `burn_in + (i + 1)·thin` steps.

    **Arguments**

    - `kernel`, `theta`, `key`, `args`, `init`, `burn_in`, `num_chains`: as for `expectation`.
    - `num_samples`: how many draws of each chain are kept; between two of them are `thin` steps.
    - `block_size`: how many draws of each chain wait to be written out, about 64 MB of them if left
      out. The memory that is needed beside the result is theirs.
    - `progress`: a bar on stderr, where that is a terminal.
    - `checkpoint`: a directory, or `diffmh.Checkpoint`. The draws are then written there, and what
      is returned reads them from disk when they are asked for: memory does not grow with
      `num_samples`. A run that was killed goes on from there with the same draws.
    - `mesh`: as for `expectation`. The draws do not depend on it, and every host gets all of them.

    **Returns** a `DataTree`. Variables of `posterior` are named after the state's leaves (`mu`, or
    `level.0` in a nested state; `x` if the state is a single array), of shape
    `(chain, draw, *leaf)`. `sample_stats` has `acceptance_rate` since the draw before (NaN for a
    kernel without acceptances) and `lp`, the log density (of the first update's, if they differ).

    **Refused**: a start of density zero; a checkpoint of other draws, or a damaged one, or on
    several hosts.

    >>> import jax, diffmh
    >>> density = lambda theta, x: -0.5 * (x["a"] - theta) ** 2 - 0.5 * x["b"] ** 2
    >>> pair = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(1.5))
    >>> start = {"a": 0.0, "b": 0.0}
    >>> draws = diffmh.sample(pair, 0.5, jax.random.key(0), init=start, num_samples=500, thin=2)
    >>> dict(draws.posterior.sizes), sorted(draws.posterior.data_vars)
    ({'chain': 16, 'draw': 500}, ['a', 'b'])
    """
    count = _validate.count(num_chains, "num_chains=...")
    shared = None if mesh is None else check_shares(mesh, count, "sample(mesh=...)")
    walk = _walk_of(kernel, theta, key, args, init, num_samples, count, burn_in, thin, shared)
    if block_size is not None:
        block_size = _validate.count(block_size, "sample(block_size=...)")
    place, hosts = checkpoint_of(checkpoint), Hosts(shared)
    if place is not None and hosts.several:
        raise ValueError(
            "`sample(checkpoint=...)` is for one host, and `mesh` has devices of several: leave it"
            " out, or let each host sample chains of its own, with a key of its own."
        )
    with (
        hosts.answering("Start the same script again on all hosts, or on fewer."),
        Bar("sample", walk.num_blocks, progress and hosts.leads) as bar,
    ):
        hosts.refuse_different("theta, key and args of `sample`", theta, key, args)
        if place is None:
            arrays = [np.empty(shape, dtype) for shape, dtype in walk.forms]
            _fill(walk, arrays, block_size, bar)
        else:
            with Store(place) as store:
                arrays = _fill_on_disk(walk, store, block_size, bar)
    return _data_tree(walk, arrays)


class Walk(eqx.Module):
    """What is to be sampled: the chains without derivatives, and how they are thinned."""

    simulation: Simulation
    theta: PyTree
    key: Key[Array, ""]
    args: tuple[Any, ...]
    thin: int = eqx.field(static=True)

    @property
    def loop(self) -> Loop:
        return Loop(self.simulation, self.theta, self.key, self.args, False)

    @property
    def num_blocks(self) -> int:
        return self.loop.num_blocks

    @property
    def num_draws(self) -> int:
        return self.simulation.num_samples // self.thin

    @property
    def forms(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shape and type of each array of draws: the state's leaves, acceptance rate and lp."""
        count = (self.simulation.num_chains, self.num_draws)
        leaves = jax.tree.leaves(self.loop.stepper.one)
        real = jnp.zeros(()).dtype
        return [*(((*count, *leaf.shape), leaf.dtype) for leaf in leaves), *[(count, real)] * 2]

    def draws_before(self, block: int) -> int:
        """How many draws of each chain come before this block."""
        steps = min(block * self.loop.block_steps, self.simulation.num_steps)
        return max(0, steps - self.simulation.burn_in) // self.thin

    def blocks_at_once(self, block_size: int | None) -> int:
        if block_size is None:
            each = sum(math.prod(s[2:]) * np.dtype(d).itemsize for s, d in self.forms)
            block_size = max(1, _WAITING // (each * self.simulation.num_chains))
        by_memory = max(1, block_size * self.thin // self.loop.block_steps)
        return min(by_memory, -(-self.num_blocks // _STRETCHES))


def _walk_of(kernel, theta, key, args, init, num_samples, num_chains, burn_in, thin, mesh) -> Walk:
    where = "sample(kernel, theta, key, *args, ...)"
    why = (
        "`sample` returns draws, whose derivative by theta would silently be zero: differentiate"
        " what `diffmh.expectation` returns."
    )
    given = _admission.given(kernel, theta, key, args, init, where, why)
    thin = _validate.count(thin, "sample(thin=...)")
    simulation = Simulation(
        kernel,
        given.init,
        nothing,
        ValueOnly(),
        _validate.count(_validate.count(num_samples, "num_samples=...") * thin, "num_samples=..."),
        _validate.count(burn_in, "burn_in=...", least=0),
        num_chains,
        mesh=mesh,
    )
    theta, key, args = given.theta, given.key, given.args
    if not _validate.concrete(theta, key, args):
        raise TypeError("`sample` writes draws out and cannot be traced: call it outside of `jit`.")
    _admission.check_start(simulation, theta, key, args)
    return Walk(simulation, theta, key, args, thin)


@eqx.filter_jit
def _advance(walk: Walk, chains: Chain, first, last, num_blocks: int) -> tuple[Chain, Rows]:
    """Takes the chains through the blocks from `first` to before `last`, at most `num_blocks`; from
    their start if that is block 0. Row 0 is the draw that was not complete when block `first`
    began.
    """
    share = functools.partial(_advance_share, thin=walk.thin, num_blocks=num_blocks)
    return shared_out(share, walk.loop, chains, first, last)


@varying
def _advance_share(loop: Loop, chains: Chain, first, last, *, thin: int, num_blocks: int):
    simulation, stepper = loop.simulation, loop.stepper
    chains = jax.lax.cond(first == 0, lambda _: loop.start().chains, lambda chains: chains, chains)
    # A window of `thin` steps may be cut at both ends; what is before the samples goes to the last.
    size = num_blocks * loop.block_steps // thin + 2
    # States of the support, not zeros: the log density is asked of all rows.
    empty = lambda leaf: jnp.broadcast_to(leaf, (size + 1, *leaf.shape))
    none = jnp.zeros((size + 1, simulation.num_chains), int)
    rows = Rows(jax.tree.map(empty, chains.state.x), none, none)
    offset = jnp.maximum(first * loop.block_steps - simulation.burn_in, 0) // thin

    def block(index, carry):
        parameters = stepper.parameters(jax.random.fold_in(loop.key, index))
        noise = loop.block_noise(index)
        begin = index * loop.block_steps
        end = jnp.minimum(begin + loop.block_steps, simulation.num_steps)

        def one(chain, noise):
            nothing = (jnp.zeros((), int), jnp.zeros((), int))
            return stepper.step(parameters, chain, noise, nothing, _note)

        def step(i, carry):
            chains, rows = carry
            chains, (made, taken) = over_chains(one)(
                chains, jax.tree.map(lambda leaf: leaf[i], noise)
            )
            place = (begin + i - simulation.burn_in) // thin - offset
            place = jnp.where(begin + i < simulation.burn_in, size, place)
            put = lambda rows, leaf: rows.at[place].set(leaf)
            return chains, Rows(
                jax.tree.map(put, rows.x, chains.state.x),
                rows.decisions.at[place].add(made),
                rows.accepted.at[place].add(taken),
            )

        return jax.lax.fori_loop(0, end - begin, step, carry)

    chains, rows = jax.lax.fori_loop(first, last, block, (chains, rows))
    density = lambda x: simulation.kernel.updates()[0].log_density(loop.theta, x, *loop.args)
    lp = jax.lax.map(over_chains(density), rows.x)
    return chains, Rows(rows.x, rows.decisions, rows.accepted, lp)


def _note(record, step, events):
    made, taken = acceptances(step.decisions)
    return record[0] + made, record[1] + taken


class _Unfinished(eqx.Module):
    """Between two stretches: where the chains are, and the counts of the draw that is not yet
    complete.
    """

    chains: Chain
    decisions: Int[np.ndarray, "C"]
    accepted: Int[np.ndarray, "C"]


def _begin(walk: Walk) -> _Unfinished:
    chains = eqx.filter_eval_shape(lambda: walk.loop.start().chains)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), chains)
    zeros = at_home(walk.loop, zeros)
    none = np.zeros(walk.simulation.num_chains, np.int32)
    return _Unfinished(zeros, none, none)


def _stretch(walk: Walk, at: _Unfinished, first: int, last: int, num_blocks: int, arrays):
    """Draws the blocks from `first` to before `last` into `arrays`."""
    chains, rows = _advance(walk, at.chains, jnp.int32(first), jnp.int32(last), num_blocks)
    rows = Hosts(walk.simulation.mesh).gathered(rows)
    low, high = walk.draws_before(first), walk.draws_before(last)
    here = slice(0, high - low)
    decisions, accepted = (np.array(count, np.int32) for count in (rows.decisions, rows.accepted))
    decisions[0] += at.decisions
    accepted[0] += at.accepted
    with np.errstate(invalid="ignore"):
        rate = accepted / decisions
    leaves = [*jax.tree.leaves(rows.x), rate, rows.lp]
    for array, leaf in zip(arrays, leaves, strict=True):
        array[:, low:high] = np.moveaxis(np.asarray(leaf)[here], -1, 0)
    # The last row holds the steps before the samples, which count for no draw.
    rest = high - low
    return _Unfinished(chains, decisions[rest], accepted[rest])


def _fill(walk: Walk, arrays: Sequence[np.ndarray], block_size: int | None, bar: Bar) -> None:
    at, count = _begin(walk), walk.blocks_at_once(block_size)
    for first in range(0, walk.num_blocks, count):
        last = min(first + count, walk.num_blocks)
        at = _stretch(walk, at, first, last, count, arrays)
        bar.reached(last)


def _fill_on_disk(walk: Walk, store: Store, block_size: int | None, bar: Bar) -> list[np.ndarray]:
    count = walk.blocks_at_once(block_size)
    at, problem = _begin(walk), _problem(walk, count)
    files = [store.directory / DRAWS / f"{i:03d}.npy" for i in range(len(walk.forms))]
    found = store.load()
    if found is None:
        store.save(problem, _groups(at, [], 0))
        arrays = _new_files(walk, files, store)
        begin, sums = 0, []
    else:
        store.refuse_another(problem, found[0])
        saved = found[1]
        at, begin = restored(saved["chains"], at), int(saved["done"][0])
        sums = [int(number) for number in saved["sums"][0]]
        arrays = _old_files(walk, files, store, begin)
        _refuse_unless_whole(walk, arrays, sums, count, store)
    bar.reached(begin)
    for first in range(begin, walk.num_blocks, count):
        last = min(first + count, walk.num_blocks)
        at = _stretch(walk, at, first, last, count, arrays)
        sums.append(_sum(walk, arrays, first, last))
        if store.due or last == walk.num_blocks:
            for array in arrays:
                array.flush()
            store.save(problem, _groups(at, sums, last))
        bar.reached(last)
    return [np.load(file, mmap_mode="r") for file in files]


def _problem(walk: Walk, count: int) -> dict[str, str]:
    # Without the mesh: draws begun on several devices may be continued on any number of them.
    alone = dataclasses.replace(walk.simulation, mesh=None)
    walk = dataclasses.replace(walk, simulation=alone)
    at = _begin(walk)
    text = lowered(_advance, walk, at.chains, jnp.int32(0), jnp.int32(1), count)
    kernel = eqx.filter((walk.simulation.kernel, walk.simulation.init), eqx.is_array)
    return fingerprint(text, theta=walk.theta, key=walk.key, args=walk.args, kernel=kernel)


def _groups(at: _Unfinished, sums: list[int], done: int) -> dict[str, list[Any]]:
    return {
        "chains": jax.tree.leaves(at),
        "sums": [np.array(sums, np.uint32)],
        "done": [np.array(done)],
    }


def _new_files(walk: Walk, files: Sequence[pathlib.Path], store: Store) -> list[np.memmap]:
    """Files of their full size: a disk that is too small is seen now."""
    try:
        files[0].parent.mkdir(exist_ok=True)
        arrays = []
        for file, (shape, dtype) in zip(files, walk.forms, strict=True):
            array = np.lib.format.open_memmap(file, "w+", np.dtype(dtype), shape)
            if hasattr(os, "posix_fallocate"):
                with file.open("r+b") as opened:
                    os.posix_fallocate(opened.fileno(), 0, os.path.getsize(file))
            arrays.append(array)
    except OSError as error:
        size = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in walk.forms)
        for file in files:
            file.unlink(missing_ok=True)
        raise OSError(
            f"{store.name}: there is no room for {size:,} bytes of draws ({error.strerror}). Make"
            " room, or keep fewer with `thin`."
        ) from error
    return arrays


def _old_files(walk: Walk, files, store: Store, begin: int) -> list[np.memmap]:
    if begin == 0:
        return _new_files(walk, files, store)
    try:
        # To read first: what is opened for writing is made as long as its header says.
        found = [(a.shape, a.dtype) for a in (np.load(file, mmap_mode="r") for file in files)]
    except (OSError, ValueError) as error:
        raise ValueError(_damaged(store)) from error
    if found != [(shape, np.dtype(dtype)) for shape, dtype in walk.forms]:
        raise ValueError(_damaged(store))
    return [np.load(file, mmap_mode="r+") for file in files]


def _refuse_unless_whole(walk: Walk, arrays, sums: list[int], count: int, store: Store) -> None:
    for number, expected in enumerate(sums):
        first = number * count
        if _sum(walk, arrays, first, min(first + count, walk.num_blocks)) != expected:
            raise ValueError(_damaged(store))


def _damaged(store: Store) -> str:
    return (
        f"{store.name}: the draws in {DRAWS!r} are damaged: a file is missing, cut short or"
        " changed. Delete the directory to begin anew; nothing was overwritten."
    )


def _sum(walk: Walk, arrays: Sequence[np.ndarray], first: int, last: int) -> int:
    """A checksum of the draws of some blocks."""
    total = 0
    for array in arrays:
        part = array[:, walk.draws_before(first) : walk.draws_before(last)]
        total = zlib.crc32(np.ascontiguousarray(part).tobytes(), total)
    return total


def names(state: PyTree) -> list[str]:
    """A name for each leaf of a state: its place, with dots; `x` for a state that is one array."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return [jax.tree_util.keystr(path, simple=True, separator=".") or "x" for path in paths]


def _data_tree(walk: Walk, arrays: Sequence[np.ndarray]) -> DataTree:
    try:
        import arviz_base
    except ModuleNotFoundError as error:
        if error.name != "arviz_base":
            raise
        raise ModuleNotFoundError(
            "`sample` returns what ArviZ has for draws, which is not installed:"
            ' pip install "diffmh[samples]"',
            name="arviz_base",
        ) from None
    *states, rate, lp = arrays
    posterior = dict(zip(names(walk.loop.stepper.one), states, strict=True))
    groups = {"posterior": posterior, "sample_stats": {"acceptance_rate": rate, "lp": lp}}
    tree = arviz_base.from_dict(groups, check_conventions=False)
    for group in groups:
        tree[group].attrs["inference_library"] = "diffmh"
    tree["posterior"].attrs["thinning_interval"] = walk.thin
    return tree
