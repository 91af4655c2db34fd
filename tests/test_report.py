import re

import numpy as np

from bism.report import Page, curves, densities, galleries, scatter


def test_a_page_holds_everything_in_itself(tmp_path):
    page = Page("A <title>", "Lead & more")
    page.heading("Part")
    page.table(["name", "value"], [["x < y", 0.123456789], ["none", float("nan")]], "Caption")
    steps = np.arange(5)
    page.figure("curve", lambda: curves({"a": (steps, steps**2), "b": (steps, np.ones((5, 3)))}, y="y"), "Curves")
    page.figure("clouds", lambda: scatter({"p": np.eye(2), "q": (np.eye(2), np.arange(2))}), "Clouds")
    page.figure("maps", lambda: densities({"d": np.eye(4)}, [0, 1, 0, 1], 1.0), "Maps")
    text = page.write(tmp_path).read_text()
    assert "A &lt;title&gt;" in text
    assert "Lead &amp; more" in text
    assert "<td>x &lt; y</td><td>0.1235</td>" in text
    assert "<td>—</td>" in text
    assert text.count("data:image/png;base64,") == 6  # each picture for light and for dark pages
    targets = re.findall(r'(?:src|href|srcset)="(.{5})', text)
    assert set(targets) == {"data:"}  # nothing is fetched from anywhere
    assert sorted(x.name for x in (tmp_path / "figures").iterdir()) == ["clouds.png", "curve.png", "maps.png"]


def test_galleries_wrap_panels_and_fill_rows():
    images = np.linspace(0, 1, 5)[:, None, None] * np.ones((5, 4, 6))
    axes = galleries({"a": images, "b": images, "c": images}, 3, columns=2).axes
    assert [axis.get_title() for axis in axes] == ["a", "b", "c", ""]
    sheet = axes[2].get_images()[0].get_array()
    assert sheet is not None
    assert sheet.shape == (10, 21)  # two rows of three, each with a gap of one below and beside
    np.testing.assert_allclose(sheet[[0, 0, 5, 5], [0, 7, 7, 14]], [0, 0.25, 1, 1])
    assert not axes[3].get_images()
