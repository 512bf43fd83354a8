"""Stochastic automatic differentiation: unbiased derivatives of plain JAX programs with discrete
randomness.
"""

from .expectation import expectation as expectation
from .marker import linear as linear
from .propose import propose as propose
from .register import register as register
from .run import Estimate as Estimate
from .run import run as run
from .samplers import Sampler as Sampler
from .samplers import bernoulli as bernoulli
from .samplers import binomial as binomial
from .samplers import categorical as categorical
from .samplers import geometric as geometric
from .samplers import poisson as poisson
