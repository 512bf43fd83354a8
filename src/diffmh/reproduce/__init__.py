"""The paper's experiments, one module per figure. Each computes its data and its rows of the table,
and draws its figure from the saved data alone.
"""

from .catalogue import EXPERIMENTS as EXPERIMENTS
from .experiment import Claim as Claim
from .experiment import Experiment as Experiment
from .experiment import Refused as Refused
from .experiment import Result as Result
from .experiment import Size as Size
from .run import Stopped as Stopped
from .run import reproduce as reproduce
