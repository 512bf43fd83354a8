"""A program is analysed once for each form of its arguments."""

import jax
import jax.numpy as jnp
import numpy as np

from diffmh import sad
from diffmh.sad import choose_estimator, plan

KEY = jax.random.key(0)


def counting(calls):
    def program(theta, key):
        calls.append(jnp.shape(theta))
        return jnp.sum(sad.bernoulli(key, theta)) ** 2.0

    return program


def test_a_program_is_traced_and_analysed_once_for_each_form(monkeypatch):
    calls, analyses, analyse = [], [], plan.analyse

    def counted(program, differentiated):
        analyses.append(program)
        return analyse(program, differentiated)

    monkeypatch.setattr(plan, "analyse", counted)
    mean = sad.expectation(counting(calls), num_replicates=40)
    mean(0.3, KEY)
    jax.grad(mean)(0.4, KEY)
    jax.jit(jax.grad(mean))(0.3, KEY)
    mean.run(0.2, KEY)
    # Once as it is written, for refusals, and once with its ranges checked.
    assert (calls, len(analyses)) == ([()], 2)
    mean(jnp.full(2, 0.3), KEY)
    assert calls == [(), (2,)]


def test_what_an_outer_transformation_traces_is_not_kept():
    def outer(scale, theta):
        def program(theta, key):
            return scale * sad.bernoulli(key, theta)

        return jax.grad(sad.expectation(program))(theta, KEY)

    for scale in (2.0, 3.0):
        np.testing.assert_allclose(jax.jit(outer)(scale, 0.3), scale, rtol=1e-5)
    assert not plan._plans


def test_the_choice_of_a_pilot_is_kept_for_runs_of_the_same_form(monkeypatch):
    asked, what_pays = [], choose_estimator.what_pays

    def counted(*arguments):
        asked.append(arguments)
        return what_pays(*arguments)

    monkeypatch.setattr(choose_estimator, "what_pays", counted)
    mean = sad.expectation(counting([]), num_replicates=512)
    first, _, again = (mean.run(theta, KEY) for theta in (0.3, 0.4, 0.3))
    assert len(asked) == 1
    np.testing.assert_array_equal(first.gradient, again.gradient)


def test_a_kept_choice_yields_where_the_score_has_no_answer():
    """At p = 0 the score is zero: the run's own pilot sees it."""
    mean = sad.expectation(lambda p, key: sad.bernoulli(key, p) * 1.0, num_replicates=512)
    mean.run(0.3, KEY)
    for kept in choose_estimator._CHOSEN.values():
        kept.update(dict.fromkeys(kept, sad.Score()))
    report = mean.run(0.0, KEY)
    np.testing.assert_allclose(report.gradient, 1.0, rtol=1e-5)
