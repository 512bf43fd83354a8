"""Unbiased wherever the public API can go: random problems on 2 to 8 states against exact
transition matrices, values and derivatives.

False alarms: a right library fails one of these tests with probability 6e-7 per z-score, of which
there are some 1,000 by default (6e-4 in all) and 23,000 with `--thorough` (1.4 %), at fixed seeds.
One-sided weights and scores are not normal yet at their 12,000 runs where a rare flip carries the
derivative: a problem beyond the bound is judged by 50 times the runs and another seed, where a
bias of 5 errors has become one of 35.
"""

import dataclasses
import itertools

import numpy as np
import pytest
from random_kernels import estimates
from random_problems import exact, numbers
from random_structures import (
    COMPOSITIONS,
    COUPLINGS,
    ESTIMATORS,
    LAYOUTS,
    PROPOSALS,
    Move,
    Part,
    Structure,
    structures,
    two_sided,
)
from unbiasedness import assert_unbiased, is_caught

import diffmh

DEFAULT, THOROUGH = (6, 18), (40, 52)  # structures, problems of each
# Gibbs, blocks, arrays of labels, mixtures, births and lags come after the others.
WIDER = 12
STRUCTURES = [*structures(THOROUGH[0], seed=1), *structures(WIDER, seed=2, wider=True)]
BY_DEFAULT = {*range(DEFAULT[0]), THOROUGH[0] + 1}


def problems_of(structure, count, seed):
    """Every third has exact ties, except by the score, which has no answer there (below)."""
    ties = lambda i: not isinstance(structure.estimator, diffmh.Score) and i % 3 == 0
    return [numbers(structure, 1000 * seed + i, ties(i)) for i in range(count)]


def runs(structure) -> int:
    """One-sided weights and scores have heavy tails where α is near 1: more runs."""
    return 12_000 if structure.rare else 4_000


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(i, id=f"{i}-{s}", marks=() if i in BY_DEFAULT else pytest.mark.thorough)
        for i, s in enumerate(STRUCTURES)
    ],
)
def test_unbiased(number, request):
    structure = STRUCTURES[number]
    count = THOROUGH[1] if request.config.getoption("--thorough") else DEFAULT[1]
    problems = problems_of(structure, count, number)
    found = estimates(structure, problems, runs(structure))
    for index, problem in enumerate(problems):
        answer = exact(structure, problem)
        if is_caught(found[index], answer):
            # Too few runs for a normal mean, if rare flips carry it; a bias would stand out more.
            again = estimates(structure, [problem], 50 * runs(structure), seed=2)[0]
            assert_unbiased(again, answer, f"problem {index} of {structure}, 50 times the runs")
    if two_sided(structure.estimator):
        # The tied problems tell which share of a tie's derivative counts.
        tied = [pair for i, pair in enumerate(zip(found, problems, strict=True)) if i % 3 == 0]
        # (Unless none does: a label of two values that moves twice at ties is back where it was.)
        for share in (0.0, 1.0):
            wrong = [exact(structure, problem, share) for _, problem in tied]
            same = all(
                np.allclose(w, exact(structure, p)) for w, (_, p) in zip(wrong, tied, strict=True)
            )
            assert same or any(is_caught(f, w) for w, (f, _) in zip(wrong, tied, strict=True))


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(i, id=f"{i}-{s}", marks=pytest.mark.thorough if i != 3 else ())
        for i, s in enumerate(STRUCTURES[:12])
    ],
)
def test_unbiased_by_births(number, request):
    """The same structures, with as many alternatives: several densities, cycles and trees."""
    count = getattr(STRUCTURES[number].estimator, "alternatives", 1)
    births = diffmh.StochasticDerivative(alternatives=count, births=True)
    structure = dataclasses.replace(STRUCTURES[number], estimator=births)
    count = DEFAULT[1] if request.config.getoption("--thorough") else 5
    problems = problems_of(structure, count, number)
    found = estimates(structure, problems, runs(structure))
    for index, problem in enumerate(problems):
        assert_unbiased(found[index], exact(structure, problem), f"problem {index} of {structure}")


def test_default_problems_have_something_of_everything():
    drawn = STRUCTURES[: DEFAULT[0]]
    assert DEFAULT[0] * DEFAULT[1] >= 100 and THOROUGH[0] * THOROUGH[1] >= 2_000
    moves = [move for structure in drawn for move in structure.moves]
    parts = [part for structure in drawn for part in structure.parts]
    seen = lambda items, attribute: {getattr(item, attribute) for item in items}
    assert seen(moves, "proposal") == set(itertools.chain(*PROPOSALS.values()))
    assert seen(moves, "coupling") == set(COUPLINGS)
    assert {str(s.estimator) for s in drawn} >= {str(e) for e in ESTIMATORS[:5]}
    assert {"bool", "int8", "uint8", "int32"} <= seen(parts, "dtype") and len(
        seen(parts, "dtype")
    ) >= 6
    for attribute, all_of_them in (("composition", COMPOSITIONS), ("layout", LAYOUTS)):
        assert len(seen(drawn, attribute)) >= 5, all_of_them
    assert seen(drawn, "theta") == {"scalar", "vector", "tree"}
    assert seen(drawn, "f") == {"table", "with theta", "tree"}
    assert seen(drawn, "tables") == {"args", "closure", "module"}
    assert seen(drawn, "start") == {"fixed", "drawn"}
    assert seen(drawn, "burn_in") == {0, 1, 2, 3}
    assert any(len({move.density for move in s.moves}) > 1 for s in drawn), "different densities"


def one_label(num_states, dtype, estimator=None):
    """A label moved by `OtherState`, the simplest of all structures."""
    return Structure(
        parts=(Part("label", num_states, dtype),),
        moves=(Move(0, "OtherState", None, 0),),
        composition=0,
        estimator=estimator or diffmh.StochasticDerivative(),
        theta="scalar",
        f="table",
        tables="args",
        start="fixed",
        burn_in=1,
        num_samples=5,
    )


def found_and_exact(structure, tied):
    problems = [numbers(structure, 77 + i, tied) for i in range(4)]
    found = estimates(structure, problems, runs(structure))
    return [(samples, exact(structure, p)) for samples, p in zip(found, problems, strict=True)]


@pytest.mark.parametrize(
    ("num_states", "dtype"),
    [(100, "int8"), pytest.param(200, "uint8", marks=pytest.mark.thorough)],
)
def test_states_that_fill_their_dtype(num_states, dtype):
    for samples, expected in found_and_exact(one_label(num_states, dtype), tied=False):
        assert_unbiased(samples, expected)


@pytest.mark.thorough
def test_the_score_has_no_answer_at_ties():
    """At α = 1 nothing is rejected, and the half of a tie's derivative that rests on rejections
    would be lost: where a run met one it is NaN instead, and the value is as it was.
    """
    structure = one_label(4, "int32", diffmh.Score())
    tied = []
    for found, truth in found_and_exact(structure, tied=True):
        tied.append(bool(np.any(np.isnan(found))))
        known = slice(0, 1) if tied[-1] else slice(None)
        assert_unbiased(found[..., known], truth[..., known])
    assert sum(tied) >= 2
