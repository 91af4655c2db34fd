"""The experiment in miniature, on small synthetic faces, and a short run on the real ones."""

import json
import warnings
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import random_grbm

import bism
from bism.experiments import freyface
from bism.experiments.freyface import OURS, PAPER, TABLE, Settings, fisher_number, measure, needed, reproduce, split
from bism.likelihood import log_likelihood

SHAPE = (4, 3)
METHODS = ("DSM", OURS)


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    """Bars that move, as the frames of a video."""
    path = tmp_path_factory.mktemp("faces") / "faces.npy"
    at = np.linspace(0, 8 * np.pi, 150)[:, None, None]
    rows, columns = np.arange(SHAPE[0])[None, :, None], np.arange(SHAPE[1])[None, None, :]
    np.save(path, (0.5 + 0.25 * np.sin(at + rows) + 0.2 * np.cos(2 * at - columns)).astype(np.float32))
    return path


@pytest.fixture(scope="module")
def settings(faces):
    counts = {"training": 110, "validation": 20, "chains": 100, "temperatures": 50, "long_chains": 80, "long": 200}
    few = Settings(40, 2, 1, h_dim=3, data=str(faces), parts=("table",), methods=METHODS)
    return replace(few, **counts)


@pytest.fixture(scope="module")
def reproduced(settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("freyface")
    return folder, reproduce(folder, settings, progress=False)


def results(folder):
    return json.loads((folder / "results.json").read_text())["measured"]


def test_the_table_holds_what_the_runs_have(reproduced, settings):
    folder, report = reproduced
    found, test = results(folder), split(settings).test
    assert set(found) == {f"{name} h=3" for name in METHODS}
    text = report.read_text()
    for name in METHODS:
        run = freyface.train(name, 3, 2, settings, folder, progress=False)
        for seed in range(2):
            best = run[seed].best.best
            row = {kind: values[seed] for kind, values in found[f"{name} h=3"].items()}
            assert row["Fisher best"] == pytest.approx(float(fisher_number(best, test)), rel=1e-9)
            assert row["Fisher last"] == pytest.approx(run.curve("test Fisher")[1][-1][seed], rel=1e-9)
            exact = float(log_likelihood(best, test).mean())
            assert row["LL best"] == pytest.approx(exact, abs=0.1)
            assert row["paper's AIS best"] == pytest.approx(exact, abs=0.3)
            assert 1 < row["LL best, chains worth"] <= 80
        assert freyface.spread(found[f"{name} h=3"]["Fisher best"]) in text
    for name, (_, fisher) in PAPER.items():
        assert (f"{fisher:.2f}" in text) == (name in METHODS)
    assert sorted(path.name for path in (folder / "figures").iterdir()) == ["fisher.png", "samples.png"]


def test_an_interrupted_call_does_no_work_twice(reproduced, settings, monkeypatch):
    folder, _ = reproduced
    before, path = results(folder), folder / "DSM h=3" / "measured-40.json"
    measured = json.loads(path.read_text())
    path.write_text(json.dumps({kind: x for kind, x in measured.items() if not kind.startswith("LL last")}))
    anneal, calls = freyface.anneal, []

    def counted(models, keys, schedule, chains):
        calls.append((len(schedule), chains))
        return anneal(models, keys, schedule, chains)

    monkeypatch.setattr(freyface, "anneal", counted)
    stamps = {path: path.stat().st_mtime_ns for path in folder.glob("*/checkpoints/*")}
    reproduce(folder, settings, progress=False)
    assert calls == [(50, 80)]  # what was missing
    assert results(folder) == before
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/checkpoints/*")} == stamps
    with pytest.raises(ValueError, match="steps 40 there, 50 here"):
        reproduce(folder, replace(settings, steps=50), progress=False)


def test_gradient_bias_is_drawn_beside_the_paper_s(reproduced, settings):
    folder, _ = reproduced
    report = reproduce(folder, replace(settings, parts=("bias",)), progress=False)
    assert set(results(folder)) == {f"{OURS} h=3"}
    text = report.read_text()
    assert text.count("<img") == 2
    assert "undamped, at φ*" in text
    assert "κ = 0.7" in text


def test_the_parts_say_what_is_run():
    seeds = lambda *parts, **others: needed(Settings(seeds=5, other_seeds=2, parts=parts, **others))
    assert seeds("time") == {}
    assert seeds("table") == {(name, 400): 5 for name in TABLE}
    assert seeds("bias") == {(OURS, 400): 5}
    assert seeds("K") == {
        ("BiDSM N=5 K=0", 400): 2,
        ("BiDSM N=5 K=1", 400): 2,
        ("BiDSM N=5", 400): 5,
        ("BiDSM N=5 K=10", 400): 2,
    }
    assert len(seeds("h")) == 15
    assert seeds("h")["DSM", 50] == 2
    assert seeds("h")["DSM", 400] == 5  # the table's run, so that it is trained once
    assert list(seeds("table", "K", "h"))[:3] == [("DSM", 400), (OURS, 400), ("BiDSM N=5", 400)]
    with pytest.raises(ValueError, match="unknown part 'k'; choose from table, K, h, time, bias"):
        Settings(parts=("k",))
    with pytest.raises(ValueError, match="unknown method 'VAE'; choose from DSM"):
        Settings(methods=("VAE",))


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (np.zeros((150, 12), np.float32), r"grey images of shape .* it is float32 of shape \(150, 12\)"),
        (np.zeros((150, 4, 3, 3), np.float32), "average colours"),
        (np.zeros((150, 4, 3), np.uint8), "Divide pixels by 255"),
        (np.full((150, 4, 3), 1.5, np.float32), "from 1.5 to 1.5"),
        (np.full((150, 4, 3), -0.1, np.float32), r"values in \[0, 1\]"),
        (np.full((150, 4, 3), np.nan, np.float32), "from nan to nan"),
        (np.zeros((130, 4, 3), np.float32), "leave none of 130 to test: give smaller --training and --validation"),
    ],
)
def test_images_that_do_not_fit_are_refused(images, said, settings, tmp_path):
    np.save(tmp_path / "images.npy", images)
    with pytest.raises(ValueError, match=said):
        split(replace(settings, data=str(tmp_path / "images.npy")))


def test_chains_that_leave_the_range_are_told(settings):
    model = random_grbm(12, 3)
    method = bism.ScoreMatching(bism.DSM(0.3))
    make = lambda key: eqx.tree_at(lambda m: (m.b, m.log_sigma), model, (model.b + 40.0, model.log_sigma))
    run = bism.fit(method, make, data=jnp.zeros((100, 12)), steps=1, seeds=1, progress=False)
    with pytest.warns(UserWarning, match=r"Gibbs chains of DSM left the range .* Give more steps"):
        freyface.samples(run, "DSM")
    quiet = bism.fit(
        method,
        lambda key: eqx.tree_at(lambda m: m.W, model, 0 * model.W),
        data=jnp.zeros((100, 12)),
        steps=1,
        seeds=1,
        progress=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert freyface.samples(quiet, "DSM").shape == (36, 12)


def test_the_real_faces_are_split_as_in_the_paper_and_dsm_learns_them(real_data, tmp_path):
    faces = split(Settings())
    assert [len(part) for part in faces[:3]] == [1400, 300, 265]
    assert faces.shape == (28, 20)
    assert jnp.concatenate(faces[:3]).mean() == pytest.approx(0.6, abs=0.1)
    quick = Settings(1000, 1, h_dim=20)
    run = freyface.train("DSM", 20, 1, quick, tmp_path, progress=False)
    fisher = run.curve("test Fisher")[1][:, 0]
    assert (np.diff(fisher) < 0).all()
    assert -830 < fisher[-1] < -770
    assert measure(run, quick, likelihood=False)["Fisher last"] == [pytest.approx(fisher[-1])]
    assert jax.tree.leaves(run.best.best)[0].shape == (1, 560, 20)
