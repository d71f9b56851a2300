"""The style that all pictures share."""

import pytest

from fairseq_fwp.cli import plot_style
from fairseq_fwp.cli.plot_style import COLOURS


def test_a_rule_has_its_colour_and_no_two_names_share_one():
    found = plot_style.colours(["a run", "delta, DPFP", "Sum rule", "delta_lm_wt103", "softmax"])
    assert (
        list(found) == ["a run", "delta, DPFP", "Sum rule", "delta_lm_wt103", "softmax"]
        and len(set(found.values())) == 5
    )
    assert [found[name] for name in ("delta, DPFP", "Sum rule", "softmax")] == [
        COLOURS[rule] for rule in ("delta", "sum", "softmax")
    ]


def test_a_picture_is_of_the_format_that_its_name_says(tmp_path):
    pyplot = plot_style.load_pyplot()
    for ending, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        figure, axes = pyplot.subplots()
        axes.plot([1, 2], [1, 30])
        plot_style.use_log_scale(axes.yaxis)
        path = tmp_path / f"a curve{ending}"
        plot_style.save(figure, path)
        assert path.read_bytes().startswith(magic)
    assert len(list(tmp_path.iterdir())) == 3  # nothing unfinished
    shown = [text.get_text() for text in axes.get_yticklabels() if 1 <= text.get_position()[1] <= 30]
    assert shown == ["1", "2", "5", "10", "20"]


@pytest.mark.parametrize("name", ["curve.jpg", "none/curve.png"])
def test_a_bad_path_is_refused_before_anything_is_written(tmp_path, name):
    with pytest.raises(ValueError, match=r"must be a \.png, \.svg, \.pdf file in a folder that exists"):
        plot_style.check_path(tmp_path / name)
