"""From a PyMC model to its posterior as a function of hyperparameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..base.validate import Checked
from .posterior import OfModel, Posterior, Sites, checked_theta, extra


class _Graph(OfModel):
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

    `theta` gives hyperparameters by name: they are `pm.Data` of the model, of floats, and
    derivatives are taken with respect to them. The density is PyMC's own on transformed variables,
    through PyTensor's JAX backend; the start is `model.initial_point()`; the sites include
    deterministic variables.

    Discrete variables become integers; the values of a Bernoulli, categorical, binomial or discrete
    uniform one are known; others are given a proposal, `posterior.kernel(proposals=...)`
    and `posterior.sample(key, proposals=...)`.

    Refused: names in `theta` that are not data of the model, or are integers. A bound
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
            f"`from_pymc(model, theta=...)`: {whole} are integer data, which have no derivative:"
            " give `pm.Data(name, value)` floats."
        )
    graph = _Graphs(theta, {name: data[name] for name in theta})
    values, free = model.value_vars, model.free_RVs
    sites = [*free, *model.deterministics]
    names = tuple(value.name for value in values)
    density = graph.jaxified(values, [model.logp()], ("log density",))
    terms = [model.logp(vars=[variable], jacobian=False) for variable in free]
    by_site = graph.jaxified(values, terms, _names(free))
    prior = graph.jaxified(values, [model.logp(vars=free, jacobian=False)], ("log prior",))
    observed = [*model.observed_RVs, *model.potentials]
    likelihood = graph.jaxified(values, [model.logp(vars=observed)], ("log likelihood",))
    terms: Any = model.logp(vars=observed, sum=False)
    each = graph.jaxified(values, terms, _names(observed))
    constrain = graph.jaxified(values, model.replace_rvs_by_values(sites), _names(sites))
    inputs = {variable: variable.type(name=variable.name) for variable in free}
    forward = [_forward(model, variable, inputs) for variable in free]
    unconstrain = graph.jaxified(list(inputs.values()), forward, names)
    point = model.initial_point()
    start = {name: jnp.asarray(point[name]) for name in names}
    known = {variable.name: _values(variable) for variable in free}
    ranges = {name: values for name, values in known.items() if values is not None}
    return Posterior(
        density.only,
        prior.only,
        likelihood.only,
        by_site,
        constrain,
        unconstrain,
        _Start(start),
        theta,
        {name: len(values) for name, values in ranges.items() if values.start == 0},
        {name: values for name, values in ranges.items() if values.start != 0},
        each,
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


def _values(variable: Any) -> range | None:
    """The values of a discrete variable, if they are known to be consecutive integers."""
    from pymc.distributions.discrete import DiscreteUniformRV
    from pytensor.tensor.random import basic

    drawn = variable.owner.op
    if isinstance(drawn, basic.BernoulliRV):
        return range(2)
    known = hasattr(drawn, "dist_params")
    parameters: list[Any] = list(drawn.dist_params(variable.owner)) if known else []
    if isinstance(drawn, basic.CategoricalRV):
        return range(int(parameters[0].shape[-1].eval()))
    if isinstance(drawn, basic.BinomialRV):
        count = _constant(parameters[0])
        return None if count is None else range(count + 1)
    if isinstance(drawn, DiscreteUniformRV):
        first, last = map(_constant, parameters)
        return None if first is None or last is None else range(first, last + 1)
    return None


def _constant(parameter: Any) -> int | None:
    """The one number that a parameter of a distribution is, if it is a constant of the graph."""
    from pytensor.graph.basic import Constant
    from pytensor.graph.traversal import ancestors

    # Data, hyperparameters and random variables (whose generators are shared) are not constants.
    roots = [one for one in ancestors([parameter]) if one.owner is None]
    if not all(isinstance(root, Constant) for root in roots):
        return None
    values = np.unique(np.asarray(parameter.eval()))
    return int(values[0]) if values.size == 1 else None


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
