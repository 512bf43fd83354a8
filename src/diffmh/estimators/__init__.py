"""Estimators of the derivative, one per file."""

from .births import Births as Births
from .covariance import Covariance as Covariance
from .estimator import Block as Block
from .estimator import Estimator as Estimator
from .estimator import Observation as Observation
from .estimator import Reading as Reading
from .estimator import ValueOnly as ValueOnly
from .readings import Backward as Backward
from .readings import Forward as Forward
from .readings import distinct_odds as distinct_odds
from .readings import matched_odds as matched_odds
from .readings import odds_of as odds_of
from .score import Score as Score
from .stochastic_derivative import StochasticDerivative as StochasticDerivative
