"""The options of the core, which of them cannot meet, and why.

A new option is a line in `FACTORS`, a line in `RULES` for each combination that is refused or does
not exist, and what it does: in `problems.py` if it belongs to the problem, else in `rows.py`.
"""

from __future__ import annotations

import functools

from arrays import (
    Absent,
    Array,
    Excluded,
    Refused,
    Row,
    Table,
    covering_array,
    forbidden,
    without_repeats,
)

import diffmh

# The cheapest level of each first.
FACTORS = {
    "kernel": (
        "block", "gibbs", "walk", "hamiltonian", "langevin", "labels", "sweep", "repeat", "cycle",
        "mixture", "function", "schedule", "tempering",
    ),
    "estimator": (
        "alternatives", "births", "score", "covariance", "stationary", "stationary covariance",
    ),
    "num_chains": (2048, 600, 16, 2, 1),
    "way": ("per_chain", "jacfwd", "vjp", "call", "run", "until", "checkpoint", "compare"),
    "proposal": ("fixed", "of theta"),
    "coupling": ("default", "common", "independent", "maximal", "special", "unsuitable"),
    "weights": ("two-sided", "one-sided"),
    "alternatives": (1, 2, 4, 9, "default"),
    "control": ("none", "f", "function", "stein", "covariance"),
    "lag": (0, 2),
    "pair_lag": (1, 3),
    "burn_in": (0, 3),
    "num_samples": (30, 2, 1, 3000),
    "mesh": (False, True),
    "x64": (False, True),
    "parameters": (1, 17, 80),
    "f": ("of x", "of theta"),
    "args": ("tables", "none"),
    "zeros": ("none", "some"),
    "start": ("state", "adapted", "function"),
}  # fmt: skip

# Steps of all chains, and times parameters and alternatives.
MOST_STEPS, MOST_WEIGHTS = 200_000, 5_000_000
CONTROLLED = ("f", "function")
BY_COVARIANCE = {"estimator": ("alternatives",), "control": ("covariance",)}
DISCRETE = (
    "block", "gibbs", "labels", "sweep", "repeat", "cycle", "mixture", "function", "schedule",
    "tempering",
)  # fmt: skip
STATIONARY = ("stationary", "stationary covariance")
# Nothing is known of the decisions of their coupled step.
UNKNOWN = ("function", "schedule", "tempering")
ALONE = {"estimator": ("stationary",), "kernel": UNKNOWN, "alternatives": ("default",)}
APART = ("common", "independent")
SHORT = ("block", "gibbs", "walk")
# The reference's own program; and ways whose programs are short.
FREE, LIGHT = ("per_chain",), ("per_chain", "jacfwd", "vjp")


def _alternatives(row: Row) -> int:
    """The default has at most 4."""
    return 4 if row["alternatives"] == "default" else row["alternatives"] or 1


def _steps(row: Row) -> int:
    """Of all chains together: where it is compared with exact answers, of at least 2,000. Pairs run
    on until the last one has met.
    """
    chains = row["num_chains"] if row["num_samples"] == 3000 else max(2000, row["num_chains"])
    steps = row["num_samples"] + row["burn_in"]
    in_pairs = row["estimator"] in STATIONARY or row["control"] == "covariance"
    return chains * (max(40, steps) if in_pairs else steps)


RULES = (
    # What does not exist.
    Absent({"kernel": ("gibbs", "block", "function")}, ("proposal",)),
    Absent({"kernel": ("block", "hamiltonian")}, ("coupling",)),
    Absent({"estimator": ("score", "covariance")}, ("weights", "alternatives")),
    # Stein's control variates are of `Covariance` alone, and it has no others.
    Excluded(
        lambda row: (
            row["control"] in ("none", "stein")
            if row["estimator"] == "covariance"
            else row["control"] != "stein"
        ),
        ("estimator", "control"),
    ),
    Absent({"estimator": STATIONARY}, ("control",)),
    Absent({"estimator": STATIONARY}, ("weights",)),
    Absent({"estimator": ("stationary covariance",)}, ("alternatives",)),
    Absent(
        {"estimator": [one for one in FACTORS["estimator"] if one not in STATIONARY]}, ("pair_lag",)
    ),
    # The control by the covariance is of `StochasticDerivative`, without births, alone.
    Excluded(
        lambda row: (
            row["control"] != "covariance" or row["estimator"] in ("alternatives", "births")
        ),
        ("estimator", "control"),
    ),
    # What is too long.
    Excluded(
        lambda row: row["num_chains"] * row["num_samples"] <= MOST_STEPS,
        ("num_chains", "num_samples"),
    ),
    Excluded(
        lambda row: _alternatives(row) * row["parameters"] * _steps(row) <= MOST_WEIGHTS,
        (
            *("estimator", "control", "num_chains", "num_samples", "burn_in"),
            *("parameters", "alternatives"),
        ),
    ),
    # Births have the longest programs, one for each way of calling: all ways with short kernels.
    Excluded(
        lambda row: row["estimator"] != "births" or row["way"] in LIGHT or row["kernel"] in SHORT,
        ("estimator", "way", "kernel"),
    ),
    # Nothing says of a proposal that is a function of theta that its chains stay apart: NaN.
    Excluded(
        lambda row: (
            not (
                row["estimator"] in STATIONARY
                and row["kernel"] == "walk"
                and row["proposal"] == "of theta"
                and row["coupling"] in APART
            )
        ),
        ("estimator", "kernel", "proposal", "coupling"),
    ),
    # What is refused.
    Refused(
        {"estimator": STATIONARY, "kernel": ("hamiltonian",)}, ValueError, "needs chains that meet"
    ),
    Refused(
        {"estimator": STATIONARY, "kernel": ("langevin",), "coupling": APART},
        ValueError,
        "needs chains that meet",
    ),
    Refused(
        {
            "estimator": STATIONARY,
            "kernel": ("walk",),
            "coupling": APART,
            "proposal": ("fixed",),
        },
        ValueError,
        "needs chains that meet",
    ),
    Refused(
        {"estimator": ("stationary",), "kernel": UNKNOWN, "alternatives": (1, 2, 4, 9)},
        ValueError,
        "alternatives=0",
    ),
    # The default number is 0 for these kernels.
    Refused(ALONE | {"kernel": ("schedule",)}, ValueError, "alone.*needs one density"),
    Refused(ALONE | {"lag": (2,)}, ValueError, "alone.*lag"),
    Refused(ALONE | {"proposal": ("of theta",)}, ValueError, "alone.*parameters of the proposal"),
    Refused(ALONE | {"num_chains": (1,)}, ValueError, "num_chains"),
    Refused(
        {"estimator": ("stationary covariance",), "kernel": ("schedule",)},
        ValueError,
        "needs one density",
    ),
    Refused(
        {"estimator": ("stationary covariance",), "lag": (2,)}, ValueError, "alternatives=0.*lag"
    ),
    Refused(
        {"estimator": ("stationary covariance",), "proposal": ("of theta",)},
        ValueError,
        "alternatives=0.*parameters of the proposal",
    ),
    Refused(
        {"estimator": ("stationary covariance",), "num_chains": (1,)},
        ValueError,
        "num_chains",
    ),
    Refused(BY_COVARIANCE | {"kernel": ("hamiltonian",)}, ValueError, "needs chains that meet"),
    Refused(
        BY_COVARIANCE | {"kernel": ("langevin",), "coupling": APART},
        ValueError,
        "needs chains that meet",
    ),
    Refused(
        BY_COVARIANCE | {"kernel": ("walk",), "coupling": APART, "proposal": ("fixed",)},
        ValueError,
        "needs chains that meet",
    ),
    Refused(
        BY_COVARIANCE | {"kernel": UNKNOWN},
        ValueError,
        "has no decisions that are known",
    ),
    Refused(
        BY_COVARIANCE | {"proposal": ("of theta",)},
        ValueError,
        "control='covariance'.*parameters of the proposal",
    ),
    Refused(BY_COVARIANCE | {"lag": (2,)}, ValueError, "control='covariance'.*lag"),
    Refused(
        BY_COVARIANCE | {"weights": ("one-sided",)}, ValueError, "two-sided weights, got.*one-sided"
    ),
    Refused({"num_chains": (1,), "way": ("run", "until", "checkpoint")}, ValueError, "num_chains"),
    Refused({"num_chains": (1,), "way": ("compare",)}, ValueError, "`compare` needs `num_chains`"),
    Refused({"num_chains": (1,), "mesh": (True,)}, ValueError, "num_chains=1.* `mesh`"),
    Refused(
        {"num_chains": (1,), "estimator": ("score",), "control": ("f",)},
        ValueError,
        r"`Score\(baseline='other chains'\)` needs `num_chains`",
    ),
    Refused(
        {"estimator": ("births",), "weights": ("one-sided",)}, ValueError, r"births=True.*weights"
    ),
    Refused(
        {"estimator": ("births",), "control": (*CONTROLLED, "covariance")},
        ValueError,
        "births=True.*control",
    ),
    Refused(
        {"estimator": ("births",), "kernel": ("langevin", "hamiltonian", "function")},
        ValueError,
        r"births=True.*births=False",
    ),
    Refused(
        {"estimator": ("births",), "proposal": ("of theta",)},
        ValueError,
        r"births=True.*births=False",
    ),
    Refused(
        {"estimator": ("alternatives",), "weights": ("one-sided",), "parameters": (17, 80)},
        ValueError,
        "one-sided.*two-sided",
    ),
    Refused(
        {"estimator": ("alternatives",), "control": CONTROLLED, "lag": (2,)},
        ValueError,
        r"control=.*lag",
    ),
    Refused({"estimator": ("covariance",), "lag": (2,)}, ValueError, r"`Covariance\(\)`.*lag"),
    Refused(
        {"estimator": ("covariance",), "kernel": ("schedule",)},
        ValueError,
        r"`Covariance\(\)` needs one density",
    ),
    Refused(
        {"estimator": ("covariance",), "proposal": ("of theta",)},
        ValueError,
        r"`Covariance\(\)` cannot see parameters of the proposal",
    ),
    Refused(
        {"control": ("stein",), "kernel": DISCRETE},
        ValueError,
        "`control='stein'` needs real coordinates",
    ),
    Refused(
        {"control": ("stein",), "kernel": ("walk",), "zeros": ("some",)},
        diffmh.NotDifferentiable,
        "`control='stein'` needs a density that is continuous in x",
    ),
    Refused(
        {"kernel": ("gibbs",), "coupling": ("independent", "unsuitable")},
        TypeError,
        r"Gibbs\(coupling",
    ),
    Refused({"coupling": ("unsuitable",)}, ValueError, r"`\w+\(\)` \w+.* leave `coupling` out"),
    # A density with a bound, where moves depend on theta.
    Refused(
        {"kernel": ("langevin", "hamiltonian"), "zeros": ("some",)},
        diffmh.NotDifferentiable,
        "log_density",
    ),
    Refused(
        {"kernel": ("walk",), "proposal": ("of theta",), "zeros": ("some",)},
        diffmh.NotDifferentiable,
        "log_density",
    ),
)


def together(row: Row) -> list[Row]:
    """The rows that share a row's programs: its own way, the light ways or all of them; and where
    tables are data, problems with impossible values and without.
    """
    ways = _ways(row)
    zeros = ("none", "some") if row["args"] == "tables" else (row["zeros"],)
    rows = [row | {"way": way, "zeros": zero} for way in ways for zero in zeros]
    # Each comparison compiles anew.
    once = [one for one in rows if one["way"] != "compare" or one["zeros"] == row["zeros"]]
    return [one for one in once if not forbidden(RULES, one)]


def _ways(row: Row) -> tuple[str, ...]:
    if row["way"] in FREE:
        return FREE
    if row["estimator"] == "births" and row["way"] == "jacfwd":
        return ("per_chain", "jacfwd")  # births are followed backward by a program of its own
    return LIGHT if row["way"] in LIGHT else FACTORS["way"]


# What decides how much a row takes.
DEAR = ("way", "mesh", "alternatives", "x64")


def _cost(row: Row) -> float:
    """In programs that are compiled, of the length of one without alternatives; on a mesh, all are
    compiled without it too.
    """
    ways = 1.0 if row["way"] in FREE else 2.0 if row["way"] in LIGHT else 4.0
    size = {"births": 2.0, "stationary": 1.6}.get(row["estimator"], 1.0)
    size *= {9: 1.5, 4: 1.2, "default": 1.2, 2: 1.1}.get(row["alternatives"], 1.0)
    return ways * size * (2.5 if row["mesh"] else 1.0) * (1.1 if row["x64"] else 1.0)


TABLE = Table(
    factors=FACTORS,
    rules=RULES,
    triples=(("estimator", "num_chains", "way"), ("kernel", "zeros", "parameters")),
    # Programs of their own on several devices; long runs.
    rare=frozenset({("mesh", True), ("num_samples", 3000)}),
    together=together,
    cost=_cost,
    cheaper=lambda row: (row | {name: level} for name in DEAR for level in FACTORS[name]),
)


@functools.cache
def array(thorough: bool) -> Array:
    strength = 3 if thorough else 2
    return without_repeats(TABLE, covering_array(TABLE, strength), strength)
