"""Checkpoints: of this problem or refused, complete or refused, and never at the cost of a file of
the user's.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import pathlib
import random
import shutil
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import KEY, OCCUPANCY, WALK, identity

import diffmh

LENGTH = {"num_samples": 40, "num_chains": 8}


class Scaled(eqx.Module):
    """f or a control, with arrays of several kinds in it."""

    scale: jax.Array
    of_numpy: np.ndarray
    network: eqx.nn.MLP
    partial: jax.tree_util.Partial

    def __call__(self, theta, x):
        network = self.network(1.0 * jnp.reshape(x, 1))
        return self.partial(self.scale * x + self.of_numpy) + jnp.sum(network)


def scaled(scale=1.0, of_numpy=1.0, bias=1.0, partial=1.0):
    network = eqx.nn.MLP(1, 1, 2, 1, key=KEY)
    network = eqx.tree_at(lambda net: net.layers[-1].bias, network, jnp.array([bias]))
    times = jax.tree_util.Partial(jnp.multiply, jnp.float32(partial))
    return Scaled(jnp.float32(scale), np.float32(of_numpy) * np.ones(1)[0], network, times)


OTHERS = ({"scale": 2.0}, {"of_numpy": 2.0}, {"bias": 2.0}, {"partial": 2.0})


class Bowl(eqx.Module):
    centre: jax.Array

    def __call__(self, theta, key):
        return (theta - self.centre) ** 2 + 0.1 * jax.random.normal(key) * theta


def reported(place, **changed):
    mean = diffmh.expectation(scaled(**changed), WALK, init=0.0, **LENGTH)
    return mean.run(0.5, KEY, checkpoint=place)


def composed(place, **changed):
    first = diffmh.expectation(identity, WALK, init=0.0, **LENGTH)
    second = diffmh.expectation(scaled(**changed), WALK, init=0.0, **LENGTH)
    return diffmh.compose(lambda t, m, n: m * n, first, second).run(0.5, KEY, checkpoint=place)


def by(estimator, place):
    f = lambda theta, j: 1.0 * j
    kernel = OCCUPANCY.simulation.kernel
    mean = diffmh.expectation(f, kernel, init=0, estimator=estimator, **LENGTH)
    return mean.run(0.4, KEY, checkpoint=place)


def with_baseline(place, baseline=1.0):
    return by(diffmh.Score(baseline=jnp.float32(baseline)), place)


def with_control(place, **changed):
    return by(diffmh.StochasticDerivative(control=scaled(**changed), alternatives=2), place)


def descent(place, centre=1.0, rate=0.1, start=3.0, num_iterations=4):
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=rate)
    options = {"optimizer": adam, "num_iterations": num_iterations, "checkpoint": place}
    return diffmh.optimise(Bowl(jnp.float32(centre)), start, KEY, **options)


def descent_of_a_mean(place, **changed):
    mean = diffmh.expectation(scaled(**changed), WALK, init=0.0, **LENGTH)
    options = {"optimizer": optax.sgd(0.1), "num_iterations": 2, "checkpoint": place}
    return diffmh.optimise(mean, 1.0, KEY, **options)


def drawn(place, width=1.0, start=0.0):
    density = lambda width, theta, x: -0.5 * ((x - theta) / width) ** 2
    of_width = jax.tree_util.Partial(density, jnp.float32(width))
    kernel = diffmh.MetropolisHastings(of_width, diffmh.GaussianWalk(2.0))
    options = {"init": jnp.float32(start), "num_samples": 2_000, "num_chains": 2}
    tree = diffmh.sample(kernel, 0.5, KEY, **options, checkpoint=place)
    return [tree.posterior.x.values, tree.sample_stats.lp.values]


def numbers(result) -> list[np.ndarray]:
    leaves = jax.tree.leaves(result)
    return [np.asarray(leaf) for leaf in leaves if not isinstance(leaf, str)]


def hexed(result) -> str:
    return b"".join(leaf.tobytes() for leaf in numbers(result)).hex()


@pytest.mark.parametrize(
    ("line", "others"),
    [
        (reported, OTHERS),
        (with_baseline, [{"baseline": 2.0}]),
        pytest.param(with_control, OTHERS[:1], marks=pytest.mark.thorough),
        (descent, [{"centre": 2.0}, {"rate": 0.2}, {"start": 2.0}]),
        (drawn, [{"width": 2.0}, {"start": 1.0}]),
        pytest.param(composed, OTHERS[:1], marks=pytest.mark.thorough),
        pytest.param(descent_of_a_mean, OTHERS, marks=pytest.mark.thorough),
    ],
)
def test_an_array_in_a_pytree_makes_another_problem(line, others, tmp_path):
    place = tmp_path / "c"
    first = hexed(line(place))
    before = content(place)
    for changed in others:
        with pytest.raises(ValueError, match="holds a run of another problem, which differs in "):
            line(place, **changed)
        assert content(place) == before
    assert hexed(line(place)) == first


def content(directory: pathlib.Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_values_from_python_have_no_digest(tmp_path):
    """Two callbacks look the same in a program, so neither may be continued from."""

    def line(host):
        value = lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), x)
        objective = lambda theta, key: (theta - value(jax.lax.stop_gradient(theta))) ** 2
        options = {"optimizer": optax.sgd(0.1), "num_iterations": 2, "checkpoint": tmp_path / "c"}
        return diffmh.optimise(objective, 1.0, KEY, **options)

    with pytest.raises(ValueError, match=r"checkpoint=\.\.\.` cannot identify .*pure_callback"):
        line(np.cos)


# ---- interrupted, and gone on with by another process


def interrupt(monkeypatch, after: int) -> None:
    """Ctrl-C while a file is being written out, when so many have been."""
    count, flush = [0], os.fsync

    def interrupted(descriptor):
        count[0] += 1
        if count[0] > after:
            raise KeyboardInterrupt
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", interrupted)


RESUMED = (reported, descent, drawn)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A checkpoint of each line, in the middle, and what Ctrl-C said."""
    directory, said = tmp_path_factory.mktemp("interrupted"), []
    for line in RESUMED:
        with pytest.MonkeyPatch.context() as context:
            interrupt(context, after=1)
            with pytest.raises(KeyboardInterrupt) as stop:
                line(diffmh.Checkpoint(directory / line.__name__, seconds=0))
            said.append(str(stop.value))
    return directory, said


def test_a_line_goes_on_in_another_process_with_the_same_digits(interrupted):
    directory, said = interrupted
    for words in said:
        assert "the same call continues from checkpoint 00000001" in words
    code = "import sys, test_checkpoints as t;"
    code += "[print(t.hexed(f(f'{sys.argv[1]}/{f.__name__}'))) for f in t.RESUMED]"
    paths = [str(pathlib.Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "7"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [hexed(line(None)) for line in RESUMED]


def test_ctrl_c_before_the_first_checkpoint(tmp_path, monkeypatch):
    interrupt(monkeypatch, after=0)
    with pytest.raises(KeyboardInterrupt, match="the same call starts again"):
        descent(tmp_path / "c")


# ---- damage


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    directory = tmp_path_factory.mktemp("complete")
    found = {}
    for line in RESUMED:
        place = diffmh.Checkpoint(directory / line.__name__, seconds=0)
        found[line] = hexed(line(place))
    return directory, found


def flip(draw, file, others):
    bad = bytearray(file.read_bytes())
    bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
    file.write_bytes(bad)


def flip_early(draw, file, others):
    bad = bytearray(file.read_bytes())
    bad[draw.randrange(min(128, len(bad)))] ^= 1 << draw.randrange(8)
    file.write_bytes(bad)


def shorten(draw, file, others):
    good = file.read_bytes()
    file.write_bytes(good[: draw.randrange(len(good))])


def lengthen(draw, file, others):
    file.write_bytes(file.read_bytes() + b"\0" * draw.randrange(1, 5000))


def zero(draw, file, others):
    file.write_bytes(b"\0" * file.stat().st_size)


def empty(draw, file, others):
    file.write_bytes(b"")


def delete(draw, file, others):
    file.unlink()


def swap(draw, file, others):
    other = draw.choice(others)
    good = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(good)


DAMAGES = (flip, flip_early, shorten, lengthen, zero, empty, delete, swap)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.thorough) for s in (1, 2, 3))]
)
@pytest.mark.parametrize("line", RESUMED)
def test_a_damaged_file_is_told_or_does_no_harm(line, seed, complete, tmp_path):
    """Each kind of damage to a file of the checkpoint; the right digits, or an error of ours."""
    directory, found = complete
    draw, refused = random.Random(f"{line.__name__}{seed}"), 0
    for damage in DAMAGES:
        place = tmp_path / damage.__name__
        shutil.copytree(directory / line.__name__, place)
        files = sorted(p for p in place.rglob("*") if p.is_file() and p.stat().st_size)
        damage(draw, draw.choice(files), files)
        before = content(place)
        try:
            result = hexed(line(place))
        except ValueError as error:
            assert "`checkpoint=" in str(error) and "damaged" in str(error), damage.__name__
            assert content(place) == before, damage.__name__
            refused += 1
        else:
            assert result == found[line], damage.__name__
    assert refused >= 2


@pytest.mark.parametrize("line", [descent, drawn])
def test_the_newest_file_is_never_believed_when_it_is_damaged(line, complete, tmp_path):
    directory, found = complete
    for damage in (flip, shorten):
        place = tmp_path / damage.__name__
        shutil.copytree(directory / line.__name__, place)
        newest = max(place.glob("0*"))
        damage(random.Random(damage.__name__), newest, [])
        with pytest.raises(ValueError, match="is damaged"):
            line(place)
        newest.unlink()
        assert hexed(line(place)) == found[line]


def test_draws_cut_to_nothing(complete, tmp_path):
    directory, _ = complete
    for i in range(3):
        place = tmp_path / str(i)
        shutil.copytree(directory / "drawn", place)
        (place / "draws" / f"{i:03d}.npy").write_bytes(b"")
        with pytest.raises(ValueError, match="the draws in 'draws' are damaged"):
            drawn(place)


# ---- files of the user's


USERS = ("backup.deleted/notes", "00000001/notes", "a.orbax-checkpoint-tmp/x", "²", "draws/000.npy")


@pytest.mark.parametrize("file", USERS)
@pytest.mark.parametrize("used", [False, True])
def test_files_of_the_user_are_left_alone(file, used, complete, tmp_path):
    """In a directory of his own, and in one that holds a run already."""
    directory, found = complete
    line, place = (descent if used else drawn), tmp_path / "c"
    if used:
        shutil.copytree(directory / line.__name__, place)
    mine = place / file
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    if used and file.startswith("draws"):
        assert hexed(line(place)) == found[line]
    else:
        with pytest.raises(ValueError, match=f"not checkpoints.*{file.split('/')[0]}"):
            line(place)
    assert mine.read_text() == "mine"


def test_links_are_not_followed(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for name in ("00000001.diffmh.part", "00000002.diffmh.part"):
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "c" / name).symlink_to(mine)
    descent(tmp_path / "c")
    assert mine.read_text() == "mine"


def test_a_path_begins_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    descent("~/runs/c")
    assert any((tmp_path / "runs" / "c").iterdir())


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("gs://bucket/run", "on a file system, got the address 'gs://bucket/run'"),
        ("runs/\0", "NUL"),
        ("", "got an empty one"),
        ("~nobody-of-this-name/run", "home directory that does not exist"),
    ],
)
def test_paths_that_are_refused(path, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words):
        descent(path)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def read_only(monkeypatch):
    """Nothing can be written any more."""

    def refused(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    open_file, open_descriptor = io.open, os.open

    def opened(file, mode="r", *more, **named):
        return refused() if set(mode) & set("wax+") else open_file(file, mode, *more, **named)

    def descriptor(path, flags, *more, **named):
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return refused() if writes else open_descriptor(path, flags, *more, **named)

    def switch_on():
        for module in (io, builtins):
            monkeypatch.setattr(module, "open", opened)
        monkeypatch.setattr(os, "open", descriptor)
        for name in ("rename", "replace", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, refused)

    return switch_on


def test_a_finished_run_is_read_from_a_disk_that_cannot_be_written_to(
    complete, read_only, tmp_path
):
    directory, found = complete
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    read_only()
    for line in RESUMED:
        assert hexed(line(tmp_path / line.__name__)) == found[line]
    with pytest.raises(OSError, match=r"the directory cannot be written to: .*Read-only"):
        descent(tmp_path / "descent", num_iterations=5)
