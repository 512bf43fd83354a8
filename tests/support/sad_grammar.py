"""Random small programs: one text, read by `sad` and by an enumeration of all random choices.

A program is a list of statements over two growing lists of variables, integers and floats. It
draws, one by one and in vectors, computes, indexes, chooses, and has a block: a loop, a conditional
or a map, through which an integer and a vector go, and of whose steps a number or a vector comes
out. `Traced` runs it in JAX; `Enumerated` runs it once for every way in which its draws can come
out, in complex numbers.
"""

from __future__ import annotations

import cmath
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffmh import sad

# What a program looks up, and by what the results of a block's steps are weighted.
DATA = ([0.5, -1.25, 2.0, 0.875], [0.75, -0.5])


class Statement(NamedTuple):
    kind: str
    numbers: tuple[int, ...]
    inner: tuple[tuple[Statement, ...], ...] = ()
    result: str = "number"


DRAWS = ["bernoulli", "binomial", "categorical", "vector", "poisson", "geometric"]
# Within a block draws have few outcomes, so that all ways through a program can be listed.
SMALL_DRAWS = DRAWS[:3]
PLAIN = ["add", "multiply", "index", "where", "smooth", "countdown"]
# Blocks, by how many programs are in them.
BLOCKS = {
    "scan": 1,
    "fori": 1,
    "while": 1,
    "cond": 2,
    "switch": 3,
    "vmap": 1,
    "jit": 1,
}
# Blocks within blocks, which take long to compile.
NESTED = {"scan in scan": 1, "cond in scan": 2}
# What comes out of a step.
RESULTS = ["number", "vector", "stack", "cumsum"]


def sentence(random: np.random.Generator, block: str, result: str) -> tuple[Statement, ...]:
    """A program with such a block."""

    def one_of(kinds):
        return Statement(str(random.choice(kinds)), tuple(map(int, random.integers(0, 12, 4))))

    def inner():
        plain = (one_of(PLAIN),) if random.random() < 0.5 else ()
        return (one_of(SMALL_DRAWS), *plain)

    within = tuple(inner() for _ in range((BLOCKS | NESTED)[block]))
    numbers = tuple(map(int, random.integers(0, 12, 4)))
    return (
        one_of(DRAWS),
        *(one_of(PLAIN) for _ in range(random.integers(0, 2))),
        Statement(block, numbers, within, result),
        one_of([*PLAIN, "bernoulli"]),
    )


def run(backend, program, theta):
    """The sum of a float, a product of two, and a square: linear and nonlinear ways into the
    result.
    """
    integers, floats = [backend.zero], [theta[0] * 1.0, theta[1] * 1.0]
    _statements(backend, program, integers, floats, theta)
    return floats[-1] * floats[-2] + floats[-1] + 0.3 * backend.real(integers[-1]) ** 2


def _statements(backend, statements, integers, floats, theta):
    for statement in statements:
        kind, numbers = statement.kind, statement.numbers
        i, j = (integers[n % len(integers)] for n in numbers[:2])
        x, y = (floats[n % len(floats)] for n in numbers[2:])
        p = backend.sigmoid(
            theta[numbers[0] % 2] + 0.5 * backend.squash(y) - 0.3 * backend.real(i % 3)
        )
        match kind:
            case "bernoulli":
                integers.append(backend.bernoulli(p))
            case "binomial":
                integers.append(backend.binomial(p))
            case "categorical":
                integers.append(
                    backend.categorical(
                        [theta[1] * 1.0, backend.squash(x), 0.4 * backend.real(j % 3)]
                    )
                )
            case "poisson":
                integers.append(backend.poisson(0.5 * p))
            case "geometric":
                integers.append(backend.geometric(0.9 + 0.08 * p))
            case "vector":
                flags = backend.vector([p, 0.5 * p + 0.1])
                floats.append((1.0 + flags[0]) * (theta[1] + 2.0 * flags[1]))
            case "countdown":
                # A loop that draws nothing, left at different times.
                integers.append(backend.countdown(i % 3) + j)
            case "add":
                integers.append((i + 2 * j + 1) % 5)
            case "multiply":
                integers.append(i * j)
            case "index":
                floats.append(backend.table((i + j) % 4) * theta[0])
            case "where":
                floats.append(backend.where(i > j, x, y + backend.real(i)))
            case "smooth":
                floats.append(backend.squash(x) * theta[1] + backend.real(i))
            case _:
                start = (i % 3, backend.stack([x, backend.squash(y)]))
                _block(backend, statement, start, integers, floats, theta)


def _block(backend, statement, start, integers, floats, theta):
    """The integer and a number are appended that the steps of a block leave."""

    def step_of(inner):
        def step(backend, state):
            i, s = state
            own_integers, own_floats = [*integers, i], [*floats, s[0], s[1]]
            _statements(backend, inner, own_integers, own_floats, theta)
            drawn, x = own_integers[-1], own_floats[-1]
            s = backend.stack([s[0] + 0.5 * backend.real(drawn), 0.5 * s[1] + 0.3 * s[0]])
            return ((i + drawn) % 3, s), _result(backend, statement.result, s, x, theta)

        return step

    steps = [step_of(inner) for inner in statement.inner]
    outer, _, loop = statement.kind.rpartition(" in ")
    if outer:
        within = lambda backend, state: _summed(backend.blocks[outer](steps, state))
        (i, s), ys = backend.blocks[loop]([within], start)
    else:
        (i, s), ys = backend.blocks[statement.kind](steps, start)
    weights = backend.weights(len(ys)).reshape(-1, *(1,) * (ys.ndim - 1))
    total = (weights * ys).sum(0)
    total = total if ys.ndim == 1 else total[0] + 0.3 * total[0] * total[1]
    integers.append(i)
    floats.append(total + 0.2 * s[0] * s[1])


def _summed(left):
    """Of a block within a step: what it leaves, and the sum of its results."""
    state, ys = left
    return state, ys.sum(0)


def _result(backend, kind, s, x, theta):
    if kind == "number":
        return (s**2).sum() + x
    if kind == "vector":
        return s * theta[0] + x
    if kind == "stack":
        return backend.stack([s[0] * x, s[1] + theta[1]])
    return backend.numpy.cumsum(s)[1] * x


class Traced:
    """In JAX, with `sad`'s samplers."""

    zero = jnp.zeros((), jnp.int32)
    numpy = jnp

    def __init__(self, key, data=DATA):
        self.key, self.taken, self.data = key, 0, data
        self.blocks = {
            "scan": self.scan,
            "fori": self.fori_loop,
            "while": self.while_loop,
            "cond": self.cond,
            "switch": self.switch,
            "vmap": self.vmap,
            "jit": self.jit,
        }

    def next_key(self):
        self.taken += 1
        return jax.random.fold_in(self.key, self.taken)

    def within(self, key):
        return Traced(key, self.data)

    sigmoid = staticmethod(jax.nn.sigmoid)
    squash = staticmethod(jnp.tanh)
    where = staticmethod(jnp.where)
    stack = staticmethod(jnp.stack)

    def real(self, i):
        return i.astype(jnp.float32)

    def table(self, i):
        return jnp.asarray(self.data[0], jnp.float32)[i]

    def weights(self, count):
        return jnp.asarray(self.data[1], jnp.float32)[:count]

    def bernoulli(self, p):
        return sad.bernoulli(self.next_key(), p).astype(jnp.int32)

    def binomial(self, p):
        return sad.binomial(self.next_key(), jnp.int32(2), p)

    def categorical(self, logits):
        return sad.categorical(self.next_key(), jnp.stack(logits))

    def poisson(self, rate):
        return sad.poisson(self.next_key(), rate)

    def geometric(self, p):
        return sad.geometric(self.next_key(), p)

    def vector(self, probabilities):
        return sad.bernoulli(self.next_key(), jnp.stack(probabilities)).astype(jnp.float32)

    def countdown(self, start):
        start = jnp.asarray(start, jnp.int32)
        return jax.lax.while_loop(lambda left: left > 0, lambda left: left - 1, start)

    def scan(self, steps, start):
        return jax.lax.scan(
            lambda state, key: steps[0](self.within(key), state),
            start,
            jax.random.split(self.next_key(), 2),
        )

    def _summing(self, steps, start):
        """A step that adds up its results, and what a loop of it starts from."""

        def step(carried):
            key, state, total = carried
            key, key_step = jax.random.split(key)
            state, y = steps[0](self.within(key_step), state)
            return key, state, total + y

        form = jax.eval_shape(lambda key: steps[0](self.within(key), start)[1], jax.random.key(0))
        return step, (self.next_key(), start, jnp.zeros(form.shape, form.dtype))

    def fori_loop(self, steps, start):
        step, carried = self._summing(steps, start)
        _, state, total = jax.lax.fori_loop(0, 2, lambda _, carried: step(carried), carried)
        return state, total[None]

    def while_loop(self, steps, start):
        step, carried = self._summing(steps, start)

        def counted(carried):
            rounds, (key, (before, s), total) = carried
            key, (i, s), total = step((key, (before, s), total))
            return rounds + 1 + (i != before), (key, (i, s), total)

        goes_on = lambda carried: carried[0] < 2
        _, (_, state, total) = jax.lax.while_loop(goes_on, counted, (0, carried))
        return state, total[None]

    def cond(self, steps, start):
        key = self.next_key()
        branches = [lambda step=step: step(self.within(key), start) for step in steps]
        state, y = jax.lax.cond(start[0] > 0, *branches)
        return state, y[None]

    def switch(self, steps, start):
        key = self.next_key()
        branches = [lambda step=step: step(self.within(key), start) for step in steps]
        state, y = jax.lax.switch(start[0], branches)
        return state, y[None]

    def vmap(self, steps, start):
        i, s = start
        lane = lambda key, weight: steps[0](self.within(key), (i, s * weight))
        keys = jax.random.split(self.next_key(), 2)
        (lanes, states), ys = jax.vmap(lane)(keys, self.weights(2))
        return (lanes[0], states[1]), ys

    def jit(self, steps, start):
        step, state, ys = jax.jit(lambda key, s: steps[0](self.within(key), s)), start, []
        for _ in range(2):
            state, y = step(self.next_key(), state)
            ys.append(y)
        return state, jnp.stack(ys)


class Enumerated:
    """One way in which the draws come out: the outcomes `path`, then the first of each further
    draw.
    """

    zero = 0
    numpy = np

    def __init__(self, path):
        self.path, self.taken, self.probability = path, [], 1.0 + 0j
        self.blocks = {
            "scan": self.loop,
            "fori": self.summed_loop,
            "while": self.while_loop,
            "cond": lambda steps, start: self.once(steps[0 if start[0] > 0 else 1], start),
            "switch": lambda steps, start: self.once(steps[start[0]], start),
            "vmap": self.vmap,
            "jit": self.loop,
        }

    sigmoid = staticmethod(lambda x: 1 / (1 + cmath.exp(-x)))
    squash = staticmethod(cmath.tanh)
    where = staticmethod(lambda condition, a, b: a if condition else b)
    stack = staticmethod(np.array)

    def real(self, i):
        return float(i)

    def table(self, i):
        return DATA[0][i]

    def weights(self, count):
        return np.array(DATA[1][:count])

    def outcome(self, probabilities):
        number = self.path[len(self.taken)] if len(self.taken) < len(self.path) else 0
        self.taken.append((number, len(probabilities)))
        self.probability *= probabilities[number]
        return number

    def bernoulli(self, p):
        return self.outcome([1 - p, p])

    def binomial(self, p):
        return self.outcome([math.comb(2, k) * p**k * (1 - p) ** (2 - k) for k in range(3)])

    def categorical(self, logits):
        weights = [cmath.exp(logit) for logit in logits]
        return self.outcome([weight / sum(weights) for weight in weights])

    def poisson(self, rate):
        """Rates are below 0.5: a count beyond 6 has a probability of less than 10⁻⁶."""
        return self.outcome([cmath.exp(-rate) * rate**k / math.factorial(k) for k in range(7)])

    def geometric(self, p):
        """Chances are above 0.9: more than 6 trials have a probability of less than 10⁻⁶."""
        return 1 + self.outcome([(1 - p) ** k * p for k in range(6)])

    def vector(self, probabilities):
        return [float(self.bernoulli(p)) for p in probabilities]

    def countdown(self, start):
        return 0

    def loop(self, steps, state):
        ys = []
        for _ in range(2):
            state, y = steps[0](self, state)
            ys.append(y)
        return state, np.array(ys)

    def summed_loop(self, steps, state):
        state, ys = self.loop(steps, state)
        return state, ys.sum(0)[None]

    def while_loop(self, steps, state):
        rounds, ys = 0, []
        while rounds < 2:
            before = state[0]
            state, y = steps[0](self, state)
            ys.append(y)
            rounds += 1 + (state[0] != before)
        return state, np.array(ys).sum(0)[None]

    def once(self, step, state):
        state, y = step(self, state)
        return state, np.array([y])

    def vmap(self, steps, start):
        (i, s), lanes = start, []
        for weight in self.weights(2):
            lanes.append(steps[0](self, (i, s * weight)))
        ((first, _), one), ((_, last), other) = lanes
        return (first, last), np.array([one, other])


def exact_mean(program, theta):
    """`E` over all ways in which the draws can come out."""
    path: list[int] | None = []
    theta = [complex(value) for value in theta]
    total = 0.0 + 0j
    while path is not None:
        backend = Enumerated(path)
        total += run(backend, program, theta) * backend.probability
        taken = backend.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        path = [number for number, _ in taken[:-1]] + [taken[-1][0] + 1] if taken else None
    return np.array([total])
