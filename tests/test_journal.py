"""The journal of a long run: each part goes on from its own record."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from diffmh.runs.checkpoint import Checkpoint, Record, Store, decoded, encoded
from diffmh.runs.journal import Journal

BEGIN = {"x": jnp.zeros(2), "name": "no array"}


def begun(journal: Journal, theta: str):
    return journal.part(BEGIN, lambda: jnp.float32(0), lambda: {"theta": theta})


def test_parts_go_on_from_their_own_records(tmp_path):
    place = Checkpoint(tmp_path / "c")
    with Store(place) as store:
        journal = Journal(store)
        for number, theta in enumerate("ab"):
            part = begun(journal, theta)
            part.results.append(jnp.float32(number))
            part.state, part.done = BEGIN | {"x": jnp.ones(2)}, 3 + number
        journal.finish()
    with Store(place) as store:
        journal = Journal(store)
        first = begun(journal, "a")
        assert first.place == (1, 3) and first.state["name"] == "no array"
        np.testing.assert_array_equal(first.state["x"], np.ones(2))
        # Saved before the second part is reached again, which is not lost by it.
        first.results.append(jnp.float32(7))
        journal.finish()
    with Store(place) as store:
        journal = Journal(store)
        assert list(map(float, begun(journal, "a").results)) == [0.0, 7.0]
        with pytest.raises(ValueError, match="differs in theta of expectation 2"):
            begun(journal, "c")
        second = begun(journal, "b")
        assert second.place == (1, 4) and float(second.results[0]) == 1.0
        numbers = store.numbers()
        journal.finish()
        assert store.numbers() == numbers, "nothing is new"


def test_records_are_read_back_as_they_were():
    arrays = [np.arange(6.0).reshape(2, 3), np.array(True), np.zeros((0, 4), np.int8)]
    odd = np.arange(3, dtype=np.uint8)
    written = [Record({"key": "k"}, [odd], arrays, 5), Record({}, [], [], 0)]
    content = b"".join(encoded(written))
    read = decoded(content)
    assert read is not None
    for one, other in zip(written, read, strict=True):
        assert (one.problem, one.done) == (other.problem, other.done)
        for a, b in zip(one.results + one.state, other.results + other.state, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and b.flags.writeable
            np.testing.assert_array_equal(a, b)
    for place in range(0, len(content), 7):
        bad = bytearray(content)
        bad[place] ^= 1
        assert decoded(bytes(bad)) is None
