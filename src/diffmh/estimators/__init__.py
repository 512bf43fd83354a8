"""Estimators of the derivative, one per file."""

from .birth_readout import matched_odds as matched_odds
from .birth_readout import odds_of as odds_of
from .covariance import Covariance as Covariance
from .score import Score as Score
from .stochastic_derivative import StochasticDerivative as StochasticDerivative
