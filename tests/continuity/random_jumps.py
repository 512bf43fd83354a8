"""Random functions of theta and a continuous random value x with a jump whose place depends on
theta.

A function is put together from four parts: the *place*, a continuous z(theta, x) that is zero where
the function jumps; the *step*, which jumps where z passes zero; the *amount* of the jump, made of
data; and the *use*, how the step and the amount enter the result. `test_jumps.py` checks that each
of the functions really jumps, and that the place moves.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
from jax import lax

COUNT = 300
VECTOR = np.array([0.3, -0.2, 0.1, 0.4], np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class JumpingFunction:
    """`function(theta, x, *data)` jumps where `place(theta, x, *data)` passes zero."""

    name: str
    function: Callable[..., Any]
    place: Callable[..., Any]
    x: Any
    data: tuple[Any, ...]
    in_args: bool

    def __call__(self, theta, x, *args):
        """With the data in the arguments, or closed over."""
        return self.function(theta, x, *(args if self.in_args else self.data))

    @property
    def args(self) -> tuple[Any, ...]:
        return self.data if self.in_args else ()


@dataclasses.dataclass(frozen=True)
class Place:
    """z(theta, x, d) with its datum d; of ordinary size, or tiny or huge (`is_scaled`)."""

    z: Callable[..., Any]
    x: Any = 0.3
    d: Any = 1.0
    is_scaled: bool = False


def _carried(theta, x, d):
    return lax.fori_loop(0, 4, lambda i, c: c + 0.25 * x * d, -theta)


def _scanned(theta, x, d):
    return lax.scan(lambda c, w: (c + w * x, c), -theta, d)[0]


F32, I32 = np.float32, np.int32

PLACES = {
    "difference": Place(lambda t, x, d: x - t),
    "integer multiple": Place(lambda t, x, d: x - d * t, d=I32(2)),
    "product": Place(lambda t, x, d: x * t - d, d=F32(0.2)),
    "exponential": Place(lambda t, x, d: jnp.exp(x) - t * d, d=I32(3)),
    "sigmoid": Place(lambda t, x, d: jax.nn.sigmoid(x) - t),
    "sum": Place(lambda t, x, d: x.sum() - d * t, VECTOR, I32(3)),
    "weighted sum": Place(
        lambda t, x, d: jnp.dot(x, d) - t, VECTOR, np.array([1, 2, -1, 0.5], np.float32)
    ),
    "mean": Place(lambda t, x, d: x.mean() - t**2, VECTOR),
    "one of many": Place(lambda t, x, d: x[d] - t, VECTOR, I32(2)),
    "tiny": Place(lambda t, x, d: d * (x - t), d=F32(4e-21), is_scaled=True),
    "huge": Place(lambda t, x, d: d * (x - t), d=F32(1e9), is_scaled=True),
    "tiny sum": Place(lambda t, x, d: d * x.sum() - d * t, VECTOR, F32(1e-12), is_scaled=True),
    "square": Place(lambda t, x, d: x**2 - t, 0.6),
    "distance": Place(lambda t, x, d: jnp.abs(x - t) - d, 0.9, F32(0.25)),
    "maximum": Place(lambda t, x, d: jnp.maximum(x, -d) - t),
    "minimum": Place(lambda t, x, d: jnp.minimum(x, d) - t, d=I32(2)),
    "clip": Place(lambda t, x, d: jnp.clip(x, -d, d) - t),
    "norm": Place(lambda t, x, d: jnp.sqrt(1 + jnp.sum(x**2)) - 1 - t, VECTOR),
    "logarithm": Place(lambda t, x, d: jnp.log1p(d * x**2) - t, 0.6, I32(2)),
    "counts": Place(lambda t, x, d: x - t * d.sum() / d.size, d=np.array([0, 2, 1], np.int32)),
    "cumulative": Place(lambda t, x, d: jnp.cumsum(x)[-1] - t, VECTOR),
    "sorted": Place(lambda t, x, d: jnp.sort(x)[2] - t, VECTOR),
    "log-sum-exp": Place(lambda t, x, d: special.logsumexp(x) - 3 * t, VECTOR),
    "quotient": Place(lambda t, x, d: x / (1 + t**2) - 0.3),
    "jitted": Place(lambda t, x, d: jax.jit(lambda a: a - t * d)(x)),
    "vmapped": Place(lambda t, x, d: jax.vmap(lambda a: a * d - t)(x)[1], VECTOR, I32(2)),
    "carry": Place(_carried, d=I32(1)),
    "scan over data": Place(_scanned, d=np.array([0.5, 0.25, 0.5], np.float32)),
    "polynomial": Place(lambda t, x, d: x**3 + t * x - d * t, d=F32(0.4)),
    "solution": Place(
        lambda t, x, d: jnp.linalg.solve(jnp.diag(1 + d), x)[0] - t,
        VECTOR,
        np.array([0, 1, 2, 3], np.float32),
    ),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """A bool or a number (`is_bool`) that jumps where z passes zero; `scaled` steps do also for a
    z that is tiny or huge."""

    of: Callable[[Any], Any]
    is_bool: bool = True
    scaled: bool = True


def _number(of, scaled=True):
    return Step(of, is_bool=False, scaled=scaled)


def _squashed(z):
    return z / (1 + jnp.abs(z))


def _loop_count(z):
    return lax.while_loop(lambda c: c < jnp.minimum(z, 2.0), lambda c: c + 0.5, jnp.zeros(()))


def _counted(z):
    return lax.fori_loop(0, 3, lambda i, c: c + (z > 10.0 * i), 0)


def _payload(z):
    keys = jnp.stack([z, jnp.zeros_like(z)])
    return lax.sort((keys, jnp.array([2.0, 1.0])), num_keys=1)[1][0]


def _pivot(z):
    """Which row has the larger entry in the first column."""
    rows = jnp.array([[0.0, 0.5], [1.0, 1.0]]).at[0, 0].set(z + 1)
    return jax.scipy.linalg.lu(rows)[0][0, 0]


def _nonzero(z):
    return jnp.nonzero(jnp.stack([z > 0, True]), size=1)[0][0]


GRID = np.array([-2.0, -1.0, 0.0, 1.5], np.float32)

STEPS = {
    "gt": Step(lambda z: z > 0),
    "ge": Step(lambda z: z >= 0),
    "lt": Step(lambda z: z < 0),
    "le": Step(lambda z: z <= 0),
    "not": Step(lambda z: ~(z > 0)),
    "and": Step(lambda z: (z > 0) & (z < 1e30)),
    "or": Step(lambda z: (z > 0) | (z < -1e30)),
    "xor": Step(lambda z: jnp.logical_xor(z > 0, True)),
    "sign compared": Step(lambda z: jnp.sign(z) > 0),
    "signbit": Step(jnp.signbit),
    "is NaN": Step(lambda z: jnp.isnan(jnp.sqrt(z))),
    "is finite": Step(lambda z: jnp.isfinite(jnp.log(z))),
    "argmax": Step(lambda z: jnp.argmax(jnp.stack([jnp.zeros_like(z), z])) == 1),
    "any": Step(lambda z: jnp.any(jnp.stack([z, -jnp.ones_like(z)]) > 0)),
    "all": Step(lambda z: jnp.all(z * jnp.array([1.0, 2.0]) > 0)),
    "maximum inside": Step(lambda z: jnp.maximum(z, -1.0) > 0),
    "minimum inside": Step(lambda z: jnp.minimum(1.0, z) > 0),
    "of two values": Step(lambda z: 2 * z > jnp.tanh(z)),
    "an atom": Step(lambda z: jnp.clip(z, 0, 1) == 0),
    "another atom": Step(lambda z: jnp.maximum(z, 0.0) != 0),
    "ReLU compared": Step(lambda z: jax.nn.relu(z) > 0),
    "rounded down": Step(lambda z: jnp.floor(_squashed(z)) < 0),
    "indicator": _number(lambda z: jnp.where(z > 0, 1.0, 0.0)),
    "sign": _number(jnp.sign),
    "|z|/z": _number(lambda z: jnp.abs(z) / z),
    "z/|z|": _number(lambda z: z / jnp.abs(z)),
    "z/sqrt(z²)": _number(lambda z: z / jnp.sqrt(z**2), scaled=False),
    "z rsqrt(z z)": _number(lambda z: z * lax.rsqrt(z * z), scaled=False),
    "z (z²)^-½": _number(lambda z: z * jnp.power(z * z, -0.5), scaled=False),
    "unit vector": _number(lambda z: (z[None] / jnp.linalg.norm(z[None]))[0], scaled=False),
    "relu(z)/z": _number(lambda z: jax.nn.relu(z) / z),
    "max(z, 0)/z": _number(lambda z: jnp.maximum(z, 0.0) / z),
    "clip(z)/z": _number(lambda z: jnp.clip(z, 0.0, 3.0) / z),
    "arctan(1/z)": _number(lambda z: jnp.arctan(1 / z)),
    "tanh(1/z)": _number(lambda z: jnp.tanh(1 / z)),
    "sigmoid(1/z)": _number(lambda z: jax.nn.sigmoid(1 / z)),
    "arctan(z^-1)": _number(lambda z: jnp.arctan(z**-1), scaled=False),
    "|z| of z reciprocal": _number(lambda z: jnp.abs(z) * jnp.reciprocal(z), scaled=False),
    "floor": _number(lambda z: jnp.floor(_squashed(z))),
    "ceil": _number(lambda z: jnp.ceil(_squashed(z))),
    "round": _number(lambda z: jnp.round(_squashed(z) + 0.5), scaled=False),
    "to integer": _number(lambda z: (_squashed(z) + 1).astype(int), scaled=False),
    "modulo": _number(lambda z: (0.3 * z) % 1.0, scaled=False),
    "remainder": _number(lambda z: lax.rem(_squashed(z) + 1, 1.0), scaled=False),
    "floor division": _number(lambda z: _squashed(z) // 1.0),
    "fraction": _number(lambda z: z - jnp.floor(z), scaled=False),
    "argsort": _number(lambda z: jnp.argsort(jnp.stack([z, jnp.zeros_like(z)]))[0]),
    "argmin of distances": _number(lambda z: jnp.argmin(jnp.abs(z - jnp.array([-1.0, 1.0])))),
    "the nearest": _number(
        lambda z: jnp.array([-1.0, 1.0])[jnp.argmin(jnp.abs(z - jnp.array([-1.0, 1.0])))]
    ),
    "searchsorted": _number(lambda z: jnp.searchsorted(GRID, z)),
    "digitize": _number(lambda z: jnp.digitize(z, GRID)),
    "search in scan": _number(lambda z: jnp.searchsorted(GRID, z, method="scan_unrolled")),
    "count": _number(lambda z: jnp.sum(z > GRID)),
    "top k": _number(lambda z: lax.top_k(jnp.stack([z, jnp.zeros_like(z)]), 1)[1][0]),
    "payload": _number(_payload),
    "one-hot": _number(lambda z: jax.nn.one_hot((z > 0).astype(int), 3) @ jnp.array([1.0, 3, 4])),
    "bincount": _number(lambda z: jnp.bincount((z > 0).astype(int)[None], length=2)[1]),
    "table": _number(lambda z: jnp.array([2.0, 5.0])[(z > 0).astype(int)]),
    "Heaviside": _number(lambda z: jnp.heaviside(z, 0.5)),
    "copysign": _number(lambda z: jnp.copysign(1.0, z)),
    "arctan2": _number(lambda z: jnp.arctan2(z, -1.0)),
    "angle": _number(lambda z: jnp.angle(lax.complex(-jnp.ones_like(z), z))),
    "branch cut": _number(lambda z: jnp.sqrt(lax.complex(-jnp.ones_like(z), z)).imag),
    "sign of a determinant": _number(
        lambda z: jnp.linalg.slogdet(jnp.eye(2).at[0, 0].set(z))[0], scaled=False
    ),
    "pivot": _number(_pivot, scaled=False),
    "select": _number(lambda z: jnp.select([z < -1, z < 0], [3.0, 3.0], 5.0)),
    "piecewise": _number(lambda z: jnp.piecewise(z, [z < 0], [lambda v: 0 * v, lambda v: 1 + v])),
    "cond": _number(lambda z: lax.cond(z > 0, lambda: 1.0, lambda: 3.0)),
    "switch": _number(
        lambda z: lax.switch((z > 0).astype(int), [lambda: 0.0, lambda: 1.0, lambda: 2.0])
    ),
    "loop's length": _number(_loop_count, scaled=False),
    "loop's count": _number(_counted),
    "nonzero": _number(_nonzero),
    "mistaken Huber": _number(
        lambda z: jnp.where(jnp.abs(z + 1) <= 1, 0.5 * z, 3 + jnp.abs(z)), scaled=False
    ),
    "jitted": _number(jax.jit(lambda z: 1.0 * (z > 0))),
    "vmapped": _number(
        lambda z: jax.vmap(lambda a: jnp.where(a > 0, 1.0, 0.0))(z * jnp.arange(1.0, 4.0)).sum()
    ),
    "soft and hard": _number(lambda z: jnp.cos(z) * (z > 0)),
}


@dataclasses.dataclass(frozen=True)
class Amount:
    """A number that is not zero for the datum d, and often is for simple ones."""

    of: Callable[[Any], Any]
    d: Any


TABLE = [0.0, 0.0, 1.5, 7.0, 2.0]
LOSSES = np.array([300, 800, 1500], np.float32)
COUNTS = np.array([3, 0, 2, 5], np.int32)

AMOUNTS = {
    "one": Amount(lambda d: 1.0 * d, F32(1)),
    "ten": Amount(lambda d: 1.0 * d, I32(10)),
    "pairs": Amount(lambda n: n * (n - 1) / 2.0, I32(5)),
    "triples": Amount(lambda n: n * (n - 1) * (n - 2) / 6.0, I32(4)),
    "half": Amount(lambda n: 1.0 * (n // 2), I32(6)),
    "modulo": Amount(lambda n: 1.0 * (n % 4) - n * (n < 2), I32(7)),
    "above three": Amount(lambda n: 1.0 * jnp.maximum(n - 3, 0), I32(5)),
    "if large": Amount(lambda n: jnp.where(n > 3, 2.0, 0.0), I32(8)),
    "if negative": Amount(lambda n: 1.0 * (jnp.abs(n) - n), I32(-4)),
    "in a table": Amount(lambda n: jnp.array(TABLE)[n], I32(3)),
    "bits": Amount(lambda n: 1.0 * (n & 6), I32(12)),
    "losses": Amount(lambda d: jnp.maximum(d - 500, 0).sum(), LOSSES),
    "small of large": Amount(lambda d: 1e9 * (4 * d), F32(1e-9)),
    "energies": Amount(lambda kT: 2 * kT / kT - kT / kT, F32(4e-21)),
    "large numbers": Amount(lambda d: (d + 10) - d, F32(1e6)),
    "a billion": Amount(lambda d: d / 1e9, F32(1e9)),
    "counts": Amount(lambda d: 1.0 * jnp.sum(d * (d - 1)), COUNTS),
    "equal counts": Amount(lambda d: 1.0 * jnp.sum(d == 2), COUNTS),
    "product": Amount(lambda d: 1.0 * jnp.prod(d - 1), COUNTS),
    "largest": Amount(lambda d: jnp.sort(d)[-1] - jnp.sort(d)[-2], LOSSES),
    "spread": Amount(lambda d: jnp.std(d), LOSSES),
    "last of many": Amount(lambda d: d[97] - d[0], np.eye(100, dtype=np.float32)[97]),
    "factorial": Amount(lambda n: jnp.exp(special.gammaln(n + 1.0)) - 1.0, I32(3)),
    "logarithm": Amount(lambda d: jnp.log(d), F32(3e8)),
    "tiny logarithm": Amount(lambda d: jnp.log(d), F32(2e-30)),
    "days": Amount(lambda n: 1.0 * (n // 365), I32(1000)),
    "true": Amount(lambda d: jnp.where(d, 3.0, 0.0), np.bool_(True)),
    "matrix": Amount(lambda d: jnp.linalg.det(d), np.array([[2, 1], [1, 3]], np.float32)),
    "small": Amount(lambda d: d * 1.0, F32(1e-3)),
}


def _in_scan(b, a):
    step = lambda c, i: (c + jnp.where(b, i * (i - 1.0), 0.0) * a, None)
    return lax.scan(step, jnp.zeros(()), jnp.arange(5))[0]


def _in_fori(b, a):
    return lax.fori_loop(0, 3, lambda i, c: jnp.where(b, c + a, c), jnp.zeros(()))


def _in_carry(b, a):
    def step(carry, _):
        total, amount = carry
        return (total + jnp.where(b, amount, 0.0), 0.5 * amount), None

    return lax.scan(step, (jnp.zeros(()), 1.0 * a), None, length=3)[0][0]


def _in_while(b, a):
    go_on = lambda state: state[0] < 3 * b.astype(int)
    step = lambda state: (state[0] + 1, state[1] + a)
    return lax.while_loop(go_on, step, (jnp.zeros((), int), jnp.zeros(())))[1]


def _cond_in_scan(b, a):
    def step(c, i):
        return lax.cond(b, lambda: c + i * a, lambda: c), None

    return lax.scan(step, jnp.zeros(()), jnp.arange(3))[0]


def _one_of_many(b, a):
    return jnp.zeros(50).at[17].set(jnp.where(b, a, 0.0)).sum()


def _in_lanes(b, a):
    return jax.vmap(lambda w: jnp.where(b, w * a, 0.0))(jnp.arange(1.0, 4.0)).sum()


# How a bool and an amount enter the result.
BOOL_USES = {
    "where": lambda b, a: jnp.where(b, a, 0.0),
    "where not": lambda b, a: jnp.where(b, 1.0, 1.0 + a),
    "cond": lambda b, a: lax.cond(b, lambda: 1.0 * a, lambda: jnp.zeros(())),
    "cond with operands": lambda b, a: lax.cond(b, lambda v: v, lambda v: 0.0 * v, 1.0 * a),
    "switch": lambda b, a: lax.switch(b.astype(int), [lambda: jnp.zeros(()), lambda: 1.0 * a]),
    "select": lambda b, a: lax.select(b, 1.0 * a, jnp.zeros(())),
    "product": lambda b, a: b * a,
    "integer product": lambda b, a: b.astype(int) * a,
    "table": lambda b, a: jnp.stack([jnp.zeros(()), 1.0 * a])[b.astype(int)],
    "one-hot": lambda b, a: jax.nn.one_hot(b.astype(int), 2) @ jnp.array([0.0, 1.0]) * a,
    "scan": _in_scan,
    "fori_loop": _in_fori,
    "carry": _in_carry,
    "while_loop": _in_while,
    "cond in scan": _cond_in_scan,
    "jitted": jax.jit(lambda b, a: jnp.where(b, a, 0.0)),
    "vmapped": _in_lanes,
    "one of many": _one_of_many,
    "largest": lambda b, a: jnp.maximum(jnp.where(b, jnp.abs(a) + 1, 0.0), 0.5),
    "sorted": lambda b, a: jnp.sort(jnp.stack([jnp.where(b, jnp.abs(a), -1.0), -0.5]))[1],
    "squashed": lambda b, a: jnp.log1p(jnp.abs(jnp.where(b, a, 0.0))),
    "nested": lambda b, a: jnp.where(b, jnp.where(b, a, 1.0), 0.0),
    "power": lambda b, a: jnp.where(b, 2.0, 1.0) ** jnp.minimum(jnp.abs(a), 10.0),
    "cumulative": lambda b, a: jnp.cumsum(jnp.where(b, jnp.ones(4) * a, 0.0))[2],
    "dot": lambda b, a: jnp.dot(jnp.full(3, b).astype(float), jnp.arange(1.0, 4.0) * a),
}

# How a number and an amount do.
NUMBER_USES = {
    "product": lambda s, a: a * s,
    "quotient": lambda s, a: s / (1.0 / a),
    "exponential": lambda s, a: a * jnp.exp(0.3 * s),
    "squashed": lambda s, a: a * jnp.tanh(0.5 * s),
    "small and large": lambda s, a: 1e9 * (s * 1e-9) * a,
    "scan": lambda s, a: lax.scan(
        lambda c, i: (c + i * (i - 1.0) * s * a, None), jnp.zeros(()), jnp.arange(4)
    )[0],
    "fori_loop": lambda s, a: lax.fori_loop(0, 3, lambda i, c: c + s * a, jnp.zeros(())),
    "one of many": lambda s, a: (jnp.zeros(30).at[11].set(1.0 * s) * a).sum(),
    "vmapped": lambda s, a: jax.vmap(lambda w: w * s * a)(jnp.arange(1.0, 4.0)).sum(),
    "jitted": jax.jit(lambda s, a: s * a + 1.0),
    "shifted": lambda s, a: (s + 5.0) * a,
    "dot": lambda s, a: jnp.dot(jnp.full(3, 1.0 * s), jnp.arange(3.0) * a),
    "cond on data": lambda s, a: lax.cond(a > -1e30, lambda: s * a, lambda: 0.0 * a),
}


def smooth(theta, x):
    """The term that is added, so that cases depend on both."""
    return jnp.sum(jnp.sin(x)) * theta


def _put_together(place: Place, step: Step, amount: Amount, use, with_smooth: bool):
    def z(theta, x, d, _):
        return place.z(theta, x, d)

    def function(theta, x, d_place, d_amount):
        value = use(step.of(place.z(theta, x, d_place)), amount.of(d_amount))
        return value + smooth(theta, x) if with_smooth else 1.0 * value

    return function, z


def jumping_functions() -> list[JumpingFunction]:
    """The corpus: every place, step, amount and use in turn, each in an order of its own."""
    rng = np.random.default_rng(19)

    def cycle(names):
        while True:
            yield from rng.permutation(list(names))

    places, steps, amounts = cycle(PLACES), cycle(STEPS), cycle(AMOUNTS)
    bool_uses, number_uses = cycle(BOOL_USES), cycle(NUMBER_USES)
    made = []
    while len(made) < COUNT:
        names = [next(places), next(steps), next(amounts)]
        place, step, amount = PLACES[names[0]], STEPS[names[1]], AMOUNTS[names[2]]
        while place.is_scaled and not step.scaled:
            names[0] = next(places)
            place = PLACES[names[0]]
        names.append(next(bool_uses if step.is_bool else number_uses))
        use = (BOOL_USES if step.is_bool else NUMBER_USES)[names[3]]
        with_smooth, in_args = rng.random(2) < 0.5
        function, z = _put_together(place, step, amount, use, with_smooth)
        name = f"{len(made)}: " + ", ".join(names) + (", args" if in_args else ", closure")
        data = (place.d, amount.d)
        made.append(JumpingFunction(name, function, z, place.x, data, bool(in_args)))
    return made


def draw(key, like, kind: int):
    """A continuous random value on all of the real line, in the shape of `like`."""
    shape = np.shape(like)
    if kind == 0:
        return jax.random.normal(key, shape)
    if kind == 1:
        uniform = jax.random.uniform(key, shape, minval=0.001, maxval=0.999)
        return jnp.log(uniform) - jnp.log1p(-uniform)
    if kind == 2:
        return jax.random.laplace(key, shape)
    return 6.0 * jax.random.uniform(key, shape) - 3.0
