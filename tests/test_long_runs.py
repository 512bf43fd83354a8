"""Long runs: the same digits however they are cut, interrupted and gone on with; checkpoints that
are whole or refused; a rule for when to stop.
"""

from __future__ import annotations

import errno
import io
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import KEY, OCCUPANCY, WALK, identity

import diffmh
from diffmh.base.validate import concrete
from diffmh.models import mixture
from diffmh.runs.checkpoint import Store

MEAN = diffmh.expectation(identity, WALK, init=0.0, num_samples=2_000, num_chains=8)
PAIR = diffmh.compose(lambda theta, a, b: a * b, MEAN, MEAN)
SGD = optax.adam(0.1)


def bowl(theta, key):
    return jnp.sum((theta["a"] - 1.0) ** 2) + jnp.sum(jax.random.normal(key) * theta["a"])


def descent(**options):
    options = {"optimizer": SGD, "num_iterations": 12} | options
    return diffmh.optimise(bowl, {"a": jnp.array([3.0, -2.0])}, KEY, **options)


def drawn(**options):
    tree = diffmh.sample(WALK, 0.5, KEY, init=0.0, num_samples=1_000, num_chains=4, **options)
    return [tree.posterior.x.values, tree.sample_stats.lp.values]


LINES = {
    "run": lambda **options: MEAN.run(0.5, KEY, **options),
    "composed": lambda **options: PAIR.run(0.5, KEY, **options),
    "until": lambda **options: MEAN.run(0.5, KEY, until=0.05, **options),
    "optimise": descent,
    "sample": drawn,
}


def assert_same(one, other):
    """Bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a == b if isinstance(a, str) else np.array_equal(a, b, equal_nan=True)


class Killed(BaseException):
    """As hard as Python has it."""


THOROUGH = pytest.mark.thorough


@pytest.mark.optimised
@pytest.mark.parametrize(
    "name",
    [
        "run",
        "optimise",
        "sample",
        *(pytest.param(n, marks=THOROUGH) for n in ("composed", "until")),
    ],
)
def test_a_line_that_is_interrupted_goes_on_with_the_same_digits(name, tmp_path, monkeypatch):
    """It is cut down while the third, the fifth and the sixth checkpoint are being written."""
    line = LINES[name]
    whole = line()
    save, count = Store.save, [0]

    def dying(store, *given):
        count[0] += 1
        if count[0] in (3, 5, 6):
            (store.directory / f"{99:08d}.diffmh.part").write_bytes(b"half")
            raise Killed
        save(store, *given)

    monkeypatch.setattr(Store, "save", dying)
    monkeypatch.setattr("diffmh.runs.rounds._STRETCH", 1e-9)
    place, killed = diffmh.Checkpoint(tmp_path / "c", seconds=0), 0
    while True:
        try:
            resumed = line(checkpoint=place)
            break
        except Killed:
            killed += 1
    assert killed == 3
    assert_same(resumed, whole)
    assert_same(line(checkpoint=place), whole)


def slow(theta, key):
    return jnp.sum((theta - 1.0) ** 2) + jnp.sum(jax.random.normal(key, (3,)) * theta)


def slow_descent(checkpoint=None):
    options = {"optimizer": SGD, "num_iterations": 100, "checkpoint": checkpoint}
    found = diffmh.optimise(slow, jnp.array([3.0, -2.0, 1.0]), KEY, **options)
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(found)).hex()


def test_kill_9(tmp_path):
    """The real thing; `benchmarks/kill.py` does it fifty times."""
    code = "import sys, diffmh, test_long_runs as t;"
    code += "print(t.slow_descent(diffmh.Checkpoint(sys.argv[1], seconds=float(sys.argv[2]))))"
    place = tmp_path / "c"
    paths = [str(pathlib.Path(__file__).parent), *sys.path]
    start = lambda seconds: subprocess.Popen(
        [sys.executable, "-c", code, str(place), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    process = start(0)
    while max((int(p.stem) for p in place.glob("0*.diffmh")), default=0) < 3:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    output, _ = start(60).communicate(timeout=300)
    assert output.strip() == slow_descent()


def test_a_resumed_run_does_not_begin_anew(tmp_path, monkeypatch):
    """Finished work is not repeated: its steps are counted."""
    compiled = sys.modules["diffmh.core.compiled"]
    steps, advance = [], compiled._advance

    def counted(*given):
        if concrete(*given[2:4]):
            steps.append((int(given[2]), int(given[3])))
        return advance(*given)

    monkeypatch.setattr(compiled, "_advance", counted)
    place = diffmh.Checkpoint(tmp_path / "c", seconds=0)
    MEAN.run(0.5, KEY, checkpoint=place)
    assert steps[0][0] == 0 and [a for a, _ in steps[1:]] == [b for _, b in steps[:-1]]
    steps.clear()
    MEAN.run(0.5, KEY, checkpoint=place)
    assert not steps


# ---- refusals


def content(directory: pathlib.Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    place = tmp_path_factory.mktemp("kept") / "c"
    MEAN.run(0.5, KEY, checkpoint=diffmh.Checkpoint(place, seconds=0))
    return place


@pytest.mark.parametrize(
    ("line", "differs"),
    [
        (lambda c: MEAN.run(0.6, KEY, checkpoint=c), "theta"),
        (lambda c: MEAN.run(0.5, jax.random.key(9), checkpoint=c), "key"),
        (lambda c: ANOTHER.run(0.5, KEY, checkpoint=c), "program"),
        (lambda c: descent(checkpoint=c), "program"),
    ],
)
def test_a_checkpoint_of_another_problem_is_refused_and_left_alone(line, differs, kept):
    before = content(kept)
    with pytest.raises(ValueError, match=f"another problem, which differs in .*{differs}"):
        line(kept)
    assert content(kept) == before


SHIFT = np.array([0.0, 1.0])
ANOTHER = diffmh.expectation(
    lambda theta, x: x + SHIFT[1], WALK, init=0.0, num_samples=2_000, num_chains=8
)


def test_an_array_that_is_closed_over_makes_another_problem(tmp_path):
    """Two lines of one form: only the data within the objective differ."""

    def line(data):
        objective = lambda theta, key: jnp.sum((theta - data) ** 2)
        return diffmh.optimise(
            objective, 1.0, KEY, optimizer=SGD, num_iterations=2, checkpoint=tmp_path / "c"
        )

    line(jnp.arange(50.0))
    line(jnp.arange(50.0))
    with pytest.raises(ValueError, match="another problem"):
        line(jnp.arange(50.0).at[7].add(1e-3))


def test_files_of_others_are_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"not checkpoints \(thesis.tex\)"):
        MEAN.run(0.5, KEY, checkpoint=tmp_path)
    with pytest.raises(NotADirectoryError, match="is a file"):
        MEAN.run(0.5, KEY, checkpoint=tmp_path / "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_at_once_are_refused(tmp_path):
    with (
        Store(diffmh.Checkpoint(tmp_path / "c")),
        pytest.raises(RuntimeError, match="another process is using it"),
    ):
        descent(checkpoint=tmp_path / "c")


def test_a_full_disk_is_told_and_the_last_checkpoint_stays(tmp_path):
    """No file may grow beyond a few bytes, as the system sees to it."""
    place = diffmh.Checkpoint(tmp_path / "c", seconds=0)
    descent(num_iterations=2, checkpoint=place)
    numbers = sorted(path.name for path in place_of(place).glob("0*"))
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(OSError, match=r"written \(File too large\); .*is untouched") as full:
            descent(checkpoint=place)
        assert len("".join(traceback.format_exception(full.value)).splitlines()) < 60
        with pytest.raises(OSError, match=r"could not be (made|written)"):
            drawn(checkpoint=tmp_path / "draws")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert set(numbers) <= {path.name for path in place_of(place).glob("0*")}
    assert_same(descent(checkpoint=place), descent())


def test_a_disk_too_small_for_the_draws_is_told_with_advice_that_holds(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=r"No space left.*delete this directory.*`num_samples`"):
            drawn(checkpoint=tmp_path / "c")
    with pytest.raises(ValueError, match="another problem"):
        diffmh.sample(WALK, 0.5, KEY, init=0.0, num_samples=10, checkpoint=tmp_path / "c")
    assert_same(drawn(checkpoint=tmp_path / "c"), drawn())


def place_of(checkpoint: diffmh.Checkpoint) -> pathlib.Path:
    return pathlib.Path(checkpoint.directory)


# ---- until


def test_until_runs_whole_rounds_of_the_same_chains():
    report = MEAN.run(0.5, KEY, until=0.05)
    assert report.num_chains % 8 == 0 and report.num_chains > 8
    assert any("stopped after" in note for note in report.notes)
    low, high = report.interval(0.95)[1]
    assert (high - low) / 2 <= 0.05 * report.gradient
    # Its first round is the run without it.
    first = MEAN.run_chains(0.5, KEY).value
    from diffmh.runs.rounds import Course

    course = Course()
    course.again(report.num_chains // 8)
    values = np.asarray(MEAN.run_chains(0.5, KEY, course=course).value)
    np.testing.assert_array_equal(values[:, :8], first)
    assert len(np.unique(values)) == values.size, "every chain has a key of its own"
    np.testing.assert_allclose(report.value, values.mean(), rtol=1e-6)


def test_until_says_when_it_was_not_reached():
    limits = (diffmh.Until(relative=1e-6, max_steps=64_000), diffmh.Until(1e-6, max_seconds=0.01))
    for until in limits:
        report = MEAN.run(0.5, KEY, until=until)
        assert any("`until` was not reached" in warning for warning in report.warnings)
        assert report.num_chains <= 64


@pytest.mark.parametrize(
    ("until", "error", "message"),
    [
        (0.0, ValueError, "positive"),
        (-1.0, ValueError, "positive"),
        (True, TypeError, "relative error"),
        ("1 %", TypeError, "relative error"),
    ],
)
def test_until_refuses(until, error, message):
    with pytest.raises(error, match=message):
        MEAN.run(0.5, KEY, until=until)
    with pytest.raises(ValueError, match="the error to reach"):
        diffmh.Until()


@pytest.mark.thorough
def test_until_is_right_as_often_as_it_says():
    """Over 200 runs; at 95 %, 93 % and less would be seen once in ten by chance."""
    p = diffmh.expectation(mixture.indicator, mixture.sampler(), init=0, num_samples=20)
    exact = np.array([-0.081439, 0.021855, 0.059584])
    inside = []
    for seed in range(200):
        report = p.run(0.4, jax.random.key(seed), until=0.1)
        inside.append(np.abs(report.gradient - exact) <= 0.1 * np.abs(report.gradient).max())
    assert np.all(np.mean(inside, axis=0) >= 0.93)


# ---- progress


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_goes_to_a_terminals_stderr_and_changes_nothing(terminal, monkeypatch, capsys):
    class Screen(io.StringIO):
        def isatty(self):
            return terminal

    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    assert_same(MEAN.run(0.5, KEY, progress=True), MEAN.run(0.5, KEY))
    assert_same(drawn(progress=True), drawn())
    for name in ("run", "sample"):
        assert (f"{name}: 100%" in screen.getvalue()) == terminal
    assert capsys.readouterr().out == ""


@pytest.mark.thorough
def test_an_expectation_on_a_mesh_is_kept_round_by_round(tmp_path):
    mesh = jax.make_mesh((1,), ("chains",))
    kernel, f = OCCUPANCY.simulation.kernel, OCCUPANCY.simulation.f
    length = {"num_samples": 50, "num_chains": 8}
    mean = diffmh.expectation(f, kernel, init=0, mesh=mesh, **length)
    place = diffmh.Checkpoint(tmp_path / "c", seconds=0)
    first = mean.run(0.4, KEY, checkpoint=place)
    assert_same(mean.run(0.4, KEY, checkpoint=place), first)
