"""The same kernel on another density: what a kernel made for a posterior becomes where powers of
its prior and likelihood are parameters too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array

from ..core.kernel import Kernel
from ..jaxprs.once import once
from ..kernels import BlockGibbs, Sweep
from ..kernels.function import FunctionUpdate

Density = Callable[..., Array]


def with_density(kernel: Kernel, old: Density, new: Density) -> Kernel:
    """The kernel with the density `new` wherever it has `old`.

    `new` may take another theta than `old`, so nothing but the density may depend on theta, and
    every update must have it. Raises `ValueError` otherwise.

    >>> import diffmh
    >>> old, new = lambda theta, x: -theta * x**2, lambda theta, x: -theta["a"] * x**2
    >>> walk = diffmh.MetropolisHastings(old, diffmh.GaussianWalk(1.0))
    >>> with_density(walk, old, new).density({"a": 2.0}, 3.0)
    -18.0
    """
    made = _replaced(kernel, once(old), once(new))
    for update in made.updates():
        if update.density_identity is not once(new):
            raise ValueError(
                f"`kernel`: {update.name_in_messages} has another log density than the posterior's:"
                " make it from `posterior.log_density`, or pass a function of a density, such as"
                " `kernel=lambda density: diffmh.Langevin(density, 0.1)`."
            )
        if update.has_own_parameters or isinstance(update, BlockGibbs | FunctionUpdate):
            raise ValueError(
                f"`kernel`: {update.name_in_messages} depends on theta not only through its log"
                " density, and theta has the powers of prior and likelihood too: pass a function of"
                " a density that knows both, `kernel=lambda density: ...`."
            )
    return made


def _replaced(kernel: Kernel, old: Density, new: Density) -> Kernel:
    def is_density(node: Any) -> bool:
        if node is old:
            return True
        # A method of a module is a new object whenever it has been through `jit`.
        alike = isinstance(old, eqx.Module) and type(node) is type(old)
        return alike and bool(eqx.tree_equal(node, old))

    def one(node: Any) -> Any:
        if isinstance(node, Sweep):
            at, count = node.kernel_at, node.num_sites
            return Sweep(lambda site: _replaced(at(site), old, new), count)
        return new if is_density(node) else node

    return jax.tree.map(
        one, kernel, is_leaf=lambda node: isinstance(node, Sweep) or is_density(node)
    )
