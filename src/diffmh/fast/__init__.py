"""Behind one door, for speed alone: programs as we read them, chains last, words, rounding.

`DIFFMH_PLAIN_JAX=1` in the environment opens the door: plain `jax.vmap` and `jax.random` take the
place of `chains` and `threefry`, and everything means the same. `with plain_jax(True):` does so for
what is traced within. `docs/lowering.md` says when to use it.
"""

import os

import jax

# A context that `jax.jit` knows of: what was compiled one way is not taken for the other.
plain_jax = jax.make_user_context(os.environ.get("DIFFMH_PLAIN_JAX", "0") not in ("", "0"))
