"""Samplers written by the recipe of docs/extending.md, on finitely many states, each with its exact
transition matrix; and mistakes that authors make.

A `Case` has the kernel and, in NumPy, the matrix of one step as a function of complex parameters.
Nothing here knows how a kernel is run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from oracles import derivative, finite_chain_mean, transition_matrix

import diffmh
from diffmh.extend import (
    Acceptance,
    Bernoulli,
    BlockUpdate,
    Categorical,
    DensityOdds,
    Kernel,
    State,
    Step,
    Update,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel from `states[0]`, its parameters, and the matrix of a step over `states`."""

    kernel: Kernel
    theta: np.ndarray
    states: np.ndarray
    matrix: Callable[[np.ndarray], np.ndarray]

    @property
    def init(self):
        return jnp.asarray(self.states[0])

    @property
    def at(self):
        return jnp.asarray(self.theta, jnp.float32)

    def f(self, theta, x):
        """Which state it is."""
        here = jnp.asarray(self.states) == x
        return jnp.all(here.reshape(len(self.states), -1), axis=1).astype(float)

    def exact(self, num_samples: int) -> np.ndarray:
        """The derivative of the occupancies, (states, parameters)."""
        shape, flat = self.theta.shape, self.theta.ravel()

        def mean(theta):
            step = self.matrix(theta.reshape(shape))
            return finite_chain_mean(step, 0, np.eye(len(self.states)), num_samples, 0)

        return derivative(mean, flat)[1]

    def expectation(self, num_samples: int, num_chains: int, estimator=None):
        return diffmh.expectation(
            self.f,
            self.kernel,
            init=self.init,
            num_samples=num_samples,
            num_chains=num_chains,
            estimator=estimator,
        )

    def derivatives(self, num_samples, num_chains=20_000, estimator=None, key=0) -> np.ndarray:
        """Of each chain: (chains, states, parameters)."""
        run = self.expectation(num_samples, num_chains, estimator).per_chain
        found = np.asarray(jax.jit(jax.jacfwd(run))(self.at, jax.random.key(key)))
        return found.reshape(num_chains, len(self.states), -1)


def accept(log_ratio: np.ndarray) -> np.ndarray:
    """`min(1, r)` of complex log ratios, half of the derivative at a tie."""
    real = log_ratio.real
    share = np.where(real < 0, 1.0, np.where(real == 0, 0.5, 0.0))
    return np.exp(np.minimum(real, 0.0)) * (1 + 1j * share * log_ratio.imag)


# Parallel tempering: the paper's mixture, a replica at inverse temperature 1 and one at theta[1].
MEANS = np.array([-2.5, 2.0, 5.0])


def tempered(theta, x):
    """The log density of both replicas."""
    level = lambda x: -0.5 * ((theta[0] - jnp.asarray(MEANS, jnp.float32)[x]) / 4.0) ** 2
    return level(x[0]) + theta[1] * level(x[1])


class Swap(BlockUpdate):
    """Swaps the two replicas. `factor` and `shift` of the log ratio are 1 and 0 by rights."""

    factor: float = eqx.field(static=True, default=1.0)
    shift: float = eqx.field(static=True, default=0.0)

    def log_density(self, theta, x):
        return tempered(theta, x)

    @property
    def density_identity(self):
        return tempered

    def noise(self, key, x, num_steps):
        return jax.random.uniform(key, (num_steps,))

    def decide(self, parameters, state, noise):
        def log_ratio(theta, x):
            return self.factor * (tempered(theta, x[::-1]) - tempered(theta, x)) + self.shift

        return Acceptance.draw(noise, parameters.evaluate(log_ratio, state.x))

    def result(self, x, noise, outcome):
        return jnp.where(outcome, x[::-1], x)


def tempering(**mistake) -> Case:
    replica = lambda i: diffmh.MetropolisHastings(
        tempered, diffmh.On(lambda x: x[i], diffmh.OtherState(3))
    )
    states = np.array(list(itertools.product(range(3), repeat=2)))
    index = {tuple(state): number for number, state in enumerate(states)}
    swapped = np.array([index[tuple(state[::-1])] for state in states])
    other = (1 - np.eye(3)) / 2
    factor, shift = mistake.get("factor", 1.0), mistake.get("shift", 0.0)

    def matrix(theta):
        level = -0.5 * ((theta[0] - MEANS) / 4.0) ** 2
        steps = [transition_matrix(beta * level, other) for beta in (1.0 + 0j, theta[1])]
        both = np.kron(*steps)
        joint = level[states[:, 0]] + theta[1] * level[states[:, 1]]
        move = accept(factor * (joint[swapped] - joint) + shift)
        return both * (1 - move) + (both * move)[:, swapped]

    kernel = diffmh.Cycle(replica(0), replica(1), Swap(**mistake))
    return Case(kernel, np.array([0.4, 0.3]), states, matrix)


# Swendsen–Wang: a ring of four Ising spins with a coupling for each bond.
class SwendsenWang(BlockUpdate):
    """A bond between equal spins with probability `1 − exp(−θ_b)`; then each cluster draws a spin,
    that of its first site.
    """

    def log_density(self, theta, x):
        return jnp.sum(theta * (x == jnp.roll(x, -1)))

    def noise(self, key, x, num_steps):
        key_bond, key_spin = jax.random.split(key)
        uniform = jax.random.uniform(key_bond, (num_steps, x.size))
        return uniform, jax.random.bernoulli(key_spin, 0.5, (num_steps, x.size)).astype(x.dtype)

    def decide(self, parameters, state, noise):
        def log_odds(theta, x):
            return jnp.where(x == jnp.roll(x, -1), jnp.log(jnp.expm1(theta)), -jnp.inf)

        return Bernoulli.draw(noise[0], parameters.evaluate(log_odds, state.x))

    def result(self, x, noise, outcome):
        first = jnp.arange(x.size)
        for _ in range(x.size):
            joined = jnp.minimum(first, jnp.roll(first, -1))
            first = jnp.where(outcome, joined, first)
            back = jnp.where(outcome, jnp.minimum(first, jnp.roll(first, -1)), jnp.roll(first, -1))
            first = jnp.roll(back, 1)
        return noise[1][first]


def swendsen_wang(sites=4) -> Case:
    states = np.array(list(itertools.product([0, 1], repeat=sites)))
    bonds = np.array(list(itertools.product([0, 1], repeat=sites)))

    def clusters(bond):
        first = np.arange(sites)
        for _ in range(sites):
            for b in range(sites):
                if bond[b]:
                    first[[b, (b + 1) % sites]] = min(first[b], first[(b + 1) % sites])
        return first

    # P(x' | bonds): uniform over spins that are constant on clusters.
    given = np.zeros((len(bonds), len(states)))
    for number, bond in enumerate(bonds):
        first = clusters(bond)
        constant = np.all(states == states[:, first], axis=1)
        given[number] = constant / constant.sum()

    def matrix(theta):
        p = 1 - np.exp(-theta)
        equal = states == np.roll(states, -1, axis=1)
        each = np.where(equal, p, 0.0)
        drawn = np.where(bonds[None] == 1, each[:, None], 1 - each[:, None])
        return np.prod(drawn, axis=2) @ given

    return Case(SwendsenWang(), np.array([0.6, 0.3, 0.9, 0.5]), states, matrix)


# A ring of n states, densities as tables: theta has a row for each.
def full(theta, x):
    return theta[0][x]


def cheap(theta, x):
    return theta[1][x]


def rest(theta, x):
    return theta[0][x] - theta[1][x]


class Delayed(Update):
    """Delayed acceptance: a step of ±1 on a ring must pass the cheap density, then the rest."""

    odds: object = (DensityOdds(cheap), DensityOdds(rest))

    def log_density(self, theta, x):
        return full(theta, x)

    @property
    def density_identity(self):
        return full

    @property
    def flip_odds(self):
        return self.odds

    def noise(self, key, x, num_steps):
        key_step, key_accept = jax.random.split(key)
        step = jax.random.rademacher(key_step, (num_steps,), int)
        return step, jax.random.uniform(key_accept, (num_steps, 2))

    def step(self, parameters, state, noise):
        step, uniform = noise
        new = self._proposed(parameters, state.x, step)
        draw = lambda u, density: Acceptance.draw(
            u,
            parameters.evaluate(
                lambda theta, x, new: density(theta, new) - density(theta, x), state.x, new
            ),
        )
        decisions = (draw(uniform[0], cheap), draw(uniform[1], rest))
        after = jnp.where(decisions[0].outcome & decisions[1].outcome, new, state.x)
        return Step(state, State(after), decisions, State(new))

    def _proposed(self, parameters, x, step):
        return (x + step) % parameters.theta.shape[1]

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        return self.step(parameters, alternative, noise).after

    def flipped(self, step, noise, decision, candidate):
        outcomes = [each.outcome for each in step.decisions]
        outcomes[decision] = step.decisions[decision].flipped_outcome(candidate)
        return State(jnp.where(outcomes[0] & outcomes[1], step.proposed.x, step.before.x))


def table(rows, n, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, n)).round(2)


def ring_walk(n):
    return (np.roll(np.eye(n), 1, axis=1) + np.roll(np.eye(n), -1, axis=1)) / 2


def with_rests(moves: np.ndarray) -> np.ndarray:
    """The chain that stays where it does not move."""
    return moves + np.diag(1 - moves.sum(axis=1))


def delayed(n=5, **fields) -> Case:
    def matrix(theta):
        ratio = lambda table: table[None, :] - table[:, None]
        both = accept(ratio(theta[1])) * accept(ratio(theta[0] - theta[1]))
        return with_rests(ring_walk(n) * both)

    return Case(Delayed(**fields), table(2, n), np.arange(n), matrix)


class MultipleTry(Update):
    """Two tries, uniform on all states; one is picked in proportion to the density, and takes the
    place of x with probability `min(1, (g(y) + g(other try)) / (g(z) + g(x)))`, z a reference try
    of its own for either pick: so that all three decisions are independent given the state.
    """

    num_states: int = eqx.field(static=True)

    def log_density(self, theta, x):
        return full(theta, x)

    def noise(self, key, x, num_steps):
        key_tries, key_pick, key_accept = jax.random.split(key, 3)
        tries = jax.random.randint(key_tries, (num_steps, 4), 0, self.num_states)
        pick = jax.random.uniform(key_pick, (num_steps,))
        return tries, pick, jax.random.uniform(key_accept, (num_steps, 2))

    def step(self, parameters, state, noise):
        tries, pick, uniform = noise
        new, reference = tries[:2], tries[2:]

        def log_ratio(theta, x, new, reference):
            ahead = jnp.logaddexp(full(theta, new[0]), full(theta, new[1]))
            return ahead - jnp.logaddexp(full(theta, reference), full(theta, x))

        logits = parameters.evaluate(full, new)
        ratios = parameters.evaluate(log_ratio, state.x, new, reference)
        decisions = (
            Categorical.draw(pick, logits),
            Acceptance.draw(uniform, ratios),
        )
        outcomes = [decision.outcome for decision in decisions]
        after = self._led(state.x, new, *outcomes)
        return Step(state, State(after), decisions)

    def _led(self, x, new, picked, accepted):
        return jnp.where(accepted[picked], new[picked], x)

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        return self.step(parameters, alternative, noise).after

    def flipped(self, step, noise, decision, candidate):
        outcomes = [each.outcome for each in step.decisions]
        outcomes[decision] = step.decisions[decision].flipped_outcome(candidate)
        return State(self._led(step.before.x, noise[0][:2], *outcomes))


def multiple_try(n=4) -> Case:
    def matrix(theta):
        density = np.exp(theta[0])
        moves = np.zeros((n, n), complex)
        for x, first, second, reference in itertools.product(range(n), repeat=4):
            ahead = density[first] + density[second]
            taken = accept(np.log(ahead) - np.log(density[reference] + density[x]))
            # Either of the two tries, picked in proportion to its density.
            for y in (first, second):
                if y != x:
                    moves[x, y] += density[y] / ahead * taken / n**3
        return with_rests(moves)

    return Case(MultipleTry(n), table(1, n, 1), np.arange(n), matrix)


def slice_probabilities(log_g, x, numeric=jnp):
    """`P(x' = y) = ∫₀^{g(x)} 1[u < g(y)] / #{z: u < g(z)} du / g(x)`, by the densities in order:
    the levels between two of them have as many states above them.
    """
    g = numeric.exp(log_g)
    ordered = g[numeric.argsort(log_g.real)]
    below = numeric.concatenate([numeric.zeros(1, g.dtype), ordered[:-1]])
    share = (ordered - below) / (g.size - numeric.arange(g.size))
    least = numeric.minimum(g.real, g[x].real)
    return numeric.sum(numeric.where(ordered.real <= least[:, None], share, 0.0), axis=1) / g[x]


class Slice(BlockUpdate):
    """Slice sampling on a grid: with the level integrated out, the draw is one of n values."""

    def log_density(self, theta, x):
        return full(theta, x)

    def noise(self, key, x, num_steps):
        return jax.random.uniform(key, (num_steps,))

    def decide(self, parameters, state, noise):
        def logits(theta, x):
            return jnp.log(slice_probabilities(theta[0], x))

        return Categorical.draw(noise, parameters.evaluate(logits, state.x))

    def result(self, x, noise, outcome):
        return outcome.astype(x.dtype)


def slice_on_a_grid(n=4) -> Case:
    def matrix(theta):
        return np.stack([slice_probabilities(theta[0], x, np) for x in range(n)])

    return Case(Slice(), table(1, n, 2), np.arange(n), matrix)


class Barker(BlockUpdate):
    """Barker's acceptance, `r / (1 + r)`, of a step of ±1 on a ring."""

    num_states: int = eqx.field(static=True)

    def log_density(self, theta, x):
        return full(theta, x)

    @property
    def flip_odds(self):
        return DensityOdds(full)

    def noise(self, key, x, num_steps):
        key_step, key_accept = jax.random.split(key)
        step = jax.random.rademacher(key_step, (num_steps,), int)
        return step, jax.random.uniform(key_accept, (num_steps,))

    def decide(self, parameters, state, noise):
        def log_odds(theta, x):
            return full(theta, (x + noise[0]) % self.num_states) - full(theta, x)

        return Bernoulli.draw(noise[1], parameters.evaluate(log_odds, state.x))

    def result(self, x, noise, outcome):
        return jnp.where(outcome, (x + noise[0]) % self.num_states, x)


def barker(n=5) -> Case:
    def matrix(theta):
        density = np.exp(theta[0])
        return with_rests(ring_walk(n) * density[None, :] / (density[None, :] + density[:, None]))

    return Case(Barker(n), table(1, n, 3), np.arange(n), matrix)


SOUND = {
    "tempering": tempering,
    "swendsen_wang": swendsen_wang,
    "delayed": delayed,
    "multiple_try": multiple_try,
    "slice": slice_on_a_grid,
    "barker": barker,
}


# What authors get wrong.
class SliceByLevel(Update):
    """Slice sampling on a grid as it is written in books: it draws a level and then a state above
    it, and decides nothing. Its moves depend on θ.
    """

    def log_density(self, theta, x):
        return full(theta, x)

    def noise(self, key, x, num_steps):
        key_level, key_state = jax.random.split(key)
        uniform = lambda key: jax.random.uniform(key, (num_steps,))
        return uniform(key_level), uniform(key_state)

    def _moved(self, parameters, x, noise):
        above = parameters.theta[0] > full(parameters.theta, x) + jnp.log(noise[0])
        above = above.at[x].set(True)
        rank = jnp.cumsum(above)
        wanted = jnp.floor(noise[1] * rank[-1]).astype(int) + 1
        return jnp.argmax(rank == wanted).astype(x.dtype)

    def step(self, parameters, state, noise):
        return Step(state, State(self._moved(parameters, state.x, noise)))

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        return State(self._moved(parameters, alternative.x, noise))

    def flipped(self, step, noise, decision, candidate):
        raise AssertionError("there is nothing to flip")


def slice_by_level() -> Case:
    right = slice_on_a_grid()
    return dataclasses.replace(right, kernel=SliceByLevel())


class InTurn(Update):
    """Two spins are drawn in turn, the second given the first's new value, as two decisions of one
    step: they are not independent given the state before.
    """

    def log_density(self, theta, x):
        return theta[0] * x[0] * x[1] + theta[1] * x[0] + theta[2] * x[1]

    def noise(self, key, x, num_steps):
        return jax.random.uniform(key, (num_steps, 2))

    def step(self, parameters, state, noise):
        first = Bernoulli.draw(
            noise[0], parameters.evaluate(lambda t, b: t[0] * b + t[1], state.x[1])
        )
        a = first.outcome.astype(int)
        second = Bernoulli.draw(noise[1], parameters.evaluate(lambda t, a: t[0] * a + t[2], a))
        after = jnp.stack([first.outcome, second.outcome]).astype(state.x.dtype)
        return Step(state, State(after), (first, second))

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        return self.step(parameters, alternative, noise).after

    def flipped(self, step, noise, decision, candidate):
        outcomes = [each.outcome for each in step.decisions]
        outcomes[decision] = step.decisions[decision].flipped_outcome(candidate)
        return State(jnp.stack(outcomes).astype(step.before.x.dtype))


def in_turn() -> Case:
    states = np.array(list(itertools.product([0, 1], repeat=2)))

    def matrix(theta):
        sigmoid = lambda z: 1 / (1 + np.exp(-z))
        chance = lambda p, value: np.where(value == 1, p, 1 - p)
        first = chance(sigmoid(theta[0] * states[:, None, 1] + theta[1]), states[None, :, 0])
        second = chance(sigmoid(theta[0] * states[None, :, 0] + theta[2]), states[None, :, 1])
        return first * second

    return Case(InTurn(), np.array([0.8, -0.3, 0.2]), states, matrix)
