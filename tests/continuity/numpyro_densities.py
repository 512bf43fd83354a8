"""The log density of each continuous distribution of NumPyro, validation on: theta in a location, a
scale or a shape, the value made of x by a smooth bijection onto the support.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints

VECTOR = np.array([0.3, -0.2, 0.1, 0.4], np.float32)
PAIR, TRIPLE = VECTOR[:2], VECTOR[:3]
MATRIX = np.array([[2.0, 0.3, 0.1], [0.3, 1.0, 0.2], [0.1, 0.2, 1.5]], np.float32)
SMALL = MATRIX[:2, :2]
PATH = np.arange(3, dtype=np.float32)
NEIGHBOURS = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]], np.float32)
CENSORED = np.array([0, 1, 0, 1], np.int32)


def real(x):
    return x


def positive(x):
    return jnp.exp(x)


def above(low):
    return lambda x: low + jnp.exp(x)


def unit(x):
    return jax.nn.sigmoid(x)


def between(low, high):
    return lambda x: low + (high - low) * jax.nn.sigmoid(x)


def below(high):
    return lambda x: high - jnp.exp(x)


def circle(x):
    return jnp.pi * jnp.tanh(x)


def sphere(x):
    return x / jnp.linalg.norm(x)


def sums_to_zero(x):
    return x - x.mean()


def matrix(x):
    return jnp.stack([x, 2 * x[::-1]])


def lower(x):
    return biject_to(constraints.lower_cholesky)(x)


def positive_definite(x):
    return lower(x) @ lower(x).T


def correlations_root(x):
    return biject_to(constraints.corr_cholesky)(x)


def correlations(x):
    return correlations_root(x) @ correlations_root(x).T


def ends_of_intervals(x):
    """Both ends of intervals that no x makes so narrow, next to where they are, that NumPyro takes
    them for points.
    """
    return jnp.stack([jnp.tanh(x), jnp.tanh(x) + 1.0], axis=-1)


def simplex(x):
    return biject_to(constraints.simplex)(x)


def _mixing():
    return dist.Categorical(probs=jnp.array([0.4, 0.6]), validate_args=True)


def _matrix_of(theta):
    return MATRIX + theta * jnp.eye(3)


# By name: the distribution, the bijection, and x. Every parameter that is not a number contains θ.
_MADE = {
    "AsymmetricLaplace": (lambda t: dist.AsymmetricLaplace(t, 1.0, 2.0), real, 0.3),
    "AsymmetricLaplaceQuantile": (
        lambda t: dist.AsymmetricLaplaceQuantile(t, 1.0, 0.3),
        real,
        0.3,
    ),
    "Beta": (lambda t: dist.Beta(t, 2.0), unit, 0.3),
    "BetaProportion": (lambda t: dist.BetaProportion(t, 2.0), unit, 0.3),
    "CAR": (lambda t: dist.CAR(0.0, 0.3, t, NEIGHBOURS), real, TRIPLE),
    "Cauchy": (lambda t: dist.Cauchy(t, 1.0), real, 0.3),
    "Chi2": (lambda t: dist.Chi2(t), positive, 0.3),
    "CirculantNormal": (
        lambda t: dist.CirculantNormal(jnp.full(4, t), jnp.array([2.0, 0.5, 0.1, 0.5])),
        real,
        VECTOR,
    ),
    "Dagum": (lambda t: dist.Dagum(t, 2.0, 1.0), positive, 0.3),
    "Dirichlet": (lambda t: dist.Dirichlet(t * jnp.ones(4)), simplex, TRIPLE),
    "DoublyTruncatedPowerLaw": (
        lambda t: dist.DoublyTruncatedPowerLaw(-2.0 - t, 1.0, 3.0),
        between(1.0, 3.0),
        0.3,
    ),
    "EulerMaruyama": (
        lambda t: dist.EulerMaruyama(
            PATH, lambda x, s: (-t * x, jnp.ones(())), dist.Normal(0.0, 1.0)
        ),
        real,
        TRIPLE,
    ),
    "Exponential": (lambda t: dist.Exponential(t), positive, 0.3),
    "FoldedDistribution": (lambda t: dist.FoldedDistribution(dist.Normal(t, 1.0)), positive, 0.3),
    "Gamma": (lambda t: dist.Gamma(2.0, t), positive, 0.3),
    "GaussianCopula": (
        lambda t: dist.GaussianCopula(dist.Normal(t, jnp.ones(2)), SMALL / SMALL[0, 0]),
        real,
        PAIR,
    ),
    "GaussianRandomWalk": (lambda t: dist.GaussianRandomWalk(t, 4), real, VECTOR),
    "GaussianStateSpace": (
        lambda t: dist.GaussianStateSpace(2, 0.5 * jnp.eye(2), t * SMALL),
        lambda x: x.reshape(2, 2),
        VECTOR,
    ),
    "Gompertz": (lambda t: dist.Gompertz(t, 1.0), positive, 0.3),
    "Gumbel": (lambda t: dist.Gumbel(t, 1.0), real, 0.3),
    "HalfCauchy": (lambda t: dist.HalfCauchy(t), positive, 0.3),
    "HalfNormal": (lambda t: dist.HalfNormal(t), positive, 0.3),
    "HurdleGamma": (lambda t: dist.HurdleGamma(0.2, 2.0, t), positive, 0.3),
    "HurdleLogNormal": (lambda t: dist.HurdleLogNormal(0.2, t, 1.0), positive, 0.3),
    "Independent": (lambda t: dist.Normal(t * jnp.ones(4), 1.0).to_event(1), real, VECTOR),
    "IntervalCensoredDistribution": (
        lambda t: dist.IntervalCensoredDistribution(
            dist.Normal(t, jnp.ones(4)), CENSORED, 1 - CENSORED
        ),
        ends_of_intervals,
        VECTOR,
    ),
    "InverseGamma": (lambda t: dist.InverseGamma(2.0, t), positive, 0.3),
    "InverseWishart": (
        lambda t: dist.InverseWishart(4.0, t * SMALL),
        positive_definite,
        TRIPLE,
    ),
    "InverseWishartCholesky": (
        lambda t: dist.InverseWishartCholesky(4.0, t * SMALL),
        lower,
        TRIPLE,
    ),
    "Kumaraswamy": (lambda t: dist.Kumaraswamy(t, 2.0), unit, 0.3),
    "LKJ": (lambda t: dist.LKJ(3, t), correlations, TRIPLE),
    "LKJCholesky": (lambda t: dist.LKJCholesky(3, t), correlations_root, TRIPLE),
    "Laplace": (lambda t: dist.Laplace(t, 1.0), real, 0.3),
    "LeftCensoredDistribution": (
        lambda t: dist.LeftCensoredDistribution(dist.Normal(t, jnp.ones(4)), CENSORED),
        real,
        VECTOR,
    ),
    "LeftTruncatedDistribution": (
        lambda t: dist.LeftTruncatedDistribution(dist.Normal(t, 1.0), low=0.5),
        above(0.5),
        0.3,
    ),
    "LeftTruncatedGamma": (
        lambda t: dist.LeftTruncatedGamma(dist.Gamma(2.0, t), low=0.5),
        above(0.5),
        0.3,
    ),
    "Levy": (lambda t: dist.Levy(0.0, t), positive, 0.3),
    "LogNormal": (lambda t: dist.LogNormal(t, 1.0), positive, 0.3),
    "LogUniform": (lambda t: dist.LogUniform(1.0, 3.0), between(1.0, 3.0), 0.3),
    "Logistic": (lambda t: dist.Logistic(t, 1.0), real, 0.3),
    "LowRankMultivariateNormal": (
        lambda t: dist.LowRankMultivariateNormal(t * jnp.ones(3), MATRIX[:, :1], jnp.ones(3)),
        real,
        TRIPLE,
    ),
    "LowerTruncatedPowerLaw": (
        lambda t: dist.LowerTruncatedPowerLaw(-2.0 - t, 1.0),
        above(1.0),
        0.3,
    ),
    "MaskedDistribution": (
        lambda t: dist.Normal(t * jnp.ones(4), 1.0).mask(CENSORED.astype(bool)),
        real,
        VECTOR,
    ),
    "MatrixNormal": (
        lambda t: dist.MatrixNormal(t * jnp.ones((2, 3)), jnp.eye(2), jnp.eye(3)),
        matrix,
        TRIPLE,
    ),
    "MixtureGeneral": (
        lambda t: dist.MixtureGeneral(_mixing(), [dist.Normal(t, 1.0), dist.Cauchy(-t, 1.0)]),
        real,
        0.3,
    ),
    "MixtureSameFamily": (
        lambda t: dist.MixtureSameFamily(_mixing(), dist.Normal(jnp.stack([t, -t]), 1.0)),
        real,
        0.3,
    ),
    "MultivariateNormal": (
        lambda t: dist.MultivariateNormal(t * jnp.ones(3), _matrix_of(t)),
        real,
        TRIPLE,
    ),
    "MultivariateNormal by precision": (
        lambda t: dist.MultivariateNormal(t * jnp.ones(3), precision_matrix=_matrix_of(t)),
        real,
        TRIPLE,
    ),
    "MultivariateStudentT": (
        lambda t: dist.MultivariateStudentT(4.0, t * jnp.ones(3), jnp.eye(3)),
        real,
        TRIPLE,
    ),
    "Normal": (lambda t: dist.Normal(t, 1.0), real, 0.3),
    "Normal with a scale": (lambda t: dist.Normal(0.0, t), real, 0.3),
    "Pareto": (lambda t: dist.Pareto(1.0, t), above(1.0), 0.3),
    "ProjectedNormal": (lambda t: dist.ProjectedNormal(t * jnp.ones(3)), sphere, TRIPLE),
    "RelaxedBernoulliLogits": (lambda t: dist.RelaxedBernoulliLogits(0.5, t), unit, 0.3),
    "RightCensoredDistribution": (
        lambda t: dist.RightCensoredDistribution(dist.Normal(t, jnp.ones(4)), CENSORED),
        real,
        VECTOR,
    ),
    "RightTruncatedDistribution": (
        lambda t: dist.RightTruncatedDistribution(dist.Normal(t, 1.0), high=0.5),
        below(0.5),
        0.3,
    ),
    "RightTruncatedGamma": (
        lambda t: dist.RightTruncatedGamma(dist.Gamma(2.0, t), high=3.0),
        between(0.0, 3.0),
        0.3,
    ),
    "SineBivariateVonMises": (
        lambda t: dist.SineBivariateVonMises(t, 0.0, 2.0, 2.0, 0.1),
        circle,
        PAIR,
    ),
    "SineSkewed": (
        lambda t: dist.SineSkewed(
            dist.VonMises(t * jnp.ones(2), 2.0).to_event(1), jnp.array([0.1, 0.2])
        ),
        circle,
        PAIR,
    ),
    "SoftLaplace": (lambda t: dist.SoftLaplace(t, 1.0), real, 0.3),
    "StudentT": (lambda t: dist.StudentT(4.0, t, 1.0), real, 0.3),
    "StudentT by degrees of freedom": (lambda t: dist.StudentT(t, 0.0, 1.0), real, 0.3),
    "TransformedDistribution": (
        lambda t: dist.TransformedDistribution(
            dist.Normal(t, 1.0), dist.transforms.SigmoidTransform()
        ),
        unit,
        0.3,
    ),
    "TruncatedCauchy": (lambda t: dist.TruncatedCauchy(t, 1.0, low=0.0), positive, 0.3),
    "TruncatedNormal": (lambda t: dist.TruncatedNormal(t, 1.0, low=0.0), positive, 0.3),
    "TruncatedNormal between": (
        lambda t: dist.TruncatedNormal(t, 1.0, low=-1.0, high=2.0),
        between(-1.0, 2.0),
        0.3,
    ),
    "TruncatedPolyaGamma": (lambda t: dist.TruncatedPolyaGamma(), between(0.0, 2.5), 0.3),
    "TwoSidedTruncatedDistribution": (
        lambda t: dist.TwoSidedTruncatedDistribution(dist.Cauchy(t, 1.0), -1.0, 2.0),
        between(-1.0, 2.0),
        0.3,
    ),
    "TwoSidedTruncatedGamma": (
        lambda t: dist.TwoSidedTruncatedGamma(dist.Gamma(2.0, t), 0.5, 3.0),
        between(0.5, 3.0),
        0.3,
    ),
    "Uniform": (lambda t: dist.Uniform(-1.0, 2.0), between(-1.0, 2.0), 0.3),
    "VonMises": (lambda t: dist.VonMises(t, 2.0), circle, 0.3),
    "Weibull": (lambda t: dist.Weibull(t, 2.0), positive, 0.3),
    "Wishart": (lambda t: dist.Wishart(4.0, t * SMALL), positive_definite, TRIPLE),
    "WishartCholesky": (lambda t: dist.WishartCholesky(4.0, t * SMALL), lower, TRIPLE),
    "ZeroSumNormal": (lambda t: dist.ZeroSumNormal(t, (4,)), sums_to_zero, VECTOR),
    "ZeroSumNormal by its bijection": (
        lambda t: dist.ZeroSumNormal(t, (4,)),
        biject_to(constraints.zero_sum(1)),
        TRIPLE,
    ),
}


def _log_density(make, bijection):
    def function(theta, x):
        with dist.distribution.validation_enabled():
            return theta * jnp.sum(make(theta).log_prob(bijection(x)))

    return function


DENSITIES = {
    name: (_log_density(make, bijection), x) for name, (make, bijection, x) in _MADE.items()
}

# Continuous distributions that are not tried: without a density that depends on anything, or an
# atom; the base class and wrappers whose parts are.
LEFT_OUT = {
    "Delta",
    "Distribution",
    "ExpandedDistribution",
    "ImproperUniform",
    "Unit",
    "GaussianCopulaBeta",
    "HurdleLogits",
    "HurdleProbs",
}
