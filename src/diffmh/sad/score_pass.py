"""The score pass: a program with its draws held fixed, as a plain JAX function.

Its derivative by JAX is that of the program along its own path. There are two ways to account for
the draws. With the *score*, each term x of the result gets a *credit* for the draws before it,
`(x − b) log P(draws so far)` with a baseline b, whose derivative is added to the estimate. With
`smooth`, the derivative of each draw is taken to be that of its mean. Then integers that
depend on draws have a *shadow*: a float of the same value through which JAX differentiates.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..core.autodiff import moving
from ..jaxprs import compat
from ..jaxprs.program import (
    Atom,
    Cond,
    Constant,
    Equation,
    Program,
    Scan,
    Variable,
    While,
    spread,
    until_stable,
)
from .analysis import Analysis
from .draw import SAMPLE


class Held(eqx.Module):
    """A value of the program; its shadow, if it is an integer that has one; and its credit, if it
    enters the result linearly. Only the derivative of the credit is used.
    """

    primal: Any
    shadow: Any = None
    credit: Any = None

    def as_float(self) -> Any:
        return self.primal.astype(float) if self.shadow is None else self.shadow


def replay(
    analysis: Analysis,
    program: Program,
    inputs: Sequence[Any],
    baseline: Callable[[Array], Array],
) -> tuple[list[Any], list[Any], Float[Array, ""]]:
    """A program's results with its draws held fixed, the credits of its float results, and the log
    probability of the draws. The analysis must be that of the primal's path alone (`by_terms`).
    """
    player = Player(analysis, None, baseline)
    # Only float outputs are terms of the result; integers have no credit.
    held = [Held(value) for value in inputs]
    real = [
        isinstance(atom, Variable) and jnp.issubdtype(atom.dtype, jnp.floating)
        for atom in program.outputs
    ]
    log_prob, outputs = player.run(program, jnp.zeros(()), held, real)
    credits = [_no_credit(one.primal) if one.credit is None else one.credit for one in outputs]
    return [one.primal for one in outputs], credits, log_prob


def smoothed(analysis: Analysis, program: Program, inputs: Sequence[Any]) -> list[Any]:
    """A program's results, where the derivative of each draw is taken to be that of its mean."""
    player = Player(analysis, frozenset(_shadowed(program)), None)
    held, nothing = [Held(value) for value in inputs], [False] * len(program.outputs)
    return [one.primal for one in player.run(program, jnp.zeros(()), held, nothing)[1]]


def _no_credit(primal: Any) -> Any:
    return jnp.zeros(jnp.shape(primal), jnp.result_type(primal))


@dataclasses.dataclass(frozen=True)
class Player:
    """Runs programs. `shadowed` are the variables that have a shadow, `None` without smoothing;
    `baseline` returns the baseline of a term, `None` if there are no credits.
    """

    analysis: Analysis
    shadowed: frozenset[Variable] | None
    baseline: Callable[[Array], Array] | None

    def run(
        self, program: Program, log_prob: Any, inputs: Sequence[Held], linearly: Sequence[bool]
    ) -> tuple[Any, list[Held]]:
        """The log probability so far, and the outputs. Some of them are taken linearly."""
        values: dict[Atom, Held] = dict(zip(program.inputs, inputs, strict=True))
        waiting, added_up = list(program.inputs), _added_up(program)

        def read(atom: Atom) -> Held:
            return Held(jnp.asarray(atom.value)) if isinstance(atom, Constant) else values[atom]

        for equation in program.equations:
            if equation.control is not None or equation in self.analysis.branching:
                # Credit as late as possible: there are fewer sums than terms.
                self.credit_waiting(values, waiting, log_prob)
                waiting = []
            flags = self.analysis.banks(equation)
            operands = list(map(read, equation.inputs))
            if equation.control is not None or any(held.credit is not None for held in operands):
                operands = self.all_credited(equation.inputs, operands, flags, log_prob)
            log_prob, outputs = self.play(equation, log_prob, operands, added_up)
            if equation.control is None and any(held.credit is not None for held in operands):
                outputs = _passed_on(equation, operands, flags, outputs)
            values.update(zip(equation.outputs, outputs, strict=True))
            waiting.extend(equation.outputs)
        outputs = list(map(read, program.outputs))
        return log_prob, self.all_credited(program.outputs, outputs, linearly, log_prob)

    def credit_waiting(
        self, values: dict[Atom, Held], waiting: Sequence[Variable], log_prob: Any
    ) -> None:
        """Credit the values that are used linearly, for the draws so far."""
        for variable in waiting:
            if variable in self.analysis.linear:
                values[variable] = self.credited(variable, values[variable], log_prob)

    def all_credited(
        self, atoms: Sequence[Atom], values: list[Held], linearly: Sequence[bool], log_prob: Any
    ) -> list[Held]:
        """Values with credits, if they are taken linearly."""
        return [
            self.credited(atom, held, log_prob) if flag else held
            for atom, held, flag in zip(atoms, values, linearly, strict=True)
        ]

    def credited(self, atom: Atom, held: Held, log_prob: Any) -> Held:
        """Add the credit `(x − b) log P`, where b does not depend on the replicate's own draws, if
        the value depends on draws and has no credit yet.
        """
        if self.baseline is None or atom not in self.analysis.branched or held.credit is not None:
            return held
        # E[b ∂ log P] = 0 for any b that does not depend on these draws.
        still = jax.lax.stop_gradient(held.primal)
        credit = (still - self.baseline(still)) * log_prob.astype(still.dtype)
        return Held(held.primal, held.shadow, credit)

    def play(
        self, equation: Equation, log_prob: Any, operands: list[Held], added_up: set[Atom]
    ) -> tuple[Any, Sequence[Held]]:
        if not self.analysis.concerns(equation):
            return log_prob, _bound(equation, operands)
        match equation.control:
            case Scan() as loop:
                return self.scan(loop, equation, log_prob, operands, added_up)
            case While() as loop:
                return self.while_loop(loop, log_prob, operands)
            case Cond() as choice:
                return self.cond(choice, equation, log_prob, operands)
        if equation.primitive == SAMPLE:
            return self.sample(equation, log_prob, operands)
        outputs = _bound(equation, operands)
        if any(held.shadow is not None for held in operands):
            outputs = _with_shadows(equation, operands, outputs)
        return log_prob, outputs

    def sample(self, equation: Equation, log_prob: Any, operands: list[Held]) -> Any:
        sampler, primals = equation.params["sampler"], [held.primal for held in operands]
        # Draws are held fixed; log P is differentiated at the outcome: ∂E[x] = E[∂x + x ∂ log P].
        drawn = jax.lax.stop_gradient(equation.bind(*map(jax.lax.stop_gradient, primals))[0])
        if self.shadowed is not None:
            given = [held.primal if held.shadow is None else held.shadow for held in operands[1:]]
            mean = sampler.means(drawn.shape, *given)
            return log_prob, [Held(drawn, moving(drawn.astype(mean.dtype), mean))]
        # Other draws do not depend on theta: their log probability has no derivative.
        if equation in self.analysis.branching:
            log_prob = log_prob + jnp.sum(sampler.log_probs(drawn, *primals[1:]))
        return log_prob, [Held(drawn)]

    def like(self, variables: Sequence[Variable], values: Sequence[Held]) -> list[Held]:
        """Values with the shadows and credits that the analysis determined for `variables`."""
        shadowed = self.shadowed or frozenset()
        return [
            Held(
                held.primal,
                held.as_float() if variable in shadowed else None,
                self.foreseen_credit(variable, held),
            )
            for variable, held in zip(variables, values, strict=True)
        ]

    def foreseen_credit(self, variable: Variable, held: Held) -> Any:
        facts = self.analysis
        if self.baseline is None or variable not in facts.branched or variable not in facts.linear:
            return None
        return _no_credit(held.primal) if held.credit is None else held.credit

    def scan(
        self,
        loop: Scan,
        equation: Equation,
        log_prob: Any,
        operands: list[Held],
        added_up: set[Atom],
    ) -> Any:
        constants, start, xs = loop.parts(operands)
        stacked = equation.outputs[loop.num_carry :]
        linearly = [variable in self.analysis.linear for variable in (*loop.carry, *stacked)]

        def step(carried, xs):
            log_prob, values, totals = carried
            inputs = [*constants, *values, *xs]
            log_prob, outputs = self.run(loop.body, log_prob, inputs, linearly)
            values = self.like(loop.carry, outputs[: loop.num_carry])
            ys = self.like(stacked, outputs[loop.num_carry :])
            totals = [
                None if total is None else total + y.credit
                for total, y in zip(totals, ys, strict=True)
            ]
            ys = [
                Held(y.primal, y.shadow, None if y_variable in added_up else y.credit)
                for y_variable, y in zip(stacked, ys, strict=True)
            ]
            return (log_prob, values, totals), ys

        # The credits of values that are only summed later are summed here, to save memory.
        totals = [
            self.foreseen_credit(variable, Held(jnp.zeros(variable.shape[1:], variable.dtype)))
            if variable in added_up
            else None
            for variable in stacked
        ]
        (log_prob, values, totals), ys = jax.lax.scan(
            step,
            (log_prob, self.like(loop.carry, start), totals),
            list(xs),
            length=loop.length,
            reverse=loop.reverse,
        )
        ys = [
            y if total is None else Held(y.primal, y.shadow, total[None])
            for y, total in zip(ys, totals, strict=True)
        ]
        return log_prob, [*values, *ys]

    def while_loop(self, loop: While, log_prob: Any, operands: list[Held]) -> Any:
        for_condition, for_body, start = loop.parts(operands)

        # No operand of a `while_loop` is linear (`by_terms`), so nothing is credited inside.
        def goes_on(carried):
            _, (condition,) = self.run(loop.condition, 0.0, [*for_condition, *carried[1]], [False])
            return condition.primal

        def step(carried):
            inputs = [*for_body, *carried[1]]
            log_prob, outputs = self.run(loop.body, carried[0], inputs, [False] * len(loop.carry))
            return log_prob, self.like(loop.carry, outputs)

        return jax.lax.while_loop(goes_on, step, (log_prob, self.like(loop.carry, start)))

    def cond(self, choice: Cond, equation: Equation, log_prob: Any, operands: list[Held]) -> Any:
        nothing = [False] * len(equation.outputs)

        def taken(branch):
            def run(inputs):
                after, outputs = self.run(branch, log_prob, inputs, nothing)
                # By `by_terms` no operand of a conditional is linear, so there are no credits to
                # pass on.
                outputs = self.like(equation.outputs, outputs)
                return after, [Held(held.primal, held.shadow) for held in outputs]

            return run

        index = jnp.asarray(operands[0].primal, jnp.int32)
        return jax.lax.switch(index, [taken(branch) for branch in choice.branches], operands[1:])


def _passed_on(
    equation: Equation, operands: Sequence[Held], flags: Sequence[bool], outputs: Sequence[Held]
) -> list[Held]:
    """Apply the same linear function to the credits."""

    def moving(held: Held, flag: bool) -> Any:
        if not flag:
            return jax.lax.stop_gradient(held.primal)
        return _no_credit(held.primal) if held.credit is None else held.credit

    # The function is linear in the flagged operands if the others are fixed. Applied to their
    # credits, it gives the credit of the result. The other operands are data without derivative.
    credits = equation.bind(*(moving(*one) for one in zip(operands, flags, strict=True)))
    return [
        Held(held.primal, held.shadow, credit)
        for held, credit in zip(outputs, credits, strict=True)
    ]


def _added_up(program: Program) -> set[Atom]:
    """The variables whose only use is a sum over their first axis."""
    uses = collections.Counter(a for equation in program.equations for a in equation.inputs)
    # The outputs count as uses: a value that leaves the program is used once more.
    uses.update(program.outputs)
    return {
        equation.inputs[0]
        for equation in program.equations
        if compat.sums_over_first(equation) and uses[equation.inputs[0]] == 1
    }


def _bound(equation: Equation, operands: Sequence[Held]) -> list[Held]:
    return [Held(result) for result in equation.bind(*(held.primal for held in operands))]


# Primitives that pass shadows on, with the operands that are data; the other operands are indices.
_ALL = (
    "add sub mul neg reduce_sum cumsum convert_element_type broadcast_in_dim reshape squeeze slice"
    " concatenate transpose rev pad max min dot_general integer_pow abs copy reduce_max reduce_min"
    " clamp split stack unstack square"
)
_DATA: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(_ALL.split()),
    "dynamic_slice": (0,),
    "gather": (0,),
    "dynamic_update_slice": (0, 1),
    "scatter": (0, 2),
    "scatter-add": (0, 2),
}
_LOGIC: dict[str, Callable[..., Any]] = {
    "not": lambda a: 1 - a,
    "and": lambda a, b: a * b,
    "or": lambda a, b: a + b - a * b,
}


def _passes(equation: Equation, moving: Sequence[bool]) -> bool:
    """True if the results have shadows when the `moving` operands have."""
    name = equation.primitive
    if name in _LOGIC:
        return all(output.dtype == jnp.bool_ for output in equation.outputs)
    if name == "select_n":
        return any(moving)
    if name not in _DATA:
        return False
    data = _DATA[name]
    return any(moves and (data is None or i in data) for i, moves in enumerate(moving))


def _with_shadows(
    equation: Equation, operands: Sequence[Held], outputs: Sequence[Held]
) -> list[Held]:
    """Results with shadows, as if integers were floats; floats get the derivative directly."""
    if not _passes(equation, [held.shadow is not None for held in operands]):
        return list(outputs)
    if equation.primitive == "select_n":
        floats = [_selected(operands)]
    elif equation.primitive in _LOGIC:
        floats = [_LOGIC[equation.primitive](*(held.as_float() for held in operands))]
    else:
        floats = _as_floats(equation, operands)
    return [
        Held(moving(held.primal, shadow.astype(held.primal.dtype)))
        if jnp.issubdtype(held.primal.dtype, jnp.floating)
        else Held(held.primal, moving(held.primal.astype(float), shadow))
        for held, shadow in zip(outputs, floats, strict=True)
    ]


def _as_floats(equation: Equation, operands: Sequence[Held]) -> Sequence[Any]:
    data = _DATA[equation.primitive]
    return equation.bind(
        *(
            held.as_float() if data is None or index in data else held.primal
            for index, held in enumerate(operands)
        ),
        **compat.into_floats(equation),
    )


def _selected(operands: Sequence[Held]) -> Any:
    """`case[b]`, with `(case₁ − case₀) db` beside the cases' own derivatives."""
    which, *cases = operands
    real = [
        held.primal if jnp.issubdtype(held.primal.dtype, jnp.floating) else held.as_float()
        for held in cases
    ]
    chosen = jax.lax.select_n(which.primal, *real)
    if which.shadow is None or len(cases) != 2:
        return chosen
    # ∂E[case_b] = P(b)' (case₁ − case₀) + … if b passes on the derivative of its mean.
    difference = jax.lax.stop_gradient(real[1] - real[0])
    return moving(chosen, which.shadow.astype(chosen.dtype) * difference)


def _shadowed(program: Program) -> set[Variable]:
    """The integers that have a shadow: draws, and everything to which they pass it on."""
    found: set[Variable] = set()
    until_stable(functools.partial(_spread, found, program), (found,))
    return found


def _spread(found: set[Variable], program: Program) -> None:
    for equation in program.equations:
        if equation.control is not None:
            spread(equation, (found,), functools.partial(_spread, found))
        elif equation.primitive == SAMPLE or (
            found.intersection(equation.inputs)
            and _passes(equation, [atom in found for atom in equation.inputs])
        ):
            found.update(output for output in equation.outputs if _is_whole(output))


def _is_whole(variable: Variable) -> bool:
    return jnp.issubdtype(variable.dtype, jnp.integer) or variable.dtype == jnp.bool_
