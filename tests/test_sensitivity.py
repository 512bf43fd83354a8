"""sensitivity: means, deviations and quantiles against closed forms; marks; the table itself."""

from __future__ import annotations

import dataclasses
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import nuts
import pytest
from scipy.stats import norm

import diffmh
from diffmh.tools import examination
from diffmh.tools.draw_averages import AtDraws
from diffmh.tools.quantities import influence, judge
from diffmh.tools.sensitivity_rows import of_own_chains

KEY = jax.random.key(0)
Y, SCALE = jnp.array([1.0, 2.0, 0.5]), 0.8
PRIOR, LIKELIHOOD = "power of the prior", "power of the likelihood"
STATISTICS = ("mean", "sd", "q05", "median", "q90")
LEVELS = {"q05": 0.05, "median": 0.5, "q90": 0.9}


def conjugate(y, scale):
    mean = numpyro.sample("mean", dist.Normal(0.0, scale))
    numpyro.deterministic("twice", 2 * mean)
    numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def mean_of(theta, sites):
    return {"mean": sites["mean"]}


def statistic(name: str, noise: float = 0.0):
    """A statistic of `mean + N(0, noise)` as a function of the prior's scale and both powers."""

    def of(scale, a, b):
        precision = a / scale**2 + b * len(Y)
        mean, deviation = b * jnp.sum(Y) / precision, jnp.sqrt(1 / precision + noise)
        if name == "sd":
            return deviation
        return mean + (norm.ppf(LEVELS[name]) if name != "mean" else 0.0) * deviation

    return of


def exact(name: str, noise: float = 0.0) -> dict[str, float]:
    slopes = jax.grad(statistic(name, noise), argnums=(0, 1, 2))(SCALE, 1.0, 1.0)
    return dict(zip(("scale", PRIOR, LIKELIHOOD), map(float, slopes), strict=True))


def exact_draws(shape=(4, 5_000), key=KEY):
    precision = 1 / SCALE**2 + len(Y)
    return jnp.sum(Y) / precision + jax.random.normal(key, shape) / precision**0.5


def named(statistic: str, quantity: str) -> str:
    return quantity if statistic == "mean" else f"{statistic}({quantity})"


@pytest.fixture(scope="module")
def posterior():
    return diffmh.from_numpyro(conjugate, Y, theta={"scale": SCALE})


@pytest.fixture(scope="module")
def table(posterior):
    draws = {"mean": exact_draws()}
    return diffmh.sensitivity(posterior, mean_of, draws=draws, quantities=STATISTICS)


@pytest.mark.parametrize("name", STATISTICS)
def test_closed_forms(table, name):
    for hyperparameter, truth in exact(name).items():
        row = table[named(name, "mean"), hyperparameter]
        assert row.trusted and row.statistic == name
        assert abs(row.derivative - truth) < 4 * row.error, row
        assert row.error < 0.15 * np.hypot(truth, 0.2)
        np.testing.assert_allclose(row.high - row.low, 3.92 * row.error, rtol=0.2)


def test_another_derivative_would_be_seen(table):
    """Each statistic's rows with respect to the scale, held against the next statistic's."""
    for name, other in itertools.pairwise(STATISTICS):
        row = table[named(name, "mean"), "scale"]
        assert abs(row.derivative - exact(other)["scale"]) > 4 * row.error, (name, other)


def test_units(table):
    row = table["sd(mean)", "scale"]
    deviation = (1 / SCALE**2 + len(Y)) ** -0.5
    np.testing.assert_allclose(row.per_ten_percent, 0.1 * SCALE * row.derivative, rtol=1e-6)
    np.testing.assert_allclose(row.in_deviations, row.per_ten_percent / deviation, rtol=0.02)


def test_a_quantity_that_depends_on_theta(posterior):
    """θ x: its statistics are θ times those of x, with a derivative of their own, E[∂f | f = q]."""
    scaled = lambda theta, sites: {"x": theta["scale"] * sites["mean"]}
    found = diffmh.sensitivity(
        posterior, scaled, draws={"mean": exact_draws()}, quantities=STATISTICS
    )
    for name in STATISTICS:
        slope = jax.grad(lambda s, name=name: s * statistic(name)(s, 1.0, 1.0))(SCALE)
        row = found[named(name, "x"), "scale"]
        assert abs(row.derivative - slope) < 4 * row.error, row


def test_every_quantile_of_a_shifted_distribution_moves_by_one():
    def shifted(at):
        numpyro.sample("x", dist.Normal(at, 1.0))

    posterior = diffmh.from_numpyro(shifted, theta={"at": 0.5})
    levels = ("q02.5", "q10", "q25", "q50", "q75", "q90", "q97.5")
    draws = {"x": 0.5 + jax.random.normal(KEY, (4, 4_000))}
    found = diffmh.sensitivity(
        posterior, lambda t, z: {"x": z["x"]}, draws=draws, quantities=levels
    )
    for level in levels:
        row = found[f"{level}(x)", "at"]
        assert abs(row.derivative - 1) < 4 * row.error and row.error < 0.12


def coverage(series, seeds=200, shift=0.0):
    """How often 95 % intervals hold, for sd and three quantiles of a normal with respect to its
    scale, whose derivatives are 1 and z_p.
    """
    rng = np.random.default_rng(3)
    wanted = {"sd": 1.0, "q05": norm.ppf(0.05), "median": 0.0, "q90": norm.ppf(0.9)}
    held = {name: [] for name in wanted}
    for _ in range(seeds):
        x = series(rng)
        at = AtDraws(x[..., None], (x**2 - 1)[..., None], np.zeros(x.shape))
        for name, truth in wanted.items():
            found = influence(name, at, 0)
            judged = judge(float(found.derivative[0]), found.series[..., 0], at.weights, 0.95)
            held[name].append(judged.low < truth + shift * judged.error < judged.high)
    return {name: np.mean(hits) for name, hits in held.items()}


def test_coverage():
    """Pooled over 4 rows and 200 seeds, standard error below 1.2 %: 95 % within 3 of them. With the
    truth two standard errors off, it would be far lower.
    """
    independent = lambda rng: rng.normal(size=(4, 300))
    found = coverage(independent)
    assert 0.91 < np.mean(list(found.values())) < 0.985 and min(found.values()) > 0.88, found
    assert np.mean(list(coverage(independent, seeds=50, shift=2.0).values())) < 0.7


def test_coverage_with_autocorrelation():
    """Every draw five times: errors that took them for independent would hold in two of three."""
    repeated = lambda rng: np.repeat(rng.normal(size=(4, 200)), 5, axis=1)
    found = coverage(repeated, seeds=100)
    assert 0.89 < np.mean(list(found.values())) < 0.99, found


def test_errors_of_density_and_quantile_enter():
    """The influence has mean zero, and leaving the density's out would make the error smaller."""
    x = np.random.default_rng(0).normal(size=(4, 1_000))
    at = AtDraws(x[..., None], np.stack([x, x**2 - 1], -1), np.zeros(x.shape))
    found = influence("q05", at, 0)
    np.testing.assert_allclose(at.mean(found.series), 0.0, atol=1e-12)
    assert found.missing == ""


def test_discrete_quantities_have_means_and_no_quantiles(posterior):
    positive = lambda theta, sites: {"positive": sites["mean"] > 0.9}
    found = diffmh.sensitivity(
        posterior, positive, draws={"mean": exact_draws()}, quantities=("mean", "q50")
    )
    assert found["positive", "scale"].trusted
    row = found["q50(positive)", "scale"]
    assert np.isnan(row.derivative) and not row.trusted and "discrete" in row.doubt


def test_predictions(posterior):
    """A new observation: `mean + N(0, 1)`, another key for each draw."""
    predict = lambda theta, sites, key: {"new": sites["mean"] + jax.random.normal(key)}
    draws = {"mean": exact_draws()}
    found = diffmh.sensitivity(posterior, predict, KEY, draws=draws, quantities=STATISTICS)
    for name in STATISTICS:
        row = found[named(name, "new"), "scale"]
        assert abs(row.derivative - exact(name, noise=1.0)["scale"]) < 4 * row.error, row
    with pytest.raises(ValueError, match="pass a `key` too"):
        diffmh.sensitivity(posterior, predict, draws=draws)
    with pytest.raises(ValueError, match="predictions, `sd` and quantiles"):
        diffmh.sensitivity(posterior, predict, KEY, kernel=posterior.kernel(), num_samples=10)


def centred(scale):
    mu = numpyro.sample("mu", dist.Normal(0.0, scale))
    tau = numpyro.sample("tau", dist.HalfNormal(2.0))
    theta = numpyro.sample("theta", dist.Normal(mu, tau).expand([3]))
    numpyro.sample("y", dist.Normal(theta, 1.0), obs=Y)


def non_centred(scale):
    mu = numpyro.sample("mu", dist.Normal(0.0, scale))
    tau = numpyro.sample("tau", dist.HalfNormal(2.0))
    eta = numpyro.sample("eta", dist.Normal(0.0, 1.0).expand([3]))
    numpyro.sample("y", dist.Normal(mu + tau * eta, 1.0), obs=Y)


def test_the_prior_is_that_of_the_sites_that_are_named():
    """With the top level named, it does not matter how the hierarchy is written."""
    rng = np.random.default_rng(0)
    mu, tau = rng.normal(size=(4, 200)), np.abs(rng.normal(size=(4, 200)))
    eta = rng.normal(size=(4, 200, 3)) + 0.3 * tau[..., None]
    both = {
        centred: {"mu": mu, "tau": tau, "theta": mu[..., None] + tau[..., None] * eta},
        non_centred: {"mu": mu, "tau": tau, "eta": eta},
    }

    def of_tau(model, prior):
        posterior = diffmh.from_numpyro(model, theta={"scale": 1.5})
        f = lambda theta, sites: {"tau": sites["tau"]}
        # With weights there are no control variates, which differ between the two.
        weights = np.ones(np.shape(tau))
        table = diffmh.sensitivity(posterior, f, draws=both[model], weights=weights, prior=prior)
        return table["tau", PRIOR].derivative

    found = [of_tau(model, ("mu", "tau")) for model in both]
    by_default = [of_tau(model, None) for model in both]
    every = of_tau(centred, ["mu", "tau", "theta"])
    np.testing.assert_allclose(every, by_default[0], rtol=1e-5)
    log_prior = -0.5 * (mu / 1.5) ** 2 - tau**2 / 8
    covariance = np.mean((tau - tau.mean()) * log_prior)
    np.testing.assert_allclose(found, covariance, rtol=0.02)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)
    assert abs(by_default[0] - by_default[1]) > 0.1
    with pytest.raises(ValueError, match=r"which are \['eta', 'mu', 'tau'\], got 'theta'"):
        of_tau(non_centred, "theta")


def marks(posterior, draws, **how):
    return diffmh.sensitivity(posterior, mean_of, draws=draws, **how)


def test_a_chain_in_another_mode_is_marked(posterior):
    stuck = exact_draws((4, 500)).at[2].add(4.0)
    found = marks(posterior, {"mean": stuck}, quantities=("mean", "sd", "q90"))
    assert not any(row.trusted for row in found) and len(found.trusted) == 0
    text = str(found)
    assert "! 9 of 9 rows not to be trusted: the chains disagree" in text
    assert "look for several modes" in text and text.splitlines()[1].endswith("!")
    assert "the chains disagree" in found._repr_html_()


def test_marks_in_the_picture(posterior, table):
    stuck = marks(posterior, {"mean": exact_draws((4, 500)).at[2].add(4.0)})
    both = dataclasses.replace(table, rows=(*table["sd(mean)"].rows, *stuck.rows))
    trusted, doubtful = diffmh.plots.sensitivity(both).axes
    assert [bar.get_hatch() for bar in doubtful.patches] == ["////"] * 3
    assert all(label.get_text().endswith(" !") for label in doubtful.get_yticklabels())
    assert not any(bar.get_hatch() for bar in trusted.patches)
    assert (trusted.get_title("left") or trusted.get_title()) == "sd(mean)"
    assert not diffmh.plots.sensitivity(table).get_supxlabel()


def test_a_sorted_table_loses_no_row_in_the_picture(table):
    """Sorting by hyperparameter pulls the rows of a quantity apart."""
    figure = diffmh.plots.sensitivity(table.sorted("hyperparameter"))
    axes = [ax for ax in figure.axes if ax.get_visible()]
    assert sum(len(ax.patches) for ax in axes) == len(table.rows)
    assert len(axes) == len(STATISTICS)


def test_few_draws_and_heavy_tails_are_marked(posterior):
    few = marks(posterior, {"mean": exact_draws((4, 20))})
    assert "fewer than 100 effective draws" in few[0].doubt
    slow = jnp.repeat(exact_draws((4, 20)), 50, axis=1)
    assert not marks(posterior, {"mean": slow})[0].trusted
    heavy = jax.random.cauchy(KEY, (4, 1_000))
    found = marks(posterior, {"mean": heavy}, quantities=("mean", "median"))
    assert "heavy tail" in found["mean", "scale"].doubt
    assert "heavy tail" not in found["median(mean)", "scale"].doubt


def test_a_quantity_with_one_value_at_nearly_all_draws_is_marked(posterior):
    """Draws that hold no event, or a handful, would give a derivative of 0 ± 0, or a poor one; the
    exact one is not zero.
    """
    x = np.sort(np.ravel(exact_draws((4, 1_000))))
    never, rare, often = (float(end) for end in (x[-1] + 1, x[-5:-3].mean(), x[-50:-48].mean()))

    def above(theta, sites):
        limits = {"never": never, "rare": rare, "often": often}
        return {name: sites["mean"] > limit for name, limit in limits.items()}

    draws = {"mean": exact_draws((4, 1_000))}
    found = diffmh.sensitivity(posterior, above, draws=draws)
    assert found["never", "scale"].derivative == 0 and found["never", "scale"].error == 0
    for name in ("never", "rare"):
        assert all("same value at all draws" in row.doubt for row in found[name])
    assert all(row.trusted for row in found["often"])
    # In one stretch, fifty events are one.
    together = np.concatenate([x[-50:], np.random.default_rng(0).permutation(x[:-50])])
    draws = {"mean": together.reshape(4, 1_000)}
    for row in diffmh.sensitivity(posterior, above, draws=draws)["often"]:
        assert "same value at all draws" in row.doubt


def test_heavy_weights_are_marked(posterior):
    x = exact_draws((4, 1_000))
    found = marks(posterior, {"mean": x}, weights=jnp.exp(2.0 * (x - 1) ** 2))
    assert "weights have a heavy tail" in found[0].doubt


def test_weights_reach_every_statistic(posterior):
    """Draws of the prior with the likelihood as weights."""
    drawn = SCALE * jax.random.normal(KEY, (4, 20_000))
    weights = jnp.exp(-0.5 * jnp.sum((drawn[..., None] - Y) ** 2, axis=-1))
    found = marks(posterior, {"mean": drawn}, weights=weights, quantities=STATISTICS)
    for name in STATISTICS:
        row = found[named(name, "mean"), "scale"]
        assert row.trusted and abs(row.derivative - exact(name)["scale"]) < 4 * row.error, row


WEIGHTED = ("none", "weights", "at")
ABOVE = 1.1


@pytest.mark.parametrize("weighted", WEIGHTED)
@pytest.mark.parametrize("form", ["sites", "states", "thinned"])
@pytest.mark.parametrize("predicts", [False, True])
def test_options_together(posterior, weighted, form, predicts):
    """Every statistic against its closed form, with every way to weigh and to pass draws."""
    there = ABOVE * SCALE if weighted != "none" else SCALE
    precision = 1 / there**2 + len(Y)
    x = jnp.sum(Y) / precision + jax.random.normal(KEY, (4, 4_000)) / precision**0.5
    if form == "thinned":
        x = jnp.repeat(x, 3, axis=1)[:, ::3]
    f, how = mean_of, {}
    if predicts:
        f = lambda theta, sites, key: {"mean": sites["mean"] + jax.random.normal(key)}
        how["key"] = KEY
    if weighted == "weights":
        how["weights"] = np.exp(-0.5 * (1 / SCALE**2 - 1 / there**2) * np.asarray(x) ** 2)
    if weighted == "at":
        how["at"] = {"scale": there}
    draws: Any = types.SimpleNamespace(position={"mean": x}) if form == "states" else {"mean": x}
    found = diffmh.sensitivity(
        posterior, f, draws=draws, quantities=STATISTICS, prior="mean", **how
    )
    for name in STATISTICS:
        for hyperparameter, truth in exact(name, noise=float(predicts)).items():
            row = found[named(name, "mean"), hyperparameter]
            assert row.trusted and abs(row.derivative - truth) < 4 * row.error, row


def test_draws_at_another_theta_need_their_weights(posterior):
    """The mistake that `at` mends would be seen."""
    precision = 1 / (3 * SCALE) ** 2 + len(Y)
    x = jnp.sum(Y) / precision + jax.random.normal(KEY, (4, 8_000)) / precision**0.5
    fourth = lambda theta, sites: sites["mean"] ** 4
    wrong = diffmh.sensitivity(posterior, fourth, draws={"mean": x})["f", "scale"]
    right = diffmh.sensitivity(posterior, fourth, draws={"mean": x}, at={"scale": 3 * SCALE})
    slope = jax.grad(
        lambda s: sum(
            c * statistic("mean")(s, 1.0, 1.0) ** m * statistic("sd")(s, 1.0, 1.0) ** (4 - m)
            for m, c in ((4, 1), (2, 6), (0, 3))
        )
    )(SCALE)
    row = right["f", "scale"]
    assert abs(row.derivative - slope) < 4 * row.error
    assert abs(wrong.derivative - slope) > 8 * wrong.error


def test_a_table_without_rows_and_places_of_numpy(table):
    assert table[np.int64(1)] is table.rows[1]
    with pytest.raises(ValueError, match="the table has no rows"):
        diffmh.plots.sensitivity(table[:0])


def test_health_is_judged_where_rows_are_marked_for_another_reason(posterior):
    many = marks(posterior, with_divergences(50))
    assert "effective draws at least inf" not in str(many)


def with_divergences(count: int):
    import arviz_base

    diverging = np.zeros((4, 500), bool)
    diverging.flat[:count] = True
    return arviz_base.from_dict(
        {
            "posterior": {"mean": np.asarray(exact_draws((4, 500)))},
            "sample_stats": {"diverging": diverging, "tree_depth": np.full((4, 500), 3)},
        }
    )


def test_divergences_are_reported_and_many_of_them_mark(posterior):
    none, one, some, many = (marks(posterior, with_divergences(n)) for n in (0, 1, 5, 50))
    assert "divergent transitions: 1," in str(one) and not one.report.warnings
    assert "divergent transitions: 0, tree depth 3.0 on average, 3 at most" in str(none)
    assert not none.report.warnings and none[0].trusted
    assert some[0].trusted and "5 of 2,000 transitions diverged" in str(some)
    assert not many[0].trusted and "target acceptance" in many[0].doubt


def test_the_table_is_a_table(table):
    assert len(table) == 15 and [row.quantity for row in table][:3] == ["mean"] * 3
    assert len(table["sd(mean)"]) == 3 and len(table["scale"]) == 5
    assert table[0] is table.rows[0] and len(table[:2]) == 2
    assert table["mean", "scale"].hyperparameter == "scale"
    for wrong in ("other", ("mean", "other"), None, ("mean",)):
        with pytest.raises(KeyError, match="quantities are"):
            table[wrong]
    sizes = [abs(row.derivative) for row in table.sorted("derivative")]
    assert sizes == sorted(sizes, reverse=True)
    names = [row.hyperparameter for row in table.sorted("hyperparameter")]
    assert names == sorted(names)
    with pytest.raises(ValueError, match=r"Sensitivity\.sorted"):
        table.sorted("size")
    assert "d E[mean] / d scale = " in str(table["mean", "scale"])


def test_data_frame_and_html(table):
    frame = table.to_dataframe()
    columns = "quantity hyperparameter derivative error low high per_ten_percent in_deviations"
    assert list(frame.columns)[:9] == [*columns.split(), "trusted"] and len(frame) == 15
    assert frame.derivative[0] == table[0].derivative
    page = table._repr_html_()
    assert page.count("<tr>") == 16 and "split R̂ at most" in page
    assert "effective draws at least" in str(table)


@pytest.fixture(scope="module")
def mcmc(posterior):
    return nuts.mcmc_of(posterior, KEY)


def test_one_line_samples_by_itself(posterior, mcmc, monkeypatch):
    """Against a stand-in of `Posterior.sample`'s form, whatever that does by itself."""
    seen, tree = [], nuts.tree_of(posterior, mcmc)

    def sample(self, key, **options):
        seen.append(options)
        return tree

    monkeypatch.setattr(diffmh.Posterior, "sample", sample, raising=False)
    found = diffmh.sensitivity(posterior, mean_of, KEY)
    row = found["mean", "scale"]
    assert abs(row.derivative - exact("mean")["scale"]) < 4 * row.error and row.trusted
    assert found.draws is tree and "divergent transitions: " in str(found)
    diffmh.sensitivity(posterior, mean_of, KEY, num_samples=50, num_chains=2, progress=True)
    assert seen == [{}, {"num_samples": 50, "num_chains": 2, "progress": True}]


def test_numpyros_mcmc_of_a_potential_has_states(posterior, mcmc):
    found = diffmh.sensitivity(posterior, mean_of, draws=mcmc)
    row = found["mean", "scale"]
    assert abs(row.derivative - exact("mean")["scale"]) < 4 * row.error


LENGTH = {"num_samples": 2_000, "burn_in": 100}


def check_own_chains(found):
    for hyperparameter, truth in exact("mean").items():
        row = found["mean", hyperparameter]
        assert row.trusted and abs(row.derivative - truth) < 4 * row.error, row
    assert found.draws is None


def test_our_own_chains(posterior):
    kernel = posterior.kernel(1.0)
    found = diffmh.sensitivity(posterior, mean_of, KEY, kernel=kernel, **LENGTH)
    check_own_chains(found)
    # What the report warns of marks every row.
    doubtful = dataclasses.replace(found.report, warnings=("a chain is stuck",))
    theta = {"model": posterior.theta, PRIOR: 1.0, LIKELIHOOD: 1.0}
    assert not any(row.trusted for row in of_own_chains(doubtful, theta, 0.95))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make",
    [
        lambda posterior: diffmh.Langevin(posterior.log_density, 0.7),
        lambda posterior: lambda density: diffmh.Langevin(density, 0.7),
    ],
)
def test_other_kernels_of_our_own(posterior, make):
    check_own_chains(diffmh.sensitivity(posterior, mean_of, KEY, kernel=make(posterior), **LENGTH))


def test_an_adapted_kernel(posterior):
    walk = posterior.kernel(1.0)
    adapted = diffmh.adapt(walk, posterior.theta, KEY, init=posterior.init, num_steps=240)
    found = diffmh.sensitivity(posterior, mean_of, KEY, kernel=adapted, **LENGTH)
    row = found["mean", "scale"]
    assert abs(row.derivative - exact("mean")["scale"]) < 4 * row.error, row


def test_stein_needs_no_declaration_along_our_own_chains(posterior):
    stein = diffmh.Covariance(control="stein")
    kernel = posterior.kernel(1.0)
    found = diffmh.sensitivity(posterior, mean_of, KEY, kernel=kernel, estimator=stein, **LENGTH)
    row = found["mean", "scale"]
    assert abs(row.derivative - exact("mean")["scale"]) < 4 * row.error + 1e-4, row
    with pytest.raises(TypeError, match=r"call it, `kernel=posterior.kernel\(\)`"):
        diffmh.sensitivity(posterior, mean_of, KEY, kernel=posterior.kernel, num_samples=10)


def test_a_kernel_of_another_density(posterior):
    own = diffmh.Langevin(lambda theta, x: posterior.log_density(theta, x), 0.7)
    with pytest.raises(ValueError, match="another log density than the posterior"):
        diffmh.sensitivity(posterior, mean_of, KEY, kernel=own, **LENGTH)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({}, "needs a `key` for sampling, or existing `draws`"),
        ({"key": KEY, "draws": {"mean": jnp.ones((4, 20))}}, "got both a `key`"),
        ({"key": KEY, "weights": jnp.ones(3)}, "for `draws`, which"),
        ({"draws": {"mean": jnp.ones((4, 20))}, "num_samples": 3}, "no use for .'num_samples'"),
        ({"key": KEY, "at": {"scale": 3.0}}, "for `draws`, which"),
        ({"key": {"mean": 1.0}}, "passed by name, `draws=...`"),
        (
            {"draws": {"mean": jnp.ones((4, 20))}, "at": {"scale": 1.0}, "weights": jnp.ones(3)},
            "one of `at`",
        ),
        ({"draws": {"mean": jnp.ones((4, 20))}, "at": {"scales": 1.0}}, "names and shapes of"),
        ({"key": KEY, "kernel": 3, "num_samples": 3}, "`kernel` must be a function"),
        ({"key": KEY, "kernel": lambda density: None, "quantities": "sd"}, "keeps no draws"),
        ({"key": KEY, "burn_in": 3}, "pass their length"),
        ({"key": KEY, "theta": {"scale": 3.0}}, "the posterior's own `theta`"),
        ({"key": KEY, "quantities": ("q100",)}, "got 'q100'"),
        ({"key": KEY, "quantities": ()}, "must be names such as"),
        ({"key": KEY, "quantities": 3}, "must be names such as"),
        ({"key": KEY, "prior": ("means",)}, "names of latent sites"),
        ({"key": KEY, "prior": 3}, "names of latent sites"),
    ],
)
def test_refusals(posterior, how, words):
    with pytest.raises((TypeError, ValueError), match=words):
        diffmh.sensitivity(posterior, mean_of, **how)


def examined(monkeypatch) -> list[Any]:
    """The functions that the analysis of continuity reads from now on."""
    seen = []
    real = examination.moving_jumps

    def moving_jumps(function, *arguments, **options):
        seen.append(function)
        return real(function, *arguments, **options)

    monkeypatch.setattr(examination, "moving_jumps", moving_jumps)
    return seen


def above(scale, low, y):
    """Its density jumps at a place that moves with the scale, unless `low` is positive."""
    mean = numpyro.sample("mean", dist.Normal(0.0, scale))
    numpyro.factor("jump", jnp.where(jnp.exp(mean) + low > -(scale**2), 1.0, 0.0))
    numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def test_the_second_call_examines_nothing(monkeypatch):
    draws, seen = {"mean": exact_draws()}, examined(monkeypatch)
    posterior = diffmh.from_numpyro(conjugate, Y, theta={"scale": SCALE})
    first = diffmh.sensitivity(posterior, mean_of, draws=draws)
    assert len(seen) == 2
    again = diffmh.sensitivity(posterior, mean_of, draws=draws)
    assert len(seen) == 2 and again.rows == first.rows
    # Another f, other powers and another theta are other functions.
    diffmh.sensitivity(posterior, lambda theta, sites: sites["mean"], draws=draws)
    assert len(seen) == 4
    diffmh.sensitivity(posterior, mean_of, draws=draws, prior="mean")
    assert len(seen) == 6


def test_mistake_examinations_of_other_data():
    """Data decide if the density jumps: no other data's verdict counts, nor that of an array that
    was changed in place.
    """
    draws = {"mean": exact_draws()}
    low = np.array(1.0, np.float32)
    posteriors = {
        name: diffmh.from_numpyro(above, low=data, y=Y, theta={"scale": SCALE})
        for name, data in (("no", jnp.array(1.0)), ("a", jnp.array(-9.0)), ("later", low))
    }
    diffmh.sensitivity(posteriors["no"], mean_of, draws=draws)
    diffmh.sensitivity(posteriors["later"], mean_of, draws=draws)
    low[...] = -9.0
    for name in ("a", "later"):
        with pytest.raises(diffmh.NotDifferentiable):
            diffmh.sensitivity(posteriors[name], mean_of, draws=draws)


def test_a_key_or_a_table_in_place_of_draws(posterior, table):
    with pytest.raises(TypeError, match=r"got a table: its draws are `table.draws`"):
        diffmh.sensitivity(posterior, mean_of, draws=table)
    with pytest.raises(TypeError, match=r"got a key: pass draws, such as `posterior.sample"):
        diffmh.influence(posterior, mean_of, KEY)


def test_an_unfit_f_is_refused_before_anything_is_sampled(posterior, monkeypatch):
    monkeypatch.setattr(type(posterior), "sample", lambda *_, **__: pytest.fail("sampled"))
    with pytest.raises(TypeError, match=r"called as `f\(theta, sites\)`, but .* takes `\(s\)`"):
        diffmh.sensitivity(posterior, lambda s: s["mean"], KEY)
    with pytest.raises(KeyError, match=r"asks for 'men'; .* sites are \['mean', 'twice'\]"):
        diffmh.sensitivity(posterior, lambda theta, sites: sites["men"], KEY)
    with pytest.raises(KeyError, match=r"asks for 'scales'; .* theta has \['scale'\]"):
        diffmh.sensitivity(posterior, lambda theta, sites: theta["scales"], KEY)
    with pytest.raises(KeyError, match=r"asks for 'mean'; it is called as `f\(theta, sites\)`"):
        diffmh.sensitivity(posterior, lambda sites, theta: sites["mean"], KEY)


def test_a_name_stands_for_all_entries_of_an_array(posterior):
    f = lambda theta, sites: {"both": jnp.stack([sites["mean"], sites["twice"]])}
    found = diffmh.sensitivity(posterior, f, draws={"mean": exact_draws()}, quantities=STATISTICS)
    assert [row.quantity for row in found["both"][::3]] == ["both[0]", "both[1]"]
    assert {row.quantity for row in found["sd(both)"]} == {"sd(both[0])", "sd(both[1])"}
    assert len(found["both[1]"]) == 3


def test_the_entries_of_a_bare_array_are_those_of_f(posterior):
    f = lambda theta, sites: jnp.stack([sites["mean"], sites["twice"]])
    found = diffmh.sensitivity(
        posterior, f, draws={"mean": exact_draws()}, quantities=("mean", "sd")
    )
    assert list(dict.fromkeys(row.quantity for row in found)) == [
        "f[0]",
        "sd(f[0])",
        "f[1]",
        "sd(f[1])",
    ]
    assert len(found["f"]) == len(found["sd(f)"]) == 6
