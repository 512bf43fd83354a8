"""`python -m diffmh` is the command `diffmh`."""

import sys

from diffmh_command import main

sys.exit(main())
