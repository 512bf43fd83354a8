"""Estimators of the derivative, one per file."""

from ..core.odds import odds_of as odds_of
from .birth_readout import matched_odds as matched_odds
from .covariance import Covariance as Covariance
from .mixing import LEAST_PAIRS as LEAST_PAIRS
from .score import Score as Score
from .stationary import Stationary as Stationary
from .stochastic_derivative import StochasticDerivative as StochasticDerivative
