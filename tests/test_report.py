import re

import numpy as np

from bism.report import Page, curves, densities, scatter


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
