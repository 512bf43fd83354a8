"""References for `check.py`: derivatives of posterior means by long runs of NumPyro's NUTS in
double precision, and nothing of diffmh.

    python benchmarks/posteriors/references.py [NAME ...]      writes references.json, some minutes

The change point has a closed form, of which JAX takes the derivatives. For the others the
derivative is `Cov(f, ∂_θ log p(z, y | θ))` over draws of the sites z as the model knows them,
none of whose supports depends on θ; powers of prior and likelihood have `log p(z | θ)` and
`log p(y | z, θ)` in the place of the score. Errors are those of the means of 80 batches. Labels are
summed out for NUTS, and then drawn from their exact conditional distribution.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import gammaln
from models import CASES, YEARS, Case, arrays
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import compute_log_probs

FILE = pathlib.Path(__file__).parent / "references.json"
CHAINS, WARMUP, DRAWS, BATCHES = 4, 2_000, 12_000, 20
POWERS = ("power of the prior", "power of the likelihood")


def label_logits(sites, y):
    """Of each label of `mixture` given the rest: log p(label, y)."""
    share, low, gap = sites["share"], sites["low"], sites["gap"]
    zero = jnp.log1p(-share) + dist.Normal(low, 1.0).log_prob(y)
    one = jnp.log(share) + dist.Normal(low + gap, 1.0).log_prob(y)
    return jnp.stack([zero, one], axis=-1)


def mixture_without_labels(y, low_scale, gap_rate, share_shape):
    sites = {
        "share": numpyro.sample("share", dist.Beta(share_shape, share_shape)),
        "low": numpyro.sample("low", dist.Normal(0.0, low_scale)),
        "gap": numpyro.sample("gap", dist.Gamma(3.0, gap_rate)),
    }
    numpyro.factor("y", jnp.sum(jax.nn.logsumexp(label_logits(sites, y), axis=-1)))


# For models with discrete sites: the model without, and how the site is drawn given the rest.
SUMMED_OUT = {"mixture": (mixture_without_labels, "label", label_logits)}


def draws_of(case: Case, seed: int) -> dict[str, Any]:
    """Draws of all latent and deterministic sites, `(chain, draw, ...)`."""
    data = arrays(case)
    model, name, logits = SUMMED_OUT.get(case.name, (case.model, None, None))
    runs = MCMC(
        NUTS(model, target_accept_prob=0.95),
        num_warmup=WARMUP,
        num_samples=DRAWS,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    runs.run(jax.random.key(seed), *data, **case.theta, extra_fields=("diverging",))
    print(f"  divergences: {int(runs.get_extra_fields()['diverging'].sum())}", flush=True)
    sites = dict(runs.get_samples(group_by_chain=True))
    if logits is not None:
        keys = jax.random.split(jax.random.key(seed + 1), (CHAINS, DRAWS))

        def draw(sites, key):
            return jax.random.categorical(key, logits(sites, *data))

        sites[name] = jax.vmap(jax.vmap(draw))(sites, keys)
    return sites


def scores_of(case: Case, sites: dict[str, Any]) -> dict[str, np.ndarray]:
    """`∂_θ log p(z, y | θ)` at each draw, and the logarithms of prior and likelihood."""
    data, theta = arrays(case), {name: jnp.asarray(v) for name, v in case.theta.items()}
    seeded = numpyro.handlers.seed(case.model, jax.random.key(0))
    trace = numpyro.handlers.trace(seeded).get_trace(*data, **case.theta)
    latent = [n for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"]]

    def parts(theta, z):
        terms = compute_log_probs(case.model, data, theta, z)[0]
        prior = sum(term for name, term in terms.items() if name in latent)
        return prior, sum(terms.values()) - prior

    def one(z):
        prior, likelihood = parts(theta, z)
        slopes = jax.grad(lambda theta: sum(parts(theta, z)))(theta)
        return {**slopes, POWERS[0]: prior, POWERS[1]: likelihood}

    only_latent = {name: sites[name] for name in latent}
    found = jax.jit(lambda z: jax.lax.map(jax.vmap(one), z))(only_latent)
    return {name: np.asarray(each) for name, each in found.items()}


def batched(product: np.ndarray) -> tuple[float, float]:
    means = product.reshape(CHAINS * BATCHES, -1).mean(axis=1)
    return float(means.mean()), float(means.std(ddof=1) / np.sqrt(means.size))


def reference(case: Case) -> list[dict[str, Any]]:
    sites = draws_of(case, seed=sum(map(ord, case.name)))
    values = jax.vmap(jax.vmap(lambda z: case.f(case.theta, z)))(sites)
    scores, rows = scores_of(case, sites), []
    for quantity, value in values.items():
        flat = np.asarray(value, float).reshape(CHAINS, DRAWS, -1)
        for i in range(flat.shape[-1]):
            name = quantity if value.ndim == 2 else f"{quantity}[{i}]"
            mean, mean_error = batched(flat[..., i])
            for by, score in scores.items():
                product = (flat[..., i] - mean) * (score - score.mean())
                derivative, error = batched(product)
                rows.append(
                    {
                        "quantity": name,
                        "hyperparameter": by,
                        "derivative": derivative,
                        "error": error,
                        "mean": mean,
                        "mean_error": mean_error,
                    }
                )
    return rows


def change_point_means(theta: dict[str, jax.Array], counts: np.ndarray) -> dict[str, jax.Array]:
    """Of `change_point` with powers a and b of prior and likelihood. Given the switch, with n years
    and c accidents before it, `early` is Gamma(b c + 1, a rate + b n), and likewise `late`.
    """
    a, b = (theta[name] for name in POWERS)
    switch = jnp.arange(YEARS)
    accidents = jnp.concatenate([jnp.zeros(1), jnp.cumsum(counts)[:-1]])
    log_weight, means = 0.0, {}
    for name, events, years in (
        ("early", accidents, switch),
        ("late", counts.sum() - accidents, YEARS - switch),
    ):
        shape, rate = b * events + 1, a * theta[f"{name}_rate"] + b * years
        log_weight += gammaln(shape) - shape * jnp.log(rate)
        means[name] = shape / rate
    means["switch"] = 1.0 * switch
    return {name: jax.nn.softmax(log_weight) @ mean for name, mean in means.items()}


def exact_rows(case: Case) -> list[dict[str, Any]]:
    theta = {name: jnp.asarray(v) for name, v in (case.theta | dict.fromkeys(POWERS, 1.0)).items()}
    means = change_point_means(theta, *case.data)
    slopes = jax.jacobian(change_point_means)(theta, *case.data)
    return [
        {
            "quantity": quantity,
            "hyperparameter": by,
            "derivative": float(slopes[quantity][by]),
            "error": 0.0,
            "mean": float(mean),
            "mean_error": 0.0,
        }
        for quantity, mean in means.items()
        for by in theta
    ]


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in sys.argv[1:] or CASES:
        print(name, flush=True)
        find = exact_rows if name == "change point" else reference
        stored[name] = find(CASES[name])
        FILE.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
