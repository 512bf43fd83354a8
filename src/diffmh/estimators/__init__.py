"""Estimators of the derivative, one per file."""

from .covariance import Covariance as Covariance
from .estimator import Estimator as Estimator
from .estimator import Observation as Observation
from .estimator import ValueOnly as ValueOnly
from .score import Score as Score
from .stochastic_derivative import StochasticDerivative as StochasticDerivative
