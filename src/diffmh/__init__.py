"""diffmh: unbiased derivatives of Metropolis–Hastings, as ordinary JAX functions.

Authors of kernels, proposals, couplings and estimators find what they need in `diffmh.extend`.
"""

from . import extend, models, plots, sad
from ._compose import compose
from ._expectation import Expectation, expectation
from .adapters import Posterior, as_blackjax, from_numpyro, from_pymc
from .analysis import continuous
from .base.validate import NotDifferentiable
from .core.adapted import Adapted
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
from .estimators import Covariance, Score, Stationary, StochasticDerivative
from .kernels import (
    BlockGibbs,
    Cycle,
    Gibbs,
    Hamiltonian,
    Langevin,
    MetropolisHastings,
    Mixture,
    Repeat,
    Schedule,
    Sweep,
    Tempering,
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
from .runs.configure import configure
from .tools.adapt import adapt
from .tools.check import check
from .tools.compare import compare
from .tools.draws import from_draws
from .tools.evidence import evidence
from .tools.hessian import hessian
from .tools.influence import influence
from .tools.optimise import Ascent, optimise
from .tools.sample import sample
from .tools.sensitivity import Sensitivity, sensitivity
from .tools.trace import Trace, trace
from .tools.tune import tune

__version__ = "0.1.0"

__all__ = [
    "Adapted",
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
    "Schedule",
    "Score",
    "Sensitivity",
    "SpinFlip",
    "Stationary",
    "StochasticDerivative",
    "Sweep",
    "Tempering",
    "Trace",
    "TransitionMatrix",
    "TwoScale",
    "Until",
    "adapt",
    "as_blackjax",
    "check",
    "compare",
    "compose",
    "configure",
    "continuous",
    "evidence",
    "expectation",
    "extend",
    "from_draws",
    "from_numpyro",
    "from_pymc",
    "hessian",
    "influence",
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
