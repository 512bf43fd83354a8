"""Models as people have them: from NumPyro and PyMC to a density, a start and a derivative."""

from .as_blackjax import as_blackjax as as_blackjax
from .from_numpyro import from_numpyro as from_numpyro
from .from_pymc import from_pymc as from_pymc
from .posterior import Posterior as Posterior
