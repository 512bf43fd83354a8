"""Stochastic automatic differentiation: unbiased derivatives of plain JAX programs with discrete
randomness.
"""

from ..analysis import continuous as continuous
from .estimators import Alternatives as Alternatives
from .estimators import Combined as Combined
from .estimators import Score as Score
from .estimators import Smooth as Smooth
from .expectation import expectation as expectation
from .expectation import run as run
from .marker import linear as linear
from .propose import propose as propose
from .register import register as register
from .samplers import Sampler as Sampler
from .samplers import bernoulli as bernoulli
from .samplers import binomial as binomial
from .samplers import categorical as categorical
from .samplers import geometric as geometric
from .samplers import multinomial as multinomial
from .samplers import negative_binomial as negative_binomial
from .samplers import poisson as poisson
from .samplers import uniform_int as uniform_int
