"""register: rules for other primitives."""

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
    """Declare how programs may use a primitive, given by name, that `sad` does not know.

    - `"smooth"`: continuous. Its tangent is JAX's JVP; alternatives evaluate it. With
      `linear=True` it is linear in all of its operands together.
    - `"jump"`: a step function. As smooth between the steps; an error on continuous random values
      that depend on theta.
    - `"evaluated"`: never differentiated; alternatives evaluate it.

    To add a distribution, create a `sad.Sampler`, which needs no registration.

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
