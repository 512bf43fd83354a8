"""Kernels, one small file each."""

from .compose import Cycle as Cycle
from .compose import Repeat as Repeat
from .metropolis import MetropolisHastings as MetropolisHastings
