"""The paper's models: density, sampler, observables, and exact answers."""

from . import boltzmann as boltzmann
from . import gaussian as gaussian
from . import ising as ising
from . import mixture as mixture
