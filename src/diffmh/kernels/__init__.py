"""Kernels, one small file each."""

from .compose import Cycle as Cycle
from .compose import Mixture as Mixture
from .compose import Repeat as Repeat
from .compose import Sweep as Sweep
from .gibbs import BlockGibbs as BlockGibbs
from .gibbs import Gibbs as Gibbs
from .hamiltonian import Hamiltonian as Hamiltonian
from .langevin import Langevin as Langevin
from .metropolis import MetropolisHastings as MetropolisHastings
from .schedule import Schedule as Schedule
from .tempering import Tempering as Tempering
