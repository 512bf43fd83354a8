"""From a PyMC model to its posterior as a function of hyperparameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .posterior import Posterior, Sites, checked_theta


class _Graph(eqx.Module):
    """A graph of PyTensor's as a JAX function of the hyperparameters and the state."""

    function: Callable[..., Any]
    parameters: tuple[str, ...] = eqx.field(static=True)
    inputs: tuple[str, ...] = eqx.field(static=True)
    outputs: tuple[str, ...] = eqx.field(static=True)

    def log_density(self, theta: Sites, x: Sites) -> Array:
        return self(theta, x)[self.outputs[0]]

    def __call__(self, theta: Sites, x: Sites) -> Sites:
        given = [theta[name] for name in self.parameters] + [x[name] for name in self.inputs]
        return dict(zip(self.outputs, self.function(*given), strict=True))


class _Start(eqx.Module):
    """The model's own initial point, the same for every chain."""

    point: Sites

    def __call__(self, key) -> Sites:
        return self.point


def from_pymc(model: Any, theta: dict[str, Any]) -> Posterior:
    """The posterior of a PyMC model as a function of its hyperparameters.

    `theta` gives hyperparameters by name: they are `pm.Data` of the model, of floats, and what
    derivatives are taken by. The density is PyMC's own on transformed variables, through PyTensor's
    JAX backend; the start is `model.initial_point()`; the sites include deterministic variables.

    Refused: names in `theta` that are not data of the model.

    >>> import diffmh, jax, pymc as pm                                       # doctest: +SKIP
    >>> with pm.Model() as model:                                            # doctest: +SKIP
    ...     scale = pm.Data("scale", 1.0)
    ...     mean = pm.Normal("mean", 0, scale)
    ...     pm.Normal("y", mean, 1, observed=[1.0, 2.0])
    >>> posterior = diffmh.from_pymc(model, theta={"scale": 1.0})            # doctest: +SKIP
    """
    import pytensor.tensor as pt
    from pymc.sampling.jax import get_jaxified_graph
    from pytensor.graph.replace import clone_replace

    theta = checked_theta(theta, "from_pymc(model, theta=...)")
    data = {variable.name: variable for variable in model.data_vars}
    unknown = sorted(set(theta) - set(data))
    if unknown:
        raise ValueError(
            f"`from_pymc(model, theta=...)`: {unknown} are not data of the model, which has"
            f" {sorted(data)}: declare hyperparameters with `pm.Data(name, value)`."
        )
    names = tuple(theta)
    stands_for = {
        data[name]: pt.tensor(name, shape=np.shape(theta[name]), dtype=str(theta[name].dtype))
        for name in names
    }
    values = model.value_vars
    free = [*model.free_RVs, *model.deterministics]

    def as_function(graphs: list[Any], outputs: tuple[str, ...]) -> _Graph:
        cast = {shared: given.astype(shared.dtype) for shared, given in stands_for.items()}
        inputs = [*stands_for.values(), *values]
        function = get_jaxified_graph(inputs=inputs, outputs=clone_replace(graphs, cast))
        return _Graph(function, names, tuple(value.name for value in values), outputs)

    density = as_function([model.logp()], ("log density",))
    sites = as_function(model.replace_rvs_by_values(free), tuple(site.name for site in free))
    point = model.initial_point()
    start = {value.name: jnp.asarray(point[value.name]) for value in values}
    return Posterior(density.log_density, sites, _Start(start), theta, {})
