"""Boltzmann machines: of spins ±1 that all see each other (`Full`), and of two layers of units 0
and 1 (`Restricted`). Fields and couplings are parameters; exact answers by enumeration.
"""

from .full import Full as Full
from .restricted import Restricted as Restricted
