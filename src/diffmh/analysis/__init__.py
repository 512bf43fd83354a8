"""What is read off a program before it runs: bounds, steps, and whether it is continuous."""

from .continuity import Jump as Jump
from .continuity import jumps as jumps
from .continuity import moving_jumps as moving_jumps
from .vouching import continuous as continuous
