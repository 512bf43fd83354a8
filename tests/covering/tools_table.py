"""What is built on the equilibrium's chains and draws, against the options of the core, and which
of them cannot meet. `Stationary`, `control="covariance"`, `Schedule` and `Tempering` by themselves
are in `options.py`; here they meet second derivatives, the evidence, reused draws and curves.
"""

from __future__ import annotations

import functools

from arrays import Absent, Array, Excluded, Refused, Table, covering_array

import diffmh

# The cheapest level of each first; those of `MORE` only with `--thorough`.
FACTORS = {
    "tool": ("draws", "curve", "evidence", "hessian", "newton", "reuse"),
    "kernel": ("labels", "tempering", "annealing"),
    "estimator": ("covariance", "stationary"),
    "way": ("run", "vmap", "product"),
    "num_chains": (600, 2, 1),
    "burn_in": (0, 3),
    "parameters": (1, 17),
    "x64": (False, True),
    "mesh": (False,),
    "pair_lag": (3,),
    "max_steps": ("default", "too few"),
    "args": ("tables", "none"),
}
MORE = {
    "tool": ("derivative", "hessian of draws", "evidence of draws"),
    "kernel": ("walk", "schedule"),
    "estimator": ("stationary covariance", "control"),
    "way": ("call", "again", "until", "checkpoint"),
    "num_chains": (16,),
    # In a process of its own.
    "mesh": (True,),
    "pair_lag": (1,),
    "max_steps": ("some",),
}

OF_DRAWS = ("draws", "curve", "hessian of draws", "evidence of draws")
OF_CHAINS = ("hessian", "evidence", "derivative", "newton", "reuse")
# The estimator of these is `Covariance()`, or there is none.
FIXED = (*OF_DRAWS, "evidence", "newton")
STATIONARY = ("stationary", "stationary covariance")
ONE_WAY = ("curve", "newton", "reuse")
LONG = ("until", "checkpoint")
BY_CHANGING_DENSITIES = {"kernel": ("annealing",)}

RULES = (
    # What does not exist.
    Absent({"tool": FIXED}, ("estimator",)),
    Absent({"tool": ONE_WAY}, ("way",)),
    Absent({"tool": OF_DRAWS}, ("mesh", "burn_in")),
    Absent({"tool": FIXED}, ("pair_lag", "max_steps")),
    Absent({"estimator": ("covariance", "control")}, ("pair_lag", "max_steps")),
    # The table of the core has derivatives by the others.
    Excluded(
        lambda row: row["tool"] != "derivative" or row["estimator"] in STATIONARY,
        ("tool", "estimator"),
    ),
    # The Hessian times a vector; and long runs, which Hessians do not have.
    Excluded(
        lambda row: row["way"] != "product" or row["tool"] in ("hessian", "hessian of draws"),
        ("tool", "way"),
    ),
    Excluded(
        lambda row: row["way"] not in LONG or row["tool"] in ("evidence", "derivative"),
        ("tool", "way"),
    ),
    # The draws of a chain whose densities change are of none of them, and nothing says so.
    Excluded(
        lambda row: row["tool"] not in OF_DRAWS or row["kernel"] != "annealing",
        ("tool", "kernel"),
    ),
    # What is refused.
    Refused(
        {"tool": ("hessian",), "estimator": ("control",)},
        ValueError,
        "has no second derivative|has no decisions that are known",
    ),
    Refused({"tool": ("hessian",), "num_chains": (1, 2)}, ValueError, "three different chains"),
    Refused(
        {"max_steps": ("too few",), "burn_in": (3,)},
        ValueError,
        r"max_steps=2.*at least `burn_in \+ num_samples` = 5",
    ),
    Refused(
        {"tool": ("hessian", "evidence", "evidence of draws"), "way": ("again",)},
        diffmh.NotDifferentiable,
        "third|cannot be differentiated further",
    ),
    Refused(
        {"tool": ("evidence", "newton")} | BY_CHANGING_DENSITIES,
        ValueError,
        "the function that the kernel was made with",
    ),
    Refused(
        {"tool": ("hessian",), "estimator": ("covariance",)} | BY_CHANGING_DENSITIES,
        ValueError,
        r"`Covariance\(\)` needs one density",
    ),
    Refused(
        {"tool": ("reuse",), "estimator": ("covariance",)} | BY_CHANGING_DENSITIES,
        ValueError,
        r"`Covariance\(\)` needs one density",
    ),
    Refused(
        {"tool": ("hessian", "derivative"), "estimator": STATIONARY} | BY_CHANGING_DENSITIES,
        ValueError,
        "needs one density",
    ),
    Refused(
        {"tool": ("reuse",), "estimator": (*STATIONARY, "control")},
        ValueError,
        r"estimator=diffmh.Covariance\(\)",
    ),
    Refused(
        {"tool": ("derivative",), "estimator": ("stationary covariance",), "num_chains": (1,)},
        ValueError,
        "`num_chains` of at least 2",
    ),
    Refused(
        {
            "tool": ("derivative",),
            "estimator": ("stationary",),
            "kernel": ("tempering", "schedule"),
            "num_chains": (1,),
        },
        ValueError,
        "`num_chains` of at least 2",
    ),
    Refused({"num_chains": (1,), "mesh": (True,)}, ValueError, "num_chains=1.* `mesh`"),
    Refused(
        {"num_chains": (1,), "way": ("run", *LONG), "tool": OF_CHAINS}, ValueError, "num_chains"
    ),
    Refused({"num_chains": (1,), "tool": ("newton",)}, ValueError, "reuse.*`num_chains`"),
    Refused({"num_chains": (1,), "tool": ("reuse",)}, ValueError, "`compose`.*`num_chains`"),
)


@functools.cache
def array(thorough: bool) -> Array:
    factors = {name: (*levels, *MORE.get(name, ())) for name, levels in FACTORS.items()}
    rare = frozenset({("mesh", True)})
    return covering_array(Table(factors if thorough else FACTORS, RULES, rare=rare))
