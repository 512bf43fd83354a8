"""The form of whatever the methods of an update return, checked where it is used: an update may be
the user's own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..base import validate
from .decisions import Decision
from .kernel import State, Step, Update


def checked_step(update: Update, made: Any, before: State) -> Step:
    """`made`, which an update's `step` returned, if it is a step from `before`."""
    name = update.name_in_messages
    if not isinstance(made, Step):
        raise TypeError(f"`{name}.step` must return a `Step`, got {described(made)}.")
    if not isinstance(made.decisions, tuple) or not all(
        isinstance(decision, Decision) for decision in made.decisions
    ):
        raise TypeError(
            f"`{name}.step` must return a `Step` whose `decisions` are a tuple of decisions, such"
            f" as `(Acceptance.draw(uniform, log_ratio),)`, got {described(made.decisions)}."
        )
    checked_state(made.after, before, f"{name}.step")
    return made


def checked_state(state: Any, like: State, function: str) -> State:
    """`state`, which a method of an update returned, if it is one of the chain's form."""
    if not isinstance(state, State):
        raise TypeError(f"`{function}` must return a `State`, got {described(state)}.")
    # The state is carried by a loop, whose carry has one form.
    validate.same_form(state.x, like.x, f"the state that `{function}` leads to")
    return state


def checked_noise(noise: PyTree, num_steps: int, function: str) -> PyTree:
    """Randomness with the steps as the leading axis of each array."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(noise):
        if jnp.shape(leaf)[:1] != (num_steps,):
            raise TypeError(
                f"`{function}(key, x, num_steps)` must return arrays whose leading axis is"
                f" `num_steps`, here {num_steps}, got shape {jnp.shape(leaf)}"
                f"{' at ' + jax.tree_util.keystr(path) if path else ''}: draw the noise of all"
                " steps at once, such as `jax.random.uniform(key, (num_steps,))`."
            )
    return noise


def described(value: Any) -> str:
    """A value in the words of an error message."""
    if isinstance(value, tuple):
        return f"a tuple ({', '.join(described(part) for part in value)})"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array of {value.dtype}{list(value.shape)}"
    return f"a `{type(value).__name__}`"
