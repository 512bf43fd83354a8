"""Couplings of two proposals, one small file per coupling."""

from ..proposals import Coupling as Coupling
from .coupling import NoiseCoupling as NoiseCoupling
from .coupling import couple as couple
from .coupling import coupling_noise as coupling_noise
from .coupling import draw_one as draw_one
from .default import best_coupling as best_coupling
from .default import refuse_mismatch as refuse_mismatch
from .default import suitable as suitable
from .gradient import GradientCommonRandomNumbers as GradientCommonRandomNumbers
from .gradient import GradientReflection as GradientReflection
from .maximal import Maximal as Maximal
from .maximal_reflection import MaximalReflection as MaximalReflection
from .nearly_maximal import NearlyMaximal as NearlyMaximal
from .same_noise import CommonRandomNumbers as CommonRandomNumbers
from .same_noise import Independent as Independent
from .same_site import SameSite as SameSite
from .two_scale import TwoScale as TwoScale
