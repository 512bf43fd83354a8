"""NumPyro's NUTS in the form of `Posterior.sample`, for any posterior without labels."""

from __future__ import annotations

import jax
import numpy as np


def mcmc_of(posterior, key, *, num_warmup=300, num_samples=500, num_chains=4, progress=False):
    """An `MCMC` that has run on the unconstrained states."""
    from numpyro.infer import MCMC, NUTS

    kernel = NUTS(potential_fn=lambda x: -posterior.log_density(posterior.theta, x))
    mcmc = MCMC(
        kernel, num_warmup=num_warmup, num_samples=num_samples, num_chains=num_chains,
        chain_method="vectorized", progress_bar=progress,
    )  # fmt: skip
    key_start, key_run = jax.random.split(key)
    start = jax.vmap(posterior.init)(jax.random.split(key_start, num_chains))
    mcmc.run(key_run, init_params=start, extra_fields=("diverging", "num_steps"))
    return mcmc


def tree_of(posterior, mcmc):
    """Its draws, as `Posterior.sample` returns them."""
    import arviz_base

    states = mcmc.get_samples(group_by_chain=True)
    constrain = jax.vmap(jax.vmap(lambda x: posterior.constrain(posterior.theta, x)))
    extra = mcmc.get_extra_fields(group_by_chain=True)
    depth = np.ceil(np.log2(np.asarray(extra["num_steps"]) + 1))
    groups = {
        "posterior": constrain(states),
        "unconstrained_posterior": states,
        "sample_stats": {"diverging": extra["diverging"], "tree_depth": depth},
    }
    numpy = jax.tree.map(np.asarray, groups)
    return arviz_base.from_dict(numpy, check_conventions=False)
