"""The paper on one command: what is saved, the table and the exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import os
import pathlib
import re
from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest
from figure_data import SMALL

from diffmh.reproduce import EXPERIMENTS, Claim, Result, catalogue, saved
from diffmh.reproduce.experiment import against_exact, digits, worst
from diffmh.reproduce.mixture import maximiser, reached
from diffmh.reproduce.progress import Status
from diffmh.tools.optimise import optimise
from diffmh_command import main


class Done(NamedTuple):
    code: int
    stdout: str
    stderr: str


def command(*arguments: object) -> Done:
    """The command as a user would run it, in this process."""
    if arguments[0] == "reproduce" and "--processes" not in arguments:
        arguments = (*arguments, "--processes", 1)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Two experiments of six, the quickest, as a user would run them."""
    out = tmp_path_factory.mktemp("results")
    done = command("reproduce", "branching", "4", "--fast", "--out", out)
    assert done.code == 0, done.stderr
    return out, done


@pytest.fixture
def quick(monkeypatch):
    """Experiments that compute nothing, in place of all six; `quick[name]` is how often each was
    asked to.
    """
    asked = dict.fromkeys(EXPERIMENTS, 0)

    def stand_in(name):
        def compute(key, size, progress):
            asked[name] += 1
            return Result(SMALL[name], "none", [Claim(name, "1", "1", "1", "none", True)])

        return dataclasses.replace(EXPERIMENTS[name], compute=compute)

    for name in tuple(EXPERIMENTS):
        monkeypatch.setitem(catalogue.EXPERIMENTS, name, stand_in(name))
    return asked


def break_off(monkeypatch, name: str, how: BaseException) -> None:
    def compute(key, size, progress):
        raise how

    broken = dataclasses.replace(EXPERIMENTS[name], compute=compute)
    monkeypatch.setitem(catalogue.EXPERIMENTS, name, broken)


# ---- what is there


def test_all_figures_of_the_paper_are_there():
    listed = command("reproduce", "--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(EXPERIMENTS)
    assert [experiment.figure for experiment in EXPERIMENTS.values()] == [1, 2, 3, 4, 5, 6]


def test_the_table_is_on_stdout_and_progress_on_stderr(results):
    _, done = results
    for words in ("dE[x]/dθ, N(θ,1)", "verdict", "All verdicts are good"):
        assert words in done.stdout
    assert "[1/2] branching" in done.stderr and "[1/2]" not in done.stdout
    assert "recoupling: finished, 2 of 2" in done.stderr


def test_what_is_saved(results):
    out, _ = results
    kinds = (".npz", ".json", ".svg", ".png", "-narrow.svg")
    wanted = {name + kind for name in ("branching", "recoupling") for kind in kinds}
    assert {path.name for path in out.iterdir()} == {"index.html", *wanted}
    record = json.loads((out / "branching.json").read_text())
    assert record["size"] == "fast" and record["seed"] == 0 and len(record["rows"]) == 2
    text = (out / "index.html").read_text()
    assert "src=" not in text and "http" not in fetched(text)


def fetched(text: str) -> str:
    """All that a browser would fetch by itself."""
    text = re.sub(r'<a class="home" href="[^"]*"', "", text)
    return " ".join(re.findall(r'(?<!xmlns:)(?:href|src)="([^"]*)"', text))


def test_the_same_seed_gives_the_same_bytes(results, tmp_path):
    out, _ = results
    assert command("reproduce", "fig1", "--fast", "--out", tmp_path).code == 0
    for kind in (".npz", ".json", ".svg", "-narrow.svg"):
        name = "branching" + kind
        assert (tmp_path / name).read_bytes() == (out / name).read_bytes()


def test_drawing_reads_only_what_was_saved(results, monkeypatch):
    out, _ = results
    before = (out / "recoupling.svg").read_bytes()
    (out / "recoupling.svg").unlink()
    monkeypatch.setattr(saved.jax.random, "key", lambda *_: pytest.fail("drawing computes nothing"))
    saved.plot(EXPERIMENTS["recoupling"], out)
    assert (out / "recoupling.svg").read_bytes() == before


def test_a_failed_verdict_is_an_exit_code(tmp_path, monkeypatch):
    failed = Result(SMALL["branching"], "none", [Claim("a", "1", "1", "2", "none", False)])
    wrong = dataclasses.replace(EXPERIMENTS["branching"], compute=lambda *_: failed)
    monkeypatch.setitem(catalogue.EXPERIMENTS, "branching", wrong)
    done = command("reproduce", "branching", "--out", tmp_path)
    assert done.code == 1 and "1 of 1 verdicts FAILED" in done.stdout
    assert "✗ failed" in (tmp_path / "index.html").read_text()


# ---- refused before anything is computed


def test_an_unknown_name_is_refused(quick, tmp_path):
    done = command("reproduce", "figure9", "--out", tmp_path / "none")
    assert done.code == 2 and "there is no experiment figure9" in done.stderr
    assert not (tmp_path / "none").exists() and not any(quick.values())


@pytest.mark.parametrize("seed", [2**32, -1, 2**64])
def test_a_seed_that_would_be_folded_is_refused(quick, tmp_path, seed):
    done = command("reproduce", "--seed", seed, "--out", tmp_path)
    assert done.code == 2 and f"below 2³² = 4294967296, got {seed}" in done.stderr
    assert not any(quick.values())


def test_the_largest_seed_is_not_another(quick, tmp_path):
    assert command("reproduce", "branching", "--seed", 2**32 - 1, "--out", tmp_path).code == 0
    assert json.loads((tmp_path / "branching.json").read_text())["seed"] == 2**32 - 1


def test_a_file_is_not_a_directory(quick, tmp_path):
    (tmp_path / "taken").write_text("mine")
    done = command("reproduce", "--out", tmp_path / "taken")
    assert done.code == 2 and "is a file: name a directory" in done.stderr
    assert (tmp_path / "taken").read_text() == "mine" and not any(quick.values())


@pytest.mark.parametrize(
    ("method", "number", "words"),
    [
        ("mkdir", errno.EACCES, "cannot be created"),
        ("write_bytes", errno.EACCES, "cannot write 16 MB"),
        ("write_bytes", errno.ENOSPC, "cannot write 16 MB"),
    ],
)
def test_a_directory_that_cannot_be_written(quick, tmp_path, monkeypatch, method, number, words):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(pathlib.Path, method, refuse)
    done = command("reproduce", "--out", tmp_path / "full")
    assert done.code == 2 and f"{words}: {os.strerror(number)}" in done.stderr
    assert not any(quick.values())


def test_without_an_extra_it_says_which_to_install(monkeypatch, tmp_path):
    from diffmh.reproduce import cli

    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    done = command("reproduce", "--out", tmp_path / "none")
    assert done.code == 2 and 'pip install "diffmh[reproduce]"' in done.stderr
    assert "matplotlib, optax, tqdm" in done.stderr and not (tmp_path / "none").exists()


# ---- stopped, and going on


def test_ctrl_c_says_what_is_finished_and_the_same_command_goes_on(quick, tmp_path, monkeypatch):
    break_off(monkeypatch, "ising", KeyboardInterrupt())
    done = command("reproduce", "--out", tmp_path)
    assert done.code == 130 and "Stopped. Finished: branching, mixture" in done.stderr
    assert "Not finished: ising, recoupling, variance, ascent." in done.stderr
    assert "The same command continues" in done.stderr and "Traceback" not in done.stderr
    assert 'id="mixture"' in (tmp_path / "index.html").read_text()

    monkeypatch.undo()
    asked = {}
    for name in EXPERIMENTS:
        outcome = Result(SMALL[name], "none", [Claim(name, "1", "1", "1", "none", True)])
        compute = lambda *_, name=name, outcome=outcome: asked.setdefault(name, outcome)
        stand_in = dataclasses.replace(EXPERIMENTS[name], compute=compute)
        monkeypatch.setitem(catalogue.EXPERIMENTS, name, stand_in)
    done = command("reproduce", "--out", tmp_path)
    assert done.code == 0 and list(asked) == ["ising", "recoupling", "variance", "ascent"]
    assert all(f"\n{name} " in done.stdout for name in EXPERIMENTS), "the table is whole"
    assert "branching: taken from" in done.stderr


def test_nothing_finished(quick, tmp_path, monkeypatch):
    break_off(monkeypatch, "branching", KeyboardInterrupt())
    done = command("reproduce", "--out", tmp_path)
    assert (
        done.code == 130
        and "Stopped. Finished: nothing yet. Not finished: branching" in done.stderr
    )


def test_a_disk_that_fills_on_the_way(quick, tmp_path, monkeypatch):
    break_off(monkeypatch, "mixture", OSError(errno.ENOSPC, "No space left on device"))
    done = command("reproduce", "--out", tmp_path)
    assert done.code == 2 and "No space left on device" in done.stderr
    assert "Finished: branching" in done.stderr


def test_only_what_is_the_same_is_taken_up(quick, tmp_path, monkeypatch):
    run_it = lambda *options: command("reproduce", "branching", "--out", tmp_path, *options)
    computed = lambda: quick["branching"]
    run_it()
    run_it()
    assert computed() == 1
    run_it("--seed", 1)
    assert computed() == 2
    run_it("--seed", 1, "--fast")
    assert computed() == 3
    run_it("--seed", 1, "--fast", "--again")
    assert computed() == 4
    run_it("--seed", 1, "--fast")
    assert computed() == 4
    monkeypatch.setattr(saved, "made_by", lambda: "other code")
    run_it("--seed", 1, "--fast")
    assert computed() == 5
    run_it("--seed", 1, "--full")
    assert computed() == 6


@pytest.mark.parametrize("kind", [".npz", ".json", ".svg", "-narrow.svg"])
def test_what_is_damaged_is_not_taken_up(quick, tmp_path, kind):
    command("reproduce", "branching", "--out", tmp_path)
    path = tmp_path / f"branching{kind}"
    if "svg" in kind:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:100])
    assert command("reproduce", "branching", "--out", tmp_path).code == 0
    assert quick["branching"] == 2


@pytest.mark.parametrize("kind", [".npz", ".json", ".svg", "-narrow.svg"])
def test_what_has_changed_is_not_taken_up(quick, tmp_path, kind):
    """A digit of a row, a bit of an array, a file of no length."""
    run_it = lambda: command("reproduce", "branching", "--out", tmp_path)
    run_it()
    path = tmp_path / f"branching{kind}"
    good = path.read_bytes()
    changed = good.replace(b'"ours": "1"', b'"ours": "2"') if kind == ".json" else None
    for count, bad in enumerate([changed or good[:-40] + b"#" + good[-39:], b""], start=2):
        path.write_bytes(bad)
        assert run_it().code == 0 and path.read_bytes() == good
        assert quick["branching"] == count


# ---- several processes


def test_two_processes_find_the_same_bytes_as_one(results, tmp_path):
    """Also a page that has both figures, and does not reload itself any more."""
    out, _ = results
    names = ("branching", "recoupling")
    done = command("reproduce", *names, "--fast", "--out", tmp_path, "--processes", 2)
    assert done.code == 0 and "finished, 2 of 2" in done.stderr
    for name in (f"{name}{kind}" for name in names for kind in (".npz", ".json", ".svg")):
        assert (tmp_path / name).read_bytes() == (out / name).read_bytes()
    text = (tmp_path / "index.html").read_text()
    assert all(f'id="{name}"' in text for name in names) and "http-equiv" not in text


def test_a_process_that_fails_stops_the_run(tmp_path):
    """A figure's name that is taken by a directory: its files cannot be written."""
    (tmp_path / "branching.npz").mkdir()
    names = ("branching", "recoupling")
    done = command("reproduce", *names, "--fast", "--out", tmp_path, "--processes", 2)
    assert done.code == 2 and "Is a directory" in done.stderr
    assert "Not finished: branching" in done.stderr


def test_a_number_of_processes_below_one_is_refused(quick, tmp_path):
    done = command("reproduce", "--out", tmp_path / "none", "--processes", 0)
    assert done.code == 2 and "`--processes` must be at least 1, got 0" in done.stderr
    assert not any(quick.values())


def test_the_page_fills_as_figures_arrive(quick, tmp_path, monkeypatch):
    """While one is computed, the page has those before it and names those to come."""
    pages = []

    def look(key, size, progress):
        pages.append((tmp_path / "index.html").read_text())
        return Result(SMALL["ising"], "none", [Claim("ising", "1", "1", "1", "none", True)])

    looking = dataclasses.replace(EXPERIMENTS["ising"], compute=look)
    monkeypatch.setitem(catalogue.EXPERIMENTS, "ising", looking)
    assert command("reproduce", "--out", tmp_path).code == 0
    assert 'id="mixture"' in pages[0] and 'id="variance"' not in pages[0]
    assert "Still being computed: 3 " in pages[0] and 'http-equiv="refresh"' in pages[0]
    assert "Still being computed" not in (tmp_path / "index.html").read_text()


# ---- files of the user's


def test_links_are_not_followed(quick, tmp_path):
    """Whatever name a file has on the way, a link of that name leads nowhere."""
    mine, out = tmp_path / "mine", tmp_path / "out"
    mine.write_text("mine")
    out.mkdir()
    kinds = (".npz", ".json", ".svg", ".png", "-narrow.svg")
    names = ["index.html", *(f"branching{kind}" for kind in kinds)]
    for link in [f".room-{os.getpid()}", *(f".{name}.part" for name in names), *names[1:]]:
        (out / link).symlink_to(mine)
    assert command("reproduce", "branching", "--out", out).code == 0
    assert mine.read_text() == "mine"


def test_a_page_of_the_users_is_left_alone(quick, tmp_path):
    (tmp_path / "index.html").write_text("mine")
    done = command("reproduce", "branching", "--out", tmp_path)
    assert done.code == 2 and "`index.html` that diffmh did not write" in done.stderr
    assert (tmp_path / "index.html").read_text() == "mine" and not any(quick.values())


def test_an_address_is_not_a_directory(quick, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command("reproduce", "branching", "--out", "gs://bucket/results")
    assert done.code == 2 and "must be the path of a directory" in done.stderr
    monkeypatch.setenv("HOME", str(tmp_path))
    assert command("reproduce", "branching", "--out", "~/results").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


# ---- stdout


FULL = pathlib.Path("/dev/full")


@pytest.mark.parametrize(
    "stdout, code",
    [
        ("ascii", 0),
        pytest.param("full", 2, marks=pytest.mark.skipif(not FULL.exists(), reason="on Linux")),
    ],
)
def test_a_stdout_that_takes_no_greek_or_nothing(stdout, code, quick, tmp_path, monkeypatch):
    """After the work, what cannot be printed is not a failed verdict."""
    raw = io.BytesIO() if stdout == "ascii" else FULL.open("wb", buffering=0)
    encoded = io.TextIOWrapper(raw, encoding="ascii")
    monkeypatch.setattr("sys.stdout", encoded)
    assert main(["reproduce", "branching", "--out", str(tmp_path)]) == code
    if stdout == "ascii":
        assert "ours \\xb1 error" in raw.getvalue().decode()


# ---- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_few_in_a_log():
    screen, log, patient = Terminal(), io.StringIO(), io.StringIO()
    for stream, pause in ((screen, 2.0), (log, 0.0), (patient, 60.0)):
        progress = Status("variance", stream, pause)
        assert list(progress.over(["long words", "b"], lambda item: f"case {item}")) == [
            "long words",
            "b",
        ]
        progress.say("stage")
        progress.end("done")
    assert screen.getvalue().count("\n") == 1
    shown = screen.getvalue().split("\r")
    assert "case b, 2 of 2" in shown[2]
    assert len(shown[2]) >= len(shown[1]), "what was longer is written over"
    assert log.getvalue().splitlines()[0].startswith("variance: case long words, 1 of 2")
    assert len(log.getvalue().splitlines()) == 4
    assert patient.getvalue() == "variance: stage (0 s)\nvariance: done\n"


def test_an_ascent_says_how_far_it_is_in_a_log():
    """Three hundred iterations were silent where stderr is no terminal."""
    log = io.StringIO()
    along = Status("mixture", log, 0.0).along("iteration of the ascent")
    steps = {"optimizer": optax.sgd(0.1), "num_iterations": 3}
    optimise(lambda t, key: t**2, 1.0, jax.random.key(0), **steps, progress=along)
    lines = log.getvalue().splitlines()
    assert len(lines) == 3 and lines[2].startswith("mixture: iteration of the ascent, 3 of 3")


# ---- rows


def test_doctor():
    done = command("doctor")
    assert done.code == 0
    assert all(word in done.stdout for word in ("jax ", "devices", "float32", "exact 1: good"))


def test_rows():
    assert against_exact("a", 1.0, 1.04, 0.01).passed
    assert not against_exact("a", 1.0, 1.06, 0.01).passed
    assert against_exact("a", -288.0, -288.0, 0.0).passed
    assert not against_exact("a", -288.0, -287.9, 0.0).passed
    ones = np.ones(3)
    assert worst("a", "b", ones, ones + np.array([0.0, 0.0, 0.04]), 0.01 * ones).passed
    assert not worst("a", "b", ones, ones + np.array([0.0, 0.06, 0.0]), 0.01 * ones).passed
    assert digits(1.23456, 0.0123) == "1.235 ± 0.012"
    assert digits(123.4, 17.0) == "123 ± 17" and digits(-288.0, 0.0) == "-288"


def test_an_ascent_that_still_swings_has_not_converged():
    """Ten seeds that end at 1.011 ± 0.005 where the maximum is at 1.066 passed as good once."""
    noise = np.random.default_rng(0).normal(size=(10, 300))
    best = maximiser()
    settled, swinging = (best + 0.02 * noise, 1.011 + 0.02 * noise)
    assert all(row.passed for row in reached(settled, best))
    assert not any(row.passed for row in reached(swinging, best))
    one_astray = settled + 0.05 * (np.arange(10) == 3)[:, None]
    assert not reached(one_astray, best)[1].passed
