"""Random small programs: one text, read by `sad` and by an enumeration of all random choices.

A program is a list of statements over two growing lists of variables, integers and floats. It
draws, one by one and in vectors, computes, indexes, chooses, branches, loops by `scan` and by
`while`, and maps. `Traced` runs it in JAX; `Enumerated` runs it
once for every way in which its draws can come out, in complex numbers.
"""

from __future__ import annotations

import cmath
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from diffmh import sad

TABLE = [0.5, -1.25, 2.0, 0.875]


class Statement(NamedTuple):
    kind: str
    numbers: tuple[int, ...]
    inner: tuple[Any, ...] = ()


DRAWS = ["bernoulli", "binomial", "categorical", "poisson", "geometric", "vector"]
SIMPLE = [*DRAWS, "add", "multiply", "index", "where", "smooth", "countdown"]
_numbers = st.tuples(*(st.integers(0, 11) for _ in range(4)))
_simple = st.builds(Statement, st.sampled_from(SIMPLE), _numbers, st.just(()))
_draw = st.builds(Statement, st.sampled_from(DRAWS), _numbers, st.just(()))
# Within a block draws have few outcomes, so that all ways through a program can be listed.
_small = st.builds(Statement, st.sampled_from(DRAWS[:3]), _numbers, st.just(()))
_rest = st.builds(Statement, st.sampled_from([*DRAWS[:3], *SIMPLE[6:]]), _numbers, st.just(()))
_short = st.tuples(_small, _rest)
_cond = st.builds(lambda n, a, b: Statement("cond", n, (a, b)), _numbers, _short, _short)
_block = st.builds(
    Statement, st.sampled_from(["scan", "while", "vmap"]), _numbers, st.tuples(_small)
)
_scan = st.builds(lambda n, a: Statement("scan", n, a), _numbers, _short)
programs = st.builds(
    lambda first, middle, block, last: (first, *middle, block, *last),
    _draw,
    st.lists(_simple, min_size=0, max_size=2),
    st.one_of(_cond, _scan, _block, _block),
    st.lists(_simple, min_size=1, max_size=1),
)


def run(backend, program, theta):
    """The sum of a float, a product of two, and a square: linear and nonlinear ways into the
    result.
    """
    integers, floats = [backend.zero], [theta[0] * 1.0, theta[1] * 1.0]
    _statements(backend, program, integers, floats, theta)
    return floats[-1] * floats[-2] + floats[-1] + 0.3 * backend.real(integers[-1]) ** 2


def _statements(backend, statements, integers, floats, theta):
    for kind, numbers, inner in statements:
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
            case "cond":

                def branch(statements):
                    def body(backend):
                        own_integers, own_floats = list(integers), list(floats)
                        _statements(backend, statements, own_integers, own_floats, theta)
                        return own_floats[-1] + backend.real(own_integers[-1])

                    return body

                floats.append(backend.cond(i > 0, branch(inner[0]), branch(inner[1])))
            case "scan":

                def body(backend, carried):
                    own_integers, own_floats = [*integers, carried], list(floats)
                    _statements(backend, inner, own_integers, own_floats, theta)
                    return (carried + own_integers[-1]) % 3, own_floats[-1] * backend.real(
                        own_integers[-1]
                    ) + 1.0

                carried, values = backend.scan(body, i % 3)
                integers.append(carried)
                floats.append(values[0] + values[1] if numbers[0] % 2 else values[0] * values[1])

            case "while":

                def body(backend, carried, total):
                    own_integers, own_floats = [*integers, carried], list(floats)
                    _statements(backend, inner, own_integers, own_floats, theta)
                    step = 1 + own_integers[-1] % 2
                    return carried + step, total + own_floats[-1] * backend.real(step)

                carried, total = backend.while_loop(body, i % 2, 2)
                integers.append(carried)
                floats.append(total)
            case "vmap":

                def lane(backend, weight):
                    own_integers, own_floats = list(integers), [*floats, x * weight]
                    _statements(backend, inner, own_integers, own_floats, theta)
                    return own_floats[-1] * weight + backend.real(own_integers[-1])

                one, other = backend.vmap(lane, [0.5, 1.5])
                floats.append(one * other if numbers[0] % 2 else one + 0.3 * other)


class Traced:
    """In JAX, with `sad`'s samplers."""

    zero = jnp.zeros((), jnp.int32)

    def __init__(self, key):
        self.keys = iter(jax.random.split(key, 8))

    def next_key(self):
        return next(self.keys)

    sigmoid = staticmethod(jax.nn.sigmoid)
    squash = staticmethod(jnp.tanh)
    where = staticmethod(jnp.where)

    def real(self, i):
        return i.astype(jnp.float32)

    def table(self, i):
        return jnp.asarray(TABLE, jnp.float32)[i]

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

    def while_loop(self, body, start, most):
        def step(state):
            carried, total, key = state
            key, key_body = jax.random.split(key)
            return (*body(Traced(key_body), carried, total), key)

        start = (jnp.asarray(start, jnp.int32), jnp.float32(0.0), self.next_key())
        return jax.lax.while_loop(lambda state: state[0] < most, step, start)[:2]

    def vmap(self, lane, weights):
        keys = jax.random.split(self.next_key(), len(weights))
        one = lambda key, weight: lane(Traced(key), weight)
        return jax.vmap(one)(keys, jnp.asarray(weights, jnp.float32))

    def cond(self, condition, yes, no):
        key = self.next_key()
        return jax.lax.cond(condition, lambda: yes(Traced(key)), lambda: no(Traced(key)))

    def scan(self, body, start):
        return jax.lax.scan(
            lambda x, key: body(Traced(key), x), start, jax.random.split(self.next_key(), 2)
        )


class Enumerated:
    """One way in which the draws come out: the outcomes `path`, then the first of each further
    draw.
    """

    zero = 0

    def __init__(self, path):
        self.path, self.taken, self.probability = path, [], 1.0 + 0j

    sigmoid = staticmethod(lambda x: 1 / (1 + cmath.exp(-x)))
    squash = staticmethod(cmath.tanh)
    where = staticmethod(lambda condition, a, b: a if condition else b)

    def real(self, i):
        return float(i)

    def table(self, i):
        return TABLE[i]

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

    def while_loop(self, body, start, most):
        total = 0.0
        while start < most:
            start, total = body(self, start, total)
        return start, total

    def vmap(self, lane, weights):
        return [lane(self, weight) for weight in weights]

    def cond(self, condition, yes, no):
        return (yes if condition else no)(self)

    def scan(self, body, start):
        values = []
        for _ in range(2):
            start, value = body(self, start)
            values.append(value)
        return start, values


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
