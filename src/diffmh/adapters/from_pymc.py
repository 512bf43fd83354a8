"""From a PyMC model to its posterior as a function of hyperparameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..base.validate import Checked
from .posterior import Posterior, Sites, checked_theta, extra


class _Graph(eqx.Module):
    """A graph of PyTensor's as a JAX function of the hyperparameters and its inputs."""

    function: Callable[..., Any]
    parameters: tuple[str, ...] = eqx.field(static=True)
    inputs: tuple[str, ...] = eqx.field(static=True)
    outputs: tuple[str, ...] = eqx.field(static=True)

    def __call__(self, theta: Sites, x: Sites) -> Sites:
        given = [theta[name] for name in self.parameters] + [x[name] for name in self.inputs]
        return dict(zip(self.outputs, self.function(*given), strict=True))

    def only(self, theta: Sites, x: Sites) -> Array:
        """Its one output."""
        return self(theta, x)[self.outputs[0]]


class _Start(eqx.Module):
    """The model's own initial point, the same for every chain."""

    point: Sites

    def __call__(self, key) -> Sites:
        return self.point


def from_pymc(model: Any, theta: Checked[dict[str, Any]]) -> Posterior:
    """The posterior of a PyMC model as a function of its hyperparameters.

    `theta` gives hyperparameters by name: they are `pm.Data` of the model, of floats, and what
    derivatives are taken by. The density is PyMC's own on transformed variables, through PyTensor's
    JAX backend; the start is `model.initial_point()`; the sites include deterministic variables.

    Discrete variables become integers; a Bernoulli or categorical one has a proposal, others are
    given one by `posterior.kernel(proposals=...)`.

    Refused: names in `theta` that are not data of the model, or are data of whole numbers. A bound
    of a support that is a hyperparameter, `pm.Uniform("u", 0, top)`, is refused where the chain is
    differentiated, because PyMC's density compares u with it: write `top * pm.Uniform("v", 0, 1)`.

    >>> import diffmh, jax, pymc as pm                                       # doctest: +SKIP
    >>> with pm.Model() as model:                                            # doctest: +SKIP
    ...     scale = pm.Data("scale", 1.0)
    ...     mean = pm.Normal("mean", 0, scale)
    ...     pm.Normal("y", mean, 1, observed=[1.0, 2.0])
    >>> posterior = diffmh.from_pymc(model, theta={"scale": 1.0})            # doctest: +SKIP
    """
    with extra("from_pymc", "pymc"):
        from pymc import Model

    if not isinstance(model, Model):
        raise TypeError(
            f"`from_pymc(model, theta=...)`: `model` must be a `pymc.Model`, got {model!r}."
        )
    theta = checked_theta(theta, "from_pymc(model, theta=...)")
    data = {variable.name: variable for variable in model.data_vars}
    unknown = sorted(set(theta) - set(data))
    if unknown:
        raise ValueError(
            f"`from_pymc(model, theta=...)`: {unknown} are not data of the model, which has"
            f" {sorted(data)}: declare hyperparameters with `pm.Data(name, value)`."
        )
    whole = sorted(name for name in theta if data[name].dtype.startswith(("int", "uint", "bool")))
    if whole:
        raise ValueError(
            f"`from_pymc(model, theta=...)`: {whole} are data of whole numbers, which have no"
            " derivative: give `pm.Data(name, value)` floats."
        )
    graph = _Graphs(theta, {name: data[name] for name in theta})
    values, free = model.value_vars, model.free_RVs
    sites = [*free, *model.deterministics]
    names = tuple(value.name for value in values)
    density = graph.jaxified(values, [model.logp()], ("log density",))
    prior = graph.jaxified(values, [model.logp(vars=free, jacobian=False)], ("log prior",))
    observed = [*model.observed_RVs, *model.potentials]
    likelihood = graph.jaxified(values, [model.logp(vars=observed)], ("log likelihood",))
    constrain = graph.jaxified(values, model.replace_rvs_by_values(sites), _names(sites))
    inputs = {variable: variable.type(name=variable.name) for variable in free}
    forward = [_forward(model, variable, inputs) for variable in free]
    unconstrain = graph.jaxified(list(inputs.values()), forward, names)
    point = model.initial_point()
    start = {name: jnp.asarray(point[name]) for name in names}
    return Posterior(
        density.only,
        prior.only,
        likelihood.only,
        constrain,
        unconstrain,
        _Start(start),
        theta,
        {variable.name: count for variable in free if (count := _num_values(variable))},
    )


class _Graphs:
    """Graphs of a model with some of its data as inputs."""

    def __init__(self, theta: Sites, data: dict[str, Any]):
        import pytensor.tensor as pt

        self.names = tuple(theta)
        self.inputs = [
            pt.tensor(name, shape=np.shape(theta[name]), dtype=str(theta[name].dtype))  # pyright: ignore
            for name in theta
        ]
        self.stands_for = {
            data[name]: given.astype(data[name].dtype)
            for name, given in zip(self.names, self.inputs, strict=True)
        }

    def jaxified(self, inputs: list[Any], outputs: list[Any], names: tuple[str, ...]) -> _Graph:
        from pymc.sampling.jax import get_jaxified_graph
        from pytensor.graph.replace import clone_replace

        graphs: list[Any] = clone_replace(outputs, self.stands_for)  # pyright: ignore
        function = get_jaxified_graph(inputs=[*self.inputs, *inputs], outputs=graphs)
        return _Graph(function, self.names, _names(inputs), names)


def _num_values(variable: Any) -> int | None:
    """n where a discrete variable is known to be among `0, ..., n − 1`."""
    from pytensor.tensor.random.basic import BernoulliRV, CategoricalRV

    drawn = variable.owner.op
    if isinstance(drawn, BernoulliRV):
        return 2
    if isinstance(drawn, CategoricalRV):
        (weights,) = drawn.dist_params(variable.owner)
        return int(weights.shape[-1].eval())  # pyright: ignore[reportAttributeAccessIssue]
    return None


def _names(variables: list[Any]) -> tuple[str, ...]:
    return tuple(variable.name for variable in variables)


def _forward(model: Any, variable: Any, inputs: dict[Any, Any]) -> Any:
    """A variable's unconstrained value, as a graph of the values of all variables."""
    from pytensor.graph.replace import clone_replace

    transform = model.rvs_to_transforms[variable]
    if transform is None:
        return inputs[variable]
    free = transform.forward(variable, *variable.owner.inputs)
    return clone_replace([free], inputs)[0]
