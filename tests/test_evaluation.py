"""Log-likelihoods of trained Gaussian RBMs by AIS, against enumeration and in the units of the data."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import random_grbm

from bism.ais import exact_samples
from bism.evaluation import annealed, evaluate
from bism.likelihood import log_likelihood
from bism.recipe import Recipe, Scale, restore, train

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
    found = evaluate(tmp_path / "run")
    assert "log-likelihood" not in found
    assert "log-likelihood by reverse AIS" not in found
    held_out = restore(tmp_path / "run")[3][1]
    assert held_out is not None
    gaussian = -0.5 * (((held_out - 5) / [0.1, 1.0, 10.0]) ** 2).sum(1).mean() - 1.5 * np.log(2 * np.pi)
    assert found["log-likelihood by AIS"] == pytest.approx(gaussian, abs=1.0)  # Σ log of the deviations is 0
