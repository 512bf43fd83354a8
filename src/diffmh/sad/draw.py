"""Draws: discrete distributions that a program may draw from, and the primitive that draws."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Key

from ..base import validate
from ..base.validate import Checked, NotDifferentiable
from ..jaxprs import compat


@dataclasses.dataclass(frozen=True)
class Sampler:
    """A discrete distribution that a program may draw from: `sampler(key, *parameters)`. Create one
    to use a distribution that `diffmh.sad` does not have.

    **Arguments**

    - `invert(uniform, *parameters)`: one draw from one uniform on [0, 1), non-decreasing in it
      if the values are ordered. The program and its alternatives share the uniform.
    - `flips(value, parameters, tangents)`: a list of pairs `(flipped, weight)`: other values that
      the draw could have had, and the weights of flipping to them, linear in the tangents of the
      parameters.
    - `event_ndims`: for each parameter, the number of axes that one draw uses (1 for the logits of
      a categorical, otherwise 0).
    - `log_prob(value, *parameters)`: the log probability, up to terms without the parameters;
      `sad.Score` and `sad.Combined` need it.
    - `mean(*parameters)`: the mean; `sad.Smooth` needs it.
    - `in_range(*parameters)`: True if the distribution exists. Otherwise the value and derivative
      of the run are NaN. A NaN parameter is always out of range.
    - `has_score(parameters, tangents)`: False if a value has probability 0 and the derivative of
      its probability is not 0. The score does not exist there, and `sad.Combined` leaves it out.

    All functions are for one draw; arrays of parameters give arrays of draws. Values and weights of
    flips may have a leading axis, for many flips at once.

    >>> import jax, jax.numpy as jnp
    >>> from diffmh import sad
    >>> flip = lambda b, p, dp: [(~b, jnp.where(b, -dp[0], dp[0]))]
    >>> coin = sad.Sampler(lambda u, p: u < p, flip, (0,))
    >>> mean = sad.expectation(lambda p, key: coin(key, jnp.full(50, p)).mean())
    >>> round(float(jax.grad(mean)(0.3, jax.random.key(0))), 3)
    1.0
    """

    invert: Checked[Callable[..., Array]]
    flips: Checked[Callable[..., Sequence[tuple[Array, Array]]]]
    event_ndims: Checked[tuple[int, ...]]
    log_prob: Checked[Callable[..., Array]] | None = None
    mean: Checked[Callable[..., Array]] | None = None
    in_range: Checked[Callable[..., Any]] | None = None
    name: Checked[str] = "a `sad.Sampler`"
    has_score: Checked[Callable[..., Any]] | None = None

    def __post_init__(self):
        where = "sad.Sampler(invert, flips, event_ndims)"
        validate.function(self.invert, where, "invert", "invert(uniform, *parameters) -> value")
        validate.function(self.flips, where, "flips", "flips(value, parameters, tangents)")
        for name in ("log_prob", "mean", "in_range", "has_score"):
            if getattr(self, name) is not None:
                validate.function(getattr(self, name), where, name, f"{name}(...)")
        if not isinstance(self.event_ndims, tuple):
            raise TypeError(
                "`sad.Sampler(event_ndims=...)` must be a tuple with the number of axes of each"
                f" parameter, got {self.event_ndims!r}."
            )
        for count in self.event_ndims:
            validate.count(count, "sad.Sampler(event_ndims=...)", least=0)
        validate.text(self.name, "sad.Sampler(name=...)")

    def __call__(self, key: Checked[Key[Array, ""]], *parameters: ArrayLike) -> Array:
        if len(parameters) != len(self.event_ndims):
            raise TypeError(
                f"{self.name} has {len(self.event_ndims)} parameters by its `event_ndims`, got"
                f" {len(parameters)}."
            )
        arrays = [
            validate.array_of(parameter, f"parameter {number} of {self.name}")
            for number, parameter in enumerate(parameters)
        ]
        for number, array in enumerate(arrays):
            if jnp.iscomplexobj(array):
                validate.real_dtype(array.dtype, f"parameter {number} of {self.name}")
        # The axes of one draw are the last of each parameter; those before them are broadcast.
        shape = jnp.broadcast_shapes(
            *(a.shape[: a.ndim - n] for a, n in zip(arrays, self.event_ndims, strict=True))
        )
        arrays = [
            jnp.broadcast_to(a, (*shape, *a.shape[a.ndim - n :]))
            for a, n in zip(arrays, self.event_ndims, strict=True)
        ]
        dtype = jnp.result_type(
            float, *(a.dtype for a in arrays if jnp.issubdtype(a.dtype, jnp.floating))
        )
        return sample(
            jax.random.uniform(validate.typed_key(key), shape, dtype), *arrays, sampler=self
        )[0]

    def values(self, uniform: Array, *parameters: Array) -> Array:
        """Draws of the uniform's shape."""
        return mapped(self.invert, uniform.ndim)(uniform, *parameters)

    def candidates(
        self, value: Array, parameters: Sequence[Array], tangents: Sequence[Array]
    ) -> tuple[Array, Array]:
        """Flipped values, shape `(C, *value.shape)`, and their weights, `(C, P, *value.shape)`."""

        def one(value, parameters, tangents):
            pairs = self.flips(value, parameters, tangents)
            flipped = [jnp.atleast_1d(jnp.asarray(other, value.dtype)) for other, _ in pairs]
            weights = [jnp.atleast_1d(weight) for _, weight in pairs]
            return jnp.concatenate(flipped), jnp.concatenate(weights)

        by_draw = mapped(one, value.ndim, out_axes=1)
        if len(tangents[0]) == 1:
            flipped, weight = by_draw(
                value, tuple(parameters), tuple(tangent[0] for tangent in tangents)
            )
            return flipped, weight[:, None]
        # Flipped values do not depend on the tangents (weights are linear in them), so they are the
        # same for every parameter and have no parameter axis.
        by_parameter = jax.vmap(by_draw, in_axes=(None, None, 0), out_axes=(None, 1))
        return by_parameter(value, tuple(parameters), tuple(tangents))

    def num_candidates(self, drawn: Any, parameters: Sequence[Any]) -> int:
        """The total number of flips for draws and parameters of these shapes."""
        one = [
            jax.ShapeDtypeStruct(parameter.shape[parameter.ndim - axes :], parameter.dtype)
            for parameter, axes in zip(parameters, self.event_ndims, strict=True)
        ]
        pairs = jax.eval_shape(self.flips, jax.ShapeDtypeStruct((), drawn.dtype), one, one)
        return sum(math.prod(weight.shape) for _, weight in pairs) * math.prod(drawn.shape)

    def log_probs(self, value: Array, *parameters: Array) -> Array:
        """The log probabilities of draws of the value's shape."""
        if self.log_prob is None:
            raise NotDifferentiable(
                f"{self.name} has no `log_prob`, which the score needs: provide it, or use"
                " `sad.Alternatives`."
            )
        return mapped(self.log_prob, value.ndim)(value, *parameters)

    def means(self, shape: tuple[int, ...], *parameters: Array) -> Array:
        """The means of draws of the given shape."""
        if self.mean is None:
            raise NotDifferentiable(
                f"{self.name} has no `mean`, which `sad.Smooth` needs: provide it, or use"
                " another estimator."
            )
        return mapped(self.mean, len(shape))(*parameters)

    def in_ranges(self, *parameters: Array) -> Bool[Array, ""]:
        """True if all draws have parameters in range."""
        known = [
            jnp.all(~jnp.isnan(parameter))
            for parameter in parameters
            if jnp.issubdtype(parameter.dtype, jnp.floating)
        ]
        if self.in_range is not None:
            draws = parameters[0].ndim - self.event_ndims[0]
            known.append(jnp.all(mapped(self.in_range, draws)(*parameters)))
        return functools.reduce(jnp.logical_and, known, jnp.ones((), bool))

    def scoreless(
        self, ndim: int, parameters: Sequence[Array], tangents: Sequence[Array]
    ) -> Bool[Array, ""]:
        """True if a draw has no score along a direction, of which the tangents have one each."""
        if self.has_score is None:
            return jnp.zeros((), bool)
        along = jax.vmap(mapped(self.has_score, ndim), in_axes=(None, 0))
        return ~jnp.all(along(tuple(parameters), tuple(tangents)))


def mapped(function: Callable[..., Any], num_axes: int, out_axes: int = 0) -> Callable[..., Any]:
    """The function of arrays with `num_axes` more axes."""
    for _ in range(num_axes):
        function = jax.vmap(function, out_axes=out_axes)
    return function


def _abstract(uniform, *parameters, sampler):
    result = jax.eval_shape(
        sampler.values, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (uniform, *parameters))
    )
    return [compat.shaped(result.shape, result.dtype)]


def refuse_plain(primals: Any, tangents: Any, **params: Any) -> Any:
    """Raise an error: JAX would silently drop the derivative that passes through a draw."""
    raise NotDifferentiable(
        "JAX cannot differentiate a draw of `diffmh.sad` by itself; the derivative would be wrong."
        " Differentiate `sad.expectation(program)` instead of `program`."
    )


SAMPLE = "sad_sample"
# True if the parameters of a draw are in range; used in the programs of `ranges`.
VALID = "sad_valid"
sample = compat.new_primitive(
    SAMPLE,
    lambda *operands, sampler: [sampler.values(*operands)],
    _abstract,
    jvp=refuse_plain,
)
