"""Pictures of what the library returns: each function takes one of its objects and gives a
matplotlib `Figure`, to show in a notebook or to save with `figure.savefig("name.png")`.

matplotlib is imported when a picture is drawn, not before; it comes with `pip install
"diffmh[plots]"`.
"""

from .ascent import ascent as ascent
from .compare import compare as compare
from .report import report as report
from .sensitivity import sensitivity as sensitivity
from .trace import trace as trace
