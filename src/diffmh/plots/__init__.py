"""Plots of results: each function takes an object that the library returns and gives a matplotlib
`Figure`, to show in a notebook or to save with `figure.savefig("name.png")`.

matplotlib is imported only when a figure is drawn; install it with `pip install "diffmh[plots]"`.
"""

from .ascent import ascent as ascent
from .compare import compare as compare
from .curve import curve as curve
from .influence import influence as influence
from .meeting import meeting as meeting
from .report import report as report
from .sensitivity import sensitivity as sensitivity
from .trace import trace as trace
