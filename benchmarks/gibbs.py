"""A block of Gibbs draws against a C loop of the same algorithm, compiled and timed in this run:
`make bench`.

The lattice is that of `ising.py`; each colour is one `BlockGibbs`, the library's general kernel,
which gets only the log odds.
"""

from __future__ import annotations

from ising import c_loop, compared

import diffmh
from diffmh.models import ising


def colour(number: int) -> diffmh.BlockGibbs:
    """Draw all sites of a colour from their conditionals: log odds `2 Σ neighbours / T` of +1."""

    def log_odds(temperature, x):
        return 2 * ising.neighbours(x, number) / temperature

    def log_density(temperature, x):
        return -ising.energy(temperature, x) / temperature

    return diffmh.BlockGibbs(log_odds, lambda x: x.colour(number), log_density, (-1, 1))


def main() -> None:
    compared("BlockGibbs, checkerboard", diffmh.Cycle(colour(0), colour(1)), c_loop("gibbs"))


if __name__ == "__main__":
    main()
