"""The paper's figures: data that are read back, and what is plotted from them."""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pytest
from figure_data import SMALL, flags
from matplotlib.colors import to_rgb

from diffmh.plots import style
from diffmh.reproduce import EXPERIMENTS, page, saved
from diffmh.reproduce.recoupling import BLACK, DIFFERS, WHITE, film
from diffmh.reproduce.saved import from_arrays, to_arrays


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_data_are_read_back_as_they_were(name):
    data = SMALL[name]
    arrays = to_arrays(data)
    again = from_arrays(type(data), arrays)
    assert type(data) is EXPERIMENTS[name].data
    for key, array in to_arrays(again).items():
        np.testing.assert_array_equal(array, arrays[key])
    arrays.popitem()
    with pytest.raises(KeyError):
        from_arrays(type(data), arrays)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_figures_from_data(name, narrow, tmp_path):
    figure = EXPERIMENTS[name].plot(SMALL[name], narrow)
    if narrow:
        assert figure.get_figwidth() == pytest.approx(style.NARROW)
    saved.write(figure, tmp_path / f"{name}.svg")
    assert (tmp_path / f"{name}.svg").stat().st_size > 5_000


def test_the_mixtures_panels_are_in_order():
    axes = EXPERIMENTS["mixture"].plot(SMALL["mixture"], False).axes[:5]
    places = {ax.get_title(loc="left")[:2]: ax.get_subplotspec() for ax in axes}
    key = lambda place: (place.rowspan.start, place.colspan.start)
    assert sorted(places, key=lambda name: key(places[name])) == ["a)", "b)", "c)", "d)", "e)"]


def test_the_red_line_of_fig_3_is_the_optimum_found():
    figure = EXPERIMENTS["ising"].plot(SMALL["ising"], False)
    for ax in figure.axes:
        red = [line for line in ax.get_lines() if line.get_color() == style.RED]
        assert list(red[0].get_xdata()) == [2.6, 2.6]


def contrast(one: str, other: str) -> float:
    """Of the Web Content Accessibility Guidelines: 1 for none, 21 for black on white."""

    def luminance(colour):
        parts = np.array(to_rgb(colour))
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_red_of_fig_4_is_seen_on_black_and_on_white():
    assert contrast(DIFFERS, BLACK) > 3 and contrast(DIFFERS, WHITE) > 3
    assert contrast("#9c0d24", BLACK) < 3, "what it was before could not be seen"


def test_the_film_says_what_was_pruned():
    frames = film(SMALL["recoupling"])["frames"]
    assert [frame["born"] for frame in frames] == [bool(b) for b in flags("10010000")]
    assert [frame["pruned"] for frame in frames] == [bool(b) for b in flags("00010000")]


def test_the_page_has_every_colour_by_day_and_by_night():
    """Each colour of the figures has a name in the style sheet, with a value for both."""
    source = pathlib.Path(page.__file__).with_name("page.html").read_text()
    day, night = (
        dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", part))
        for part in source.split("prefers-color-scheme: dark", 1)
    )
    for value, name in page.COLOURS.items():
        assert day[name] == value and name in night
    for name in ("ink", "soft", "red", "blue", "green", "amber", "violet"):
        assert contrast(day[name], day["paper"]) > 3 and contrast(night[name], night["paper"]) > 3
