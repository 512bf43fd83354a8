"""register: rules for primitives of one's own."""

from __future__ import annotations

from typing import Literal

from ..base import validate
from ..base.validate import Checked
from . import primitives
from .interpreter import RULES
from .plan import forget_plans
from .rules import by_evaluation


def register(
    primitive: Checked[str],
    kind: Checked[Literal["smooth", "jump", "evaluated"]],
    *,
    linear: Checked[bool] = False,
) -> None:
    """Says how programs may use a primitive that `sad` does not know, by its name.

    - `"smooth"`: continuous; its tangent is by JAX's JVP, its alternatives by evaluation. With
      `linear=True` it is linear in all of its operands together.
    - `"jump"`: a step function; as smooth between the steps, refused on continuous random values
      that depend on theta.
    - `"evaluated"`: never differentiated; alternatives by evaluation.

    For a distribution of one's own make a `sad.Sampler`: it needs no registration.

    >>> from diffmh import sad
    >>> sad.register("my_quantiser", "jump")
    """
    tables = {
        "smooth": primitives.SMOOTH,
        "jump": primitives.JUMPS,
        "evaluated": primitives.EVALUATED,
    }
    validate.text(primitive, "sad.register(primitive=...)")
    validate.choice(kind, "sad.register(kind=...)", tables)
    validate.flag(linear, "sad.register(linear=...)")
    tables[kind].add(primitive)
    forget_plans()
    RULES[primitive] = by_evaluation
    if linear:
        primitives.LINEAR_IN_ALL.add(primitive)
