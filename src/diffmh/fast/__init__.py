"""Modules that exist only for speed: chains as the last axis, random bits, rounding.

With `DIFFMH_PLAIN_JAX=1` in the environment, plain `jax.vmap` and `jax.random` replace `chains` and
`threefry`; the results mean the same. `with plain_jax(True):` does so for everything traced within.
`docs/lowering.md` says when to use it.
"""

import os

import jax

# A JAX context, so that `jax.jit` compiles the two variants separately.
plain_jax = jax.make_user_context(os.environ.get("DIFFMH_PLAIN_JAX", "0") not in ("", "0"))
