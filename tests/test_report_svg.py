"""Scales, ticks, labels, curves: the geometry behind the charts."""

import numpy as np
import pytest

from axolotl_unlearn.report.plots import colours, loss_limit, roc_points, running_mean
from axolotl_unlearn.report.svg import Svg, fit, nice_ticks, place_labels, scale, spread


def test_scale_is_linear_and_clamped():
    to_pixel = scale((0, 10), (100, 300))
    assert [to_pixel(v) for v in (0, 5, 10, 99, -1)] == [100, 200, 300, 300, 100]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.25, 0.5, 0.75, 1]), (0, 40, [0, 10, 20, 30, 40]), (-60, 0, [-60, -40, -20, 0])],
)
def test_ticks_are_round_and_cover_the_range(low, high, expected):
    assert nice_ticks(low, high) == expected


def test_ticks_of_a_single_value():
    ticks = nice_ticks(3, 3)
    assert ticks[0] <= 3 <= ticks[-1] and len(ticks) > 1


def test_spread_keeps_order_distance_and_bounds():
    out = spread([10, 11, 12, 200], gap=14, low=0, high=100)
    assert out[0] < out[1] < out[2] < out[3] <= 100
    assert min(np.diff(out)) >= 14 - 1e-9
    assert spread([50], 14, 0, 100) == [50]


def test_labels_of_near_points_do_not_overlap():
    """Three points within 4 px get three different places."""
    points = [(100, 100), (102, 101), (104, 100)]
    places = place_labels(points, ["one", "two", "three"], (0, 0, 300, 300))
    assert (
        len(
            {
                (round(x - p[0]), round(y - p[1]))
                for (x, y, _), p in zip(places, points, strict=True)
            }
        )
        == 3
    )


def test_labels_stay_inside_the_plot():
    ((x, _, anchor),) = place_labels([(298, 150)], ["a rather long name"], (0, 0, 300, 300))
    assert anchor == "end" and x < 298


def test_roc_by_hand():
    """Below 2: half of the members; a tie of both sets at 2 slants; all others below 4."""
    assert roc_points([1, 2], [2, 3]) == [(0, 0), (0, 0.5), (0.5, 1), (1, 1)]


def test_known_names_keep_their_colour_and_nobody_shares_one():
    alone, together = colours(["merged"]), colours(["mine", "original", "merged", "other", "over"])
    assert alone["merged"] == together["merged"]
    assert len(set(together.values())) == 5


def test_a_collapsed_model_does_not_stretch_the_loss_axis():
    fine = {"name": "a", "likelihood": {"member_loss": [1.0, 2.0], "nonmember_loss": [2.0, 3.0]}}
    broken = {
        "name": "b",
        "collapse": {"collapsed": True},
        "likelihood": {"member_loss": [90.0], "nonmember_loss": [95.0]},
    }
    assert loss_limit([fine, broken]) == loss_limit([fine]) <= 4
    assert loss_limit([broken]) >= 95


def test_text_is_escaped():
    svg = Svg("x", 10, 10, 'a "quoted" <alt>')
    svg.text(0, 0, "<script>&")
    svg.rect(0, 0, 1, 1, title="<b>")
    markup = svg.render()
    assert "<script>" not in markup and "<b>" not in markup and 'a "quoted"' not in markup


def test_running_mean_keeps_length_and_shortens_at_the_ends():
    """Window 3 over 0, 3, 6, 9: (0+3)/2, 3, 6, (6+9)/2."""
    points = [(1, 0.0), (2, 3.0), (3, 6.0), (4, 9.0)]
    assert running_mean(points, 3) == [(1, 1.5), (2, 3.0), (3, 6.0), (4, 7.5)]
    assert running_mean(points, 1) == points


def test_long_names_are_cut_in_the_middle():
    """60 px at 12 px text hold int(60 / (12 * .64)) = 7 glyphs: three, an ellipsis, three."""
    assert fit("abcdefghijkl", 60) == "abc\u2026jkl"
    assert fit("abcdefg", 60) == "abcdefg"
