"""diffmh: unbiased derivatives of Metropolis–Hastings, as ordinary JAX functions.

Authors of kernels, proposals, couplings and estimators find what they need in `diffmh.extend`.
"""

from . import extend, models, plots, sad
from ._compose import compose
from ._expectation import Expectation, expectation
from .adapters import Posterior, as_blackjax, from_numpyro, from_pymc
from .analysis import continuous
from .base.validate import NotDifferentiable
from .couplings import (
    CommonRandomNumbers,
    GradientCommonRandomNumbers,
    GradientReflection,
    Independent,
    Maximal,
    MaximalReflection,
    NearlyMaximal,
    SameSite,
    TwoScale,
)
from .estimators import Covariance, Score, StochasticDerivative
from .kernels import (
    BlockGibbs,
    Cycle,
    Gibbs,
    Hamiltonian,
    Langevin,
    MetropolisHastings,
    Mixture,
    Repeat,
    Sweep,
)
from .proposals import (
    CrankNicolson,
    GaussianWalk,
    Independence,
    On,
    OneLabel,
    OtherState,
    SpinFlip,
    TransitionMatrix,
)
from .reports.comparison import Comparison
from .reports.report import Report
from .reports.until import Until
from .runs.checkpoint import Checkpoint
from .tools.adapt import adapt
from .tools.check import check
from .tools.compare import compare
from .tools.draws import from_draws
from .tools.optimise import Ascent, optimise
from .tools.sample import sample
from .tools.sensitivity import Sensitivity, sensitivity
from .tools.trace import Trace, trace
from .tools.tune import tune

__version__ = "0.1.0"

__all__ = [
    "Ascent",
    "BlockGibbs",
    "Checkpoint",
    "CommonRandomNumbers",
    "Comparison",
    "Covariance",
    "CrankNicolson",
    "Cycle",
    "Expectation",
    "GaussianWalk",
    "Gibbs",
    "GradientCommonRandomNumbers",
    "GradientReflection",
    "Hamiltonian",
    "Independence",
    "Independent",
    "Langevin",
    "Maximal",
    "MaximalReflection",
    "MetropolisHastings",
    "Mixture",
    "NearlyMaximal",
    "NotDifferentiable",
    "On",
    "OneLabel",
    "OtherState",
    "Posterior",
    "Repeat",
    "Report",
    "SameSite",
    "Score",
    "Sensitivity",
    "SpinFlip",
    "StochasticDerivative",
    "Sweep",
    "Trace",
    "TransitionMatrix",
    "TwoScale",
    "Until",
    "adapt",
    "as_blackjax",
    "check",
    "compare",
    "compose",
    "continuous",
    "expectation",
    "extend",
    "from_draws",
    "from_numpyro",
    "from_pymc",
    "models",
    "optimise",
    "plots",
    "sad",
    "sample",
    "sensitivity",
    "trace",
    "tune",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
