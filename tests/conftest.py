"""Strict: 64-bit, no silent broadcasting of ranks; warnings are errors, as pyproject.toml says."""

import os
from pathlib import Path

# Most tests compile longer than they run. Before the import, and for processes that tests start.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=1"

import jax
import numpy as np
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def golden():
    """Reference values by file: golden("grbm")["energy"]. The tests/golden README says what each is."""
    return lambda name: dict(np.load(Path(__file__).parent / "golden" / f"{name}.npz"))


@pytest.fixture(scope="session")
def real_data():
    """The folder of real data sets; tests that need it are skipped without."""
    folder = os.environ.get("BISM_DATA")
    if not folder:
        pytest.skip("BISM_DATA is not set")
    return Path(folder)
