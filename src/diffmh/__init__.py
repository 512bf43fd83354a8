"""diffmh: unbiased derivatives of Metropolis–Hastings, as ordinary JAX functions."""

from . import models as models
from . import plots as plots
from . import sad as sad
from ._validate import NotDifferentiable as NotDifferentiable
from .check import check as check
from .compose import compose as compose
from .couplings import CommonRandomNumbers as CommonRandomNumbers
from .couplings import Coupling as Coupling
from .couplings import Independent as Independent
from .couplings import Maximal as Maximal
from .couplings import MaximalReflection as MaximalReflection
from .couplings import NoiseCoupling as NoiseCoupling
from .estimators import Covariance as Covariance
from .estimators import Score as Score
from .estimators import StochasticDerivative as StochasticDerivative
from .expectation import Expectation as Expectation
from .expectation import expectation as expectation
from .kernel import AcceptReject as AcceptReject
from .kernel import Cycle as Cycle
from .kernel import Kernel as Kernel
from .kernel import Repeat as Repeat
from .metropolis import MetropolisHastings as MetropolisHastings
from .optimise import Ascent as Ascent
from .optimise import optimise as optimise
from .proposals import CrankNicolson as CrankNicolson
from .proposals import FiniteProposal as FiniteProposal
from .proposals import GaussianWalk as GaussianWalk
from .proposals import Independence as Independence
from .proposals import NoiseProposal as NoiseProposal
from .proposals import On as On
from .proposals import OtherState as OtherState
from .proposals import Proposal as Proposal
from .proposals import SpinFlip as SpinFlip
from .proposals import TransitionMatrix as TransitionMatrix
from .report import Report as Report
from .trace import Trace as Trace
from .trace import trace as trace

__version__ = "0.1.0"
