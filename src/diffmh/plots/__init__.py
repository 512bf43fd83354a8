"""Figures, drawn from saved data: each module's `figure(data)` takes arrays by name and returns
a matplotlib `Figure`.
"""

from . import ascent as ascent
from . import branching as branching
from . import ising as ising
from . import mixture as mixture
from . import recoupling as recoupling
from . import variance as variance
