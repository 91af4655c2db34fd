"""The paper's image experiments: which runs there are, figures computed once, the paper's numbers beside ours."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from bism.experiments import images as module
from bism.experiments.images import PAPER_FID, PAPER_SVM, Settings, measure, tables
from bism.image_evaluation import Trained
from bism.images import load_images


def test_a_run_for_each_number_of_latents_and_one_without():
    images = load_images("digits")
    found = Settings("digits", latents=(2, 5), steps=7, seed=3).recipes(images)
    assert list(found) == ["BiMDSM h=2", "BiMDSM h=5", "MDSM"]
    assert [(r.method, r.h_dim, r.steps, r.seed) for r in found.values()] == [
        ("bimdsm", 2, 7, 3),
        ("bimdsm", 5, 7, 3),
        ("mdsm", found["MDSM"].h_dim, 7, 3),
    ]
    assert list(Settings("digits", latents=(), steps=None).recipes(images)) == ["MDSM"]


class Fake:
    """A trained run whose figures are known, and which counts how often each is computed."""

    def __init__(self, folder, bilevel=True):
        self.run, self.recipe = SimpleNamespace(folder=folder, step=30), SimpleNamespace(bilevel=bilevel)
        self.images = None
        self.calls: list[Any] = []

    def svm(self):
        self.calls.append("svm")
        return SimpleNamespace(percent=91.5)

    def fisher(self):
        self.calls.append("fisher")
        return {0.0: 5.0, 1.25: 2.5}


@pytest.fixture
def checkpoints(monkeypatch):
    """Five checkpoints, of which the second has the least FID; asking for a figure is noted."""
    fids, asked = {10: 50.0, 15: 40.0, 20: 45.0, 25: 47.0, 30: 44.0}, []

    def fid(step):
        def of(count, network):
            asked.append((step, count))
            return fids[step] - count / 1000

        return of

    monkeypatch.setattr(module, "Checkpoints", lambda folder: SimpleNamespace(steps=list(fids)))
    monkeypatch.setattr(Trained, "of", lambda folder, step, images: SimpleNamespace(fid=fid(step)))
    return asked


def test_the_best_stop_by_few_samples_is_measured_by_many(tmp_path, checkpoints):
    found = measure(Fake(tmp_path), "network", 5000)  # pyright: ignore[reportArgumentType]
    assert (found["SVM"], found["Fisher 0.00"], found["Fisher 1.25"]) == (91.5, 5.0, 2.5)
    assert (found["FID"], found["FID, best stop"]) == (44.0 - 5, 40.0 - 5)
    assert sorted(checkpoints) == [(10, 1000), (15, 1000), (15, 5000), (20, 1000), (25, 1000), (30, 1000), (30, 5000)]


def test_no_figure_is_computed_twice(tmp_path, checkpoints):
    first = measure(Fake(tmp_path), "network", 5000)  # pyright: ignore[reportArgumentType]
    del checkpoints[:]
    again = Fake(tmp_path)
    assert measure(again, "network", 5000) == first  # pyright: ignore[reportArgumentType]
    assert checkpoints == again.calls == []
    assert json.loads((tmp_path / "measured.json").read_text())["SVM"] == 91.5


class Sheet:
    def __init__(self):
        self.tables: dict[str, list] = {}

    def heading(self, text):
        self.title = text

    def table(self, header, rows, caption=""):
        self.tables[self.title] = [header, *rows]


def test_the_papers_figures_stand_beside_ours():
    page = Sheet()
    measured = {
        "BiMDSM h=50": {"SVM": 40.0, "Fisher 0.00": 12.0, "Fisher 1.20": 30.0, "FID": 31.0, "FID, best stop": 30.0},
        "MDSM": {"SVM": math.nan, "FID": 35.0, "FID, best stop": 34.0},
    }
    tables(page, measured, Settings("cifar10"))
    assert page.tables["What the latents know"][1:] == [["BiMDSM h=50", 40.0, 39.58], ["pixels", "", 28.19]]
    assert page.tables["How near q is to the posterior"] == [
        ["", "noise 0.00", "noise 1.20"],
        ["BiMDSM h=50", 12.0, 30.0],
    ]
    assert page.tables["How good samples are"][1:] == [
        ["BiMDSM h=50", 31.0, *PAPER_FID["BiMDSM h=50"][:1], 30.0, 29.43],
        ["MDSM", 35.0, 39.12, 34.0, 30.19],
    ]
    digits = Sheet()
    tables(digits, {"BiMDSM h=50": {"SVM": 80.0}}, Settings("digits"))
    ours, paper = digits.tables["What the latents know"][1][1:]
    assert ours == 80.0
    assert math.isnan(paper)
    assert list(digits.tables) == ["What the latents know"]
    assert set(PAPER_SVM) == {"mnist", "cifar10"}
