"""Boltzmann machines: fully connected spins ±1 (`Full`), and two layers of units 0 and 1
(`Restricted`). Fields and couplings are parameters; exact answers by enumeration.
"""

from .full import Full as Full
from .restricted import Restricted as Restricted
