"""Log-likelihoods of trained Gaussian RBMs by AIS, against enumeration and in the units of the data."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import random_grbm

from bism.ais import exact_samples
from bism.evaluation import CHAINS, Trained, annealed, evaluate
from bism.likelihood import log_likelihood
from bism.recipe import Recipe, Scale, tell_of_constant_columns, train
from bism.table import write_table

KEY = jax.random.key(0)
MODEL = random_grbm(8, 12)
SCALE = Scale(np.zeros(8), np.linspace(0.5, 2.0, 8))


def test_ais_agrees_with_enumeration_from_both_sides():
    v = exact_samples(MODEL, KEY, 50)
    exact = float(log_likelihood(MODEL, v).mean() - np.log(SCALE.scale).sum())
    found = annealed(MODEL, SCALE, v, KEY)
    assert found["log-likelihood by AIS"] == pytest.approx(exact, abs=0.05)
    assert found["log-likelihood by reverse AIS"] == pytest.approx(exact, abs=0.05)
    low, high = (found[f"log-likelihood by AIS, at {bound} (95 %)"] for bound in ("least", "most"))
    assert low < exact < high < low + 0.2
    assert 100 < found["AIS: chains worth, of 500"] <= 500


def test_what_is_not_to_be_trusted_is_told():
    hard = eqx.tree_at(lambda m: m.W, MODEL, 30 * MODEL.W)
    with pytest.warns(UserWarning, match=r"cannot be trusted here: its 10 chains are worth .* with more of both"):
        annealed(hard, SCALE, jnp.zeros((5, 8)), KEY, chains=10)
    lost = eqx.tree_at(lambda m: m.log_sigma, MODEL, MODEL.log_sigma + 800.0)
    with pytest.warns(UserWarning, match=r"No log-likelihood by AIS\. Some chains left the finite numbers"):
        assert annealed(lost, SCALE, jnp.zeros((5, 8)), KEY, chains=10) == {}


def test_a_run_with_more_units_than_can_be_enumerated_has_its_likelihood(tmp_path):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "table.npy", rng.normal(5.0, [0.1, 1.0, 10.0], (400, 3)))
    settings = {"model": "grbm", "method": "dsm", "h_dim": 24, "steps": 300, "learning_rate": 1e-2, "sigma": 0.3}
    train(Recipe(str(tmp_path / "table.npy"), **settings), tmp_path / "run", progress=False)
    trained = Trained.of(tmp_path / "run")
    found = evaluate(trained, *trained.split())
    assert "log-likelihood" not in found
    assert "log-likelihood by reverse AIS" not in found
    held_out = trained.split()[1]
    assert held_out is not None
    gaussian = -0.5 * (((held_out - 5) / [0.1, 1.0, 10.0]) ** 2).sum(1).mean() - 1.5 * np.log(2 * np.pi)
    assert found["log-likelihood by AIS"] == pytest.approx(gaussian, abs=1.0)  # Σ log of the deviations is 0


def test_a_run_needs_its_table_only_for_what_is_measured_on_it(tmp_path, monkeypatch):
    table, data = tmp_path / "table.csv", np.random.default_rng(0).normal(5.0, [0.1, 10.0], (200, 2))
    write_table(table, data, ["mass", "size"])
    (tmp_path / "elsewhere.csv").write_text(table.read_text())
    train(Recipe(str(table), model="grbm", steps=20), tmp_path / "run", progress=False)
    before = Trained.of(tmp_path / "run")
    expected = before.draw(30, steps=50)
    assert [len(x) for x in before.split() if x is not None] == [180, 20]

    write_table(table, data[::-1], ["mass", "size"])
    with pytest.raises(ValueError, match=r"has changed since .*run was trained on it: put it back"):
        before.split()
    with pytest.raises(ValueError, match="has changed since"):
        train(Recipe(str(table), model="grbm", steps=40), tmp_path / "run", resume=True, progress=False)
    table.unlink()
    assert len(Trained.of(tmp_path / "run", str(tmp_path / "elsewhere.csv")).split()[0]) == 180
    moved = Recipe(str(tmp_path / "elsewhere.csv"), model="grbm", steps=20)
    assert train(moved, tmp_path / "run", resume=True, progress=False).step == 20
    (tmp_path / "elsewhere.csv").unlink()
    trained = Trained.of(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match=r"was trained on .*elsewhere.csv, which is gone: give --data"):
        trained.split()
    np.testing.assert_array_equal(trained.draw(30, steps=50), expected)
    assert trained.scale.names == ["mass", "size"]

    monkeypatch.setattr("bism.evaluation.CHAINS", 20)  # in two parts
    assert CHAINS > 30
    drawn = trained.draw(30, steps=50)
    assert (drawn[20:] != drawn[:10]).all()
    assert (np.abs(drawn.mean(0) - data.mean(0)) < data.std(0)).all()


def test_the_state_of_least_validation_loss_is_what_is_used(tmp_path):
    """A learning rate at which the loss ends far above its least."""
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(60, 4)))
    settings: dict[str, Any] = {"model": "grbm", "h_dim": 16, "learning_rate": 0.1, "sigma": 0.2, "batch_size": 50}
    run = train(Recipe(str(tmp_path / "x.npy"), method="dsm", steps=400, **settings), tmp_path / "dsm", progress=False)
    steps, losses = run.curve("validation")
    used = Trained.of(tmp_path / "dsm").run
    assert used.step == steps[np.argmin(losses)] < 400
    np.testing.assert_array_equal(used.model.W, run.best.model.W)
    assert (used.model.W != run.model.W).any()
    train(Recipe(str(tmp_path / "x.npy"), method="cd", steps=40, **settings), tmp_path / "cd", progress=False)
    assert Trained.of(tmp_path / "cd").run.step == 40


def test_columns_that_say_nothing_are_told():
    x = np.random.default_rng(0).normal(size=(10, 8))
    x[:, [1, 4]] = 3.7
    with pytest.warns(UserWarning, match=r"2 of 8 columns never change \(2, 5\): they are better left out"):
        tell_of_constant_columns(x, None)
    with pytest.warns(UserWarning, match=r"\(b, e\)"):
        tell_of_constant_columns(x, list("abcdefgh"))
    with pytest.raises(ValueError, match="all examples are the same"):
        tell_of_constant_columns(x[:1], None)
    scale = Scale.of(x, True)
    v = scale.apply(x)
    np.testing.assert_allclose(v[:, [1, 4]], 0, atol=1e-12)
    np.testing.assert_array_equal(scale.undo(v + 0.1)[:, [1, 4]], scale.shift[[1, 4]][None].repeat(10, 0))
    np.testing.assert_allclose(scale.log_volume, np.log(np.delete(x.std(0), [1, 4])).sum())


def test_a_column_far_from_zero_keeps_its_deviation():
    x = np.random.default_rng(0).normal([1e4, 1.7e9, 0.0], [1.0, 10.0, 1e-3], (50_000, 3))
    scale = Scale.of(x, True)
    np.testing.assert_allclose(scale.scale, [1.0, 10.0, 1e-3], rtol=0.02)
    v = scale.apply(x)
    assert v.dtype == np.float32
    np.testing.assert_allclose(v.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(v.std(0), 1, rtol=1e-5)
    np.testing.assert_allclose(scale.undo(v), x, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(scale.undo(v) - scale.shift, x - scale.shift, rtol=1e-3, atol=1e-5)
    assert Scale.of(np.full((1000, 1), 0.1), True).scale == 0
