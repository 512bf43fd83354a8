"""The Ising model on the periodic L×L square lattice: states, samplers, observables and exact
answers.
"""

from .exact import Exact as Exact
from .exact import enumerated as enumerated
from .exact import exact as exact
from .exact import log_partition as log_partition
from .exact import peak as peak
from .lattice import Parameter as Parameter
from .lattice import Spins as Spins
from .lattice import bonds as bonds
from .lattice import cold as cold
from .lattice import energy as energy
from .lattice import energy_moments as energy_moments
from .lattice import excitation_moments as excitation_moments
from .lattice import heat_capacity as heat_capacity
from .lattice import magnetisation as magnetisation
from .lattice import neighbours as neighbours
from .lattice import spins as spins
from .sampler import HalfSweep as HalfSweep
from .sampler import SequentialSweep as SequentialSweep
from .sampler import sampler as sampler
from .sampler import sequential as sequential
