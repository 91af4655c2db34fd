import json

import jax.numpy as jnp
import numpy as np
import pytest

from bism import log_likelihood
from bism.experiments.checkerboard import CEILING, GRID, METHODS, Settings, data_density, density, reproduce, train


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkerboard")
    settings = Settings(steps=60, runs=2, methods=("DSM", "exact ML"))
    return folder, settings, reproduce(folder, settings, progress=False)


def test_the_report_has_both_figures_and_the_table(reproduced):
    folder, _, report = reproduced
    text = report.read_text()
    assert text.count("<img") == 2
    assert "exact ML" in text
    assert "Not converged: over the last fifth" in text
    results = json.loads((folder / "results.json").read_text())
    assert set(results) == {"DSM", "exact ML"}
    assert results["DSM"]["worst"] <= results["DSM"]["mean"] <= results["DSM"]["best"] < CEILING


def test_called_again_it_reads_what_is_there(reproduced):
    folder, settings, _ = reproduced
    before = (folder / "results.json").read_text()
    reproduce(folder, settings, progress=False)
    assert (folder / "results.json").read_text() == before
    with pytest.raises(ValueError, match="steps 60 there, 70 here"):
        reproduce(folder, Settings(steps=70, runs=2), progress=False)


def test_densities_are_densities_at_the_right_place(reproduced):
    folder, settings, _ = reproduced
    area = np.exp(float(GRID.log_area))
    np.testing.assert_allclose(data_density().sum() * area, 1, rtol=1e-3)
    run = train("exact ML", settings, folder, progress=False)
    row, column = 20, 110  # y and x
    x, y = -0.25 + 0.01 * (column + 0.5), -0.25 + 0.01 * (row + 0.5)
    exact = np.exp(log_likelihood(run[0].model, jnp.array([[x, y]]))[0])
    np.testing.assert_allclose(density(run)[row, column], exact, rtol=1e-9)


def test_the_table_of_methods_is_the_papers():
    papers = ["PCD-1", "CD-1", "CD-5", "SSM", "BiSSM-5", "DSM", "BiDSM-5", "NCE", "VNCE"]
    assert [name for name in METHODS if name not in ("BiSSM", "BiDSM", "exact ML")] == papers
