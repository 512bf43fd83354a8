"""diffmh.extend: what authors of kernels, proposals, couplings and estimators need.

`docs/extending.md` writes one of each.
"""

from .base.validate import Condition as Condition
from .core.alternatives import Transition as Transition
from .core.block_update import BlockUpdate as BlockUpdate
from .core.decisions import Acceptance as Acceptance
from .core.decisions import Bernoulli as Bernoulli
from .core.decisions import Categorical as Categorical
from .core.estimator import Estimator as Estimator
from .core.estimator import Observation as Observation
from .core.kernel import Kernel as Kernel
from .core.kernel import State as State
from .core.kernel import Step as Step
from .core.kernel import Update as Update
from .core.odds import DensityOdds as DensityOdds
from .core.parameters import Parameters as Parameters
from .core.recorder import Recorder as Recorder
from .core.values import Value as Value
from .couplings import Coupling as Coupling
from .couplings import NoiseCoupling as NoiseCoupling
from .kernels.function import update as update
from .kernels.tape import Draw as Draw
from .proposals import FiniteProposal as FiniteProposal
from .proposals import NoiseProposal as NoiseProposal
from .proposals import Proposal as Proposal
