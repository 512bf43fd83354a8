"""Continuous functions of theta and x that people use in densities, in observables and in programs,
whatever comparisons, roundings and divisions are inside.
"""

import jax
import jax.numpy as jnp
import jax.scipy.linalg as linalg
import jax.scipy.special as special
import jax.scipy.stats as stats
import numpy as np
import numpyro.distributions as dist
from jax import lax

VECTOR = np.array([0.3, -0.2, 0.1, 0.4], np.float32)
DATA = np.array([-1.5, 0.2, 0.7, 1.9], np.float32)
ANSWERS = np.array([1, 0, 1, 1], np.int32)
KNOTS, HEIGHTS = np.array([-2.0, 0.0, 1.0, 3.0]), np.array([1.0, 0.0, 2.0, -1.0])


def of_difference(function, x=0.3):
    """`function(x - theta)`, summed."""
    return lambda theta, x: jnp.sum(function(x - theta)), x


def of_vector(function):
    """`function(theta * x + 1, theta)` of a vector."""
    return lambda theta, x: jnp.sum(function(theta * x + 0.1)), VECTOR


def positive_definite(x, theta):
    """A symmetric matrix with eigenvalues of at least 1."""
    root = jnp.reshape(jnp.concatenate([x, x[:2], x[1:]]), (3, 3)) * theta
    return root @ root.T + jnp.eye(3)


def mixture(theta, x):
    logits = jnp.stack([-0.5 * (x - theta) ** 2, -0.5 * (x + 2 * theta) ** 2, -jnp.abs(x)])
    return special.logsumexp(logits + jnp.log(jnp.array([0.5, 0.3, 0.2])))


def reads_entries(theta, x):
    return lax.fori_loop(0, 4, lambda i, total: total - 0.5 * (x[i] - theta) ** 2, 0.0)


def fixed_count(theta, x):
    go_on = lambda state: state[0] < 5
    step = lambda state: (state[0] + 1, 0.5 * state[1] + jnp.tanh(x - theta))
    return lax.while_loop(go_on, step, (0, 0.0))[1]


def item_response(theta, x):
    return jnp.sum(dist.BernoulliLogits(theta * (x - DATA), validate_args=True).log_prob(ANSWERS))


def of_families(theta, x):
    mixing = dist.Categorical(probs=jnp.array([0.4, 0.6]), validate_args=True)
    parts = dist.Normal(jnp.stack([-theta, 2 * theta]), 1.0, validate_args=True)
    return dist.MixtureSameFamily(mixing, parts, validate_args=True).log_prob(x)


def ordered(theta, x):
    cutpoints = jnp.array([-1.0, 0.5, 2.0])
    made = dist.OrderedLogistic(theta * x, cutpoints, validate_args=True)
    return jnp.sum(made.log_prob(np.array([0, 1, 3, 2])))


def huber(z):
    return jnp.where(jnp.abs(z) <= 1.5, 0.5 * z**2, 1.5 * (jnp.abs(z) - 0.75))


def softplus_in_pieces(z):
    """As PyTensor lowers it to JAX."""
    above = jnp.where(z < 33.3, z + jnp.exp(-z), z)
    return jnp.where(z < -37.0, jnp.exp(z), jnp.where(z < 18.0, jnp.log1p(jnp.exp(z)), above))


def log1mexp(z):
    """log(1 − exp(z)) for negative z, by the formula that is accurate on either side."""
    a = -jax.nn.softplus(z) - 0.01
    near = a > -np.log(2).astype(np.float32)
    return jnp.where(
        near,
        jnp.log(-jnp.expm1(jnp.where(near, a, -1.0))),
        jnp.log1p(-jnp.exp(jnp.where(near, -1.0, a))),
    )


def safe_sqrt(z):
    positive = z > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, z, 1.0)), 0.0)


def smoothstep(z):
    t = jnp.clip(z, 0.0, 1.0)
    return t * t * (3 - 2 * t)


def bracket(z):
    """A tax with a bracket far away."""
    return jnp.where(z > 50_000, 0.2 * z - 5_000, 0.1 * z)


def spring(z):
    """Energy of a spring that breaks, in units of 4e-21 J."""
    kT = np.float32(4e-21)
    return jnp.minimum(z**2 * kT, 3 * kT) / kT


def scanned(theta, x):
    """A filter with a ReLU in its carry."""
    step = lambda c, y: (jax.nn.relu(0.5 * c + y - theta), c)
    return lax.scan(step, 0.0, x)[0]


def log_likelihood_of_counts(theta, x):
    rate = jax.nn.softplus(theta * x)
    return jnp.sum(dist.Poisson(rate, validate_args=True).log_prob(np.array([0, 3, 1, 12])))


CONTINUOUS = {
    # What the audit found to be refused or warned about.
    "logsumexp mixture": (mixture, 0.3),
    "fori_loop that reads x[i]": (reads_entries, VECTOR),
    "while_loop of a fixed count": (fixed_count, 0.3),
    "NumPyro's Normal": (lambda t, x: dist.Normal(t, 1, validate_args=True).log_prob(x), 0.3),
    "NumPyro's StudentT": (
        lambda t, x: dist.StudentT(4, t, 1, validate_args=True).log_prob(x),
        0.3,
    ),
    "NumPyro's HalfCauchy": (
        lambda t, x: dist.HalfCauchy(t, validate_args=True).log_prob(jnp.exp(x)) + x,
        0.3,
    ),
    "item response": (item_response, VECTOR),
    "MixtureSameFamily": (of_families, 0.3),
    "OrderedLogistic": (ordered, VECTOR),
    "expm": (lambda t, x: jnp.sum(linalg.expm(jnp.outer(x, x) * t)), VECTOR),
    # Activations.
    "ReLU": of_difference(jax.nn.relu),
    "leaky ReLU": of_difference(jax.nn.leaky_relu),
    "elu": of_difference(jax.nn.elu),
    "selu": of_difference(jax.nn.selu),
    "celu": of_difference(jax.nn.celu),
    "relu6": of_difference(jax.nn.relu6),
    "hard tanh": of_difference(jax.nn.hard_tanh),
    "hard sigmoid": of_difference(jax.nn.hard_sigmoid),
    "hard swish": of_difference(jax.nn.hard_swish),
    "softplus": of_difference(jax.nn.softplus),
    "softplus in pieces": of_difference(softplus_in_pieces),
    "softplus in pieces of a vector": of_difference(softplus_in_pieces, VECTOR),
    "sparse plus": of_difference(jax.nn.sparse_plus),
    "soft sign": of_difference(jax.nn.soft_sign),
    "gelu": of_difference(jax.nn.gelu),
    "exact gelu": of_difference(lambda z: jax.nn.gelu(z, approximate=False)),
    "silu": of_difference(jax.nn.silu),
    "mish": of_difference(jax.nn.mish),
    "log sigmoid": of_difference(jax.nn.log_sigmoid),
    "softmax": of_vector(lambda v: jax.nn.softmax(v)[0]),
    "log softmax": of_vector(lambda v: jax.nn.log_softmax(v)[1]),
    "standardize": of_vector(lambda v: jnp.tanh(jax.nn.standardize(v)[0])),
    # Losses and pieces.
    "Huber": of_difference(huber),
    "Huber of a vector": of_difference(huber, VECTOR),
    "hinge": of_difference(lambda z: jnp.maximum(0.0, 1 - z)),
    "pinball": of_difference(lambda z: jnp.where(z > 0, 0.9 * z, -0.1 * z)),
    "piecewise linear": of_difference(lambda z: jnp.interp(z, KNOTS, HEIGHTS)),
    "piecewise": of_difference(
        lambda z: jnp.piecewise(
            z, [z < 0, z >= 1], [lambda v: 0 * v, lambda v: 2 * v - 1, lambda v: v**2]
        )
    ),
    "window": of_difference(lambda z: jnp.where(jnp.abs(z) < 1, 1 - z**2, 0.0)),
    "bracket far away": of_difference(bracket),
    "spring in joules": of_difference(spring),
    "triangular wave": of_difference(lambda z: jnp.abs(jnp.abs(jnp.abs(z) - 2) - 1)),
    "smoothstep": of_difference(smoothstep),
    "dead zone": of_difference(lambda z: jnp.sign(z) * jnp.maximum(jnp.abs(z) - 0.5, 0.0)),
    "signed square": of_difference(lambda z: jnp.sign(z) * z**2),
    "soft threshold by where": of_difference(
        lambda z: jnp.where(z > 0.5, z - 0.5, jnp.where(z < -0.5, z + 0.5, 0.0))
    ),
    "select of pieces": of_difference(
        lambda z: jnp.select([z < -1, z < 1], [-2 * z - 1, z**2], 2 * z - 1)
    ),
    "cond of pieces": of_difference(lambda z: lax.cond(z > 0, lambda: 2 * z, lambda: z)),
    # Special functions.
    "norm.cdf": of_difference(stats.norm.cdf),
    "norm.logcdf": of_difference(stats.norm.logcdf),
    "norm.logpdf": of_difference(stats.norm.logpdf),
    "log_ndtr": of_difference(special.log_ndtr),
    "ndtr": of_difference(special.ndtr),
    "erf": of_difference(special.erf),
    "xlogy": of_vector(lambda v: special.xlogy(jnp.exp(v), jnp.exp(v))),
    "xlog1py": of_vector(lambda v: special.xlog1py(jnp.exp(v), jnp.exp(v))),
    "entr": of_vector(lambda v: special.entr(jax.nn.softmax(v))),
    "rel_entr": of_vector(lambda v: special.rel_entr(jax.nn.softmax(v), jax.nn.softmax(2 * v))),
    "logit of a probability": of_difference(lambda z: special.logit(jax.nn.sigmoid(z))),
    "gammaln": of_difference(lambda z: special.gammaln(jnp.exp(z) + 0.1)),
    "betaln": of_difference(lambda z: special.betaln(jnp.exp(z) + 0.1, 2.0)),
    "digamma": of_difference(lambda z: special.digamma(jnp.exp(z) + 0.1)),
    "gammainc": of_difference(lambda z: special.gammainc(2.0, jnp.exp(z))),
    "log1mexp": of_difference(log1mexp),
    "safe square root": of_difference(safe_sqrt),
    "sinc": of_difference(jnp.sinc),
    "logaddexp": of_difference(lambda z: jnp.logaddexp(z, 0.3)),
    "nan_to_num": of_difference(lambda z: jnp.nan_to_num(jnp.exp(-(z**2)))),
    "gamma log density": of_difference(lambda z: stats.gamma.logpdf(jnp.exp(z), 2.0)),
    "beta log density": of_difference(lambda z: stats.beta.logpdf(jax.nn.sigmoid(z), 2.0, 3.0)),
    "t log density": of_difference(lambda z: stats.t.logpdf(z, 5.0)),
    "Poisson likelihood": (log_likelihood_of_counts, VECTOR),
    "power of a positive": of_difference(lambda z: jnp.power(jnp.exp(z), 1.7)),
    "angle in the right half": of_difference(lambda z: jnp.arctan2(z, 1 + z**2)),
    # Orders and norms.
    "median": of_vector(lambda v: jnp.median(v)),
    "median of an odd number": of_vector(lambda v: jnp.median(v[:3])),
    "quantile": of_vector(lambda v: jnp.quantile(v, 0.3)),
    "percentile": of_vector(lambda v: jnp.percentile(v, 90)),
    "clip": of_difference(lambda z: jnp.clip(z, -1.0, 0.5)),
    "abs": of_difference(jnp.abs),
    "max": of_vector(jnp.max),
    "range": of_vector(jnp.ptp),
    "sort": of_vector(lambda v: jnp.sort(v) * DATA),
    "cummax": of_vector(lambda v: lax.cummax(v)),
    "largest by argmax": of_vector(lambda v: v[jnp.argmax(v)]),
    "sorted by argsort": of_vector(lambda v: v[jnp.argsort(v)] * DATA),
    "top k": of_vector(lambda v: lax.top_k(v, 2)[0]),
    "Euclidean norm": of_vector(jnp.linalg.norm),
    "1-norm": of_vector(lambda v: jnp.linalg.norm(v, 1)),
    "∞-norm": of_vector(lambda v: jnp.linalg.norm(v, jnp.inf)),
    "unit vector": of_vector(lambda v: (v / jnp.linalg.norm(v))[0]),
    "standard deviation": of_vector(jnp.std),
    "correlation-like": of_vector(lambda v: (v - v.mean())[0] / jnp.std(v)),
    "ReLU in a carry": (scanned, VECTOR),
    # Linear algebra.
    "solve": (lambda t, x: jnp.sum(jnp.linalg.solve(positive_definite(x, t), DATA[:3])), VECTOR),
    "slogdet": (lambda t, x: jnp.linalg.slogdet(positive_definite(x, t))[1], VECTOR),
    "cholesky": (lambda t, x: jnp.sum(jnp.linalg.cholesky(positive_definite(x, t))), VECTOR),
    "inverse": (lambda t, x: jnp.sum(jnp.linalg.inv(positive_definite(x, t))), VECTOR),
    "eigenvalues": (lambda t, x: jnp.linalg.eigvalsh(positive_definite(x, t))[0], VECTOR),
    "logdet by cholesky": (
        lambda t, x: jnp.sum(jnp.log(jnp.diag(jnp.linalg.cholesky(positive_definite(x, t))))),
        VECTOR,
    ),
    "multivariate normal": (
        lambda t, x: stats.multivariate_normal.logpdf(
            x[:3], jnp.full(3, t), positive_definite(x, t)
        ),
        VECTOR,
    ),
}
