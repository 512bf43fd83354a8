"""Facts about a program before it runs: bounds, steps, and proofs of continuity."""

from ..jaxprs.compat import current_trace as current_trace
from ..jaxprs.compat import dependence as dependence
from ..jaxprs.compat import is_traced_with as is_traced_with
from .continuity import Jump as Jump
from .continuity import jumps as jumps
from .continuity import moving_jumps as moving_jumps
from .vouching import continuous as continuous
