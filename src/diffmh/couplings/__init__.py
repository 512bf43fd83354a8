"""Couplings of two proposals, one small file per coupling."""

from .coupling import Coupling as Coupling
from .coupling import NoiseCoupling as NoiseCoupling
from .coupling import couple as couple
from .coupling import draw as draw
from .coupling import draw_one as draw_one
from .default import best_coupling as best_coupling
from .default import refuse_mismatch as refuse_mismatch
from .maximal import Maximal as Maximal
from .maximal_reflection import MaximalReflection as MaximalReflection
from .same_noise import CommonRandomNumbers as CommonRandomNumbers
from .same_noise import Independent as Independent
