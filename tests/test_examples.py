"""The README's first example and the scripts of examples/, run as they stand but for fewer iterations."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def scripts(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("own_energy", "latents"):
        sys.modules.pop(name, None)


def test_the_readme_runs():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    quick = code.replace("steps=8_000", "steps=200")
    assert quick != code
    names: dict = {}
    exec(compile(quick, "README.md", "exec"), names)
    assert names["samples"].shape == (2000, 2)
    steps, loss = names["run"].curve("loss")
    assert steps[-1] == 200
    assert loss[-20:].mean() < loss[:20].mean()
    assert names["run"].posterior(np.zeros(2)).mean.shape == (2,)


def test_own_energy_is_the_readmes(tmp_path):
    import own_energy

    readme, script = (ROOT / "README.md").read_text(), (ROOT / "examples" / "own_energy.py").read_text()
    for line in ("tangle = self.net", "return 0.5 * jnp", "method = bism.BiSM", "posterior = bism"):
        (shown,), (run,) = (
            [x.split("  #")[0].strip() for x in text.splitlines() if line in x] for text in (readme, script)
        )
        assert shown == run
    assert own_energy.main(20, "own.png").step == 20
    assert (tmp_path / "own.png").stat().st_size > 10_000


def test_latents(tmp_path):
    import latents

    assert latents.main(20, ["rings"])["rings"].step == 20
    assert (tmp_path / "latents-rings.png").stat().st_size > 10_000
