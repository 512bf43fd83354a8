"""All experiments, in the paper's order."""

from __future__ import annotations

from . import ascent, branching, ising, mixture, recoupling, variance
from .experiment import Experiment, Refused

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (branching, mixture, ising, recoupling, variance, ascent)
}


# The first figure should arrive soon. Then the longest experiments come first, so that two
# processes end at about the same time.
_ORDER = ("branching", "ascent", "ising", "mixture", "variance", "recoupling")


def longest_first(experiments: list[Experiment]) -> list[Experiment]:
    """The order in which several processes should start them."""
    return sorted(experiments, key=lambda experiment: _ORDER.index(experiment.name))


def named(names: list[str]) -> list[Experiment]:
    """The experiments with these names or figure numbers (`4`, `fig4`); all of them by default.

    >>> [experiment.name for experiment in named(["fig4", "mixture"])]
    ['recoupling', 'mixture']
    """
    by_number = {str(experiment.figure): experiment for experiment in EXPERIMENTS.values()}
    known = EXPERIMENTS | by_number | {f"fig{number}": one for number, one in by_number.items()}
    unknown = [name for name in names if name.lower() not in known]
    if unknown:
        raise Refused(
            f"`reproduce`: there is no experiment {', '.join(unknown)}; there are"
            f" {', '.join(EXPERIMENTS)}."
        )
    return [known[name.lower()] for name in names] or list(EXPERIMENTS.values())
