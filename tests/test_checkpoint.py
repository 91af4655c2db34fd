"""A run killed at any point goes on to the very bits of one that was not; what cannot be read is passed over."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bism
from bism import checkpoint
from bism.checkpoint import Checkpoints, require_checkpoints

STATE = {
    "many": [jnp.full(i + 1, i / 3) for i in range(12)],  # more than ten: "10" sorts before "2"
    "count": jnp.array(5, jnp.int32),
    "key": jax.random.key(3),
    "keys": jax.random.split(jax.random.key(4, impl="rbg"), 2),
    "static": jnp.tanh,
    "nothing": None,
}


def bits(tree):
    arrays = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x).tobytes() for x in arrays]


def zeros(tree):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: (x if is_key(x) else 0 * x) if eqx.is_array(x) else x, tree)


@pytest.fixture
def saved(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (10, 20, 30):
        checkpoints.save(step, STATE | {"count": jnp.array(step, jnp.int32)})
    yield checkpoints
    checkpoints.close()


def spoil(folder, how):
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        if how == "truncated":
            os.truncate(path, path.stat().st_size // 2)
        elif how == "deleted" and (path.parent.name == "d" or path.name == "manifest.ocdbt"):
            path.unlink()
    if how == "emptied":
        shutil.rmtree(folder / "default")


def test_round_trip(saved):
    assert saved.steps == [20, 30]
    step, found = saved.restore(zeros(STATE))
    assert step == found["count"] == 30
    assert found["count"].dtype == jnp.int32
    assert bits(found) == bits(STATE | {"count": jnp.array(30, jnp.int32)})
    assert found["static"] is jnp.tanh
    assert found["nothing"] is None
    for name in ("key", "keys"):
        assert found[name].dtype == STATE[name].dtype
    assert bits(jax.random.bits(found["key"])) == bits(jax.random.bits(STATE["key"]))
    assert saved.restore(STATE, 20)[1]["count"] == 20

    saved.save(30, STATE)  # once more, as an interruption just after a checkpoint does
    assert saved.restore(STATE)[1]["count"] == 5


@pytest.mark.parametrize("how", ["truncated", "deleted", "emptied"])
def test_unreadable(tmp_path, how):
    checkpoints = Checkpoints(tmp_path)
    for step in (20, 30):
        checkpoints.save(step, jnp.array(step))
    checkpoints.close()
    spoil(tmp_path / "30", how)
    checkpoints = Checkpoints(tmp_path)
    with pytest.warns(UserWarning, match="30 cannot be read and is passed over"):
        step, found = checkpoints.restore(jnp.array(0))
    assert step == found == 20
    spoil(tmp_path / "20", how)
    with (
        pytest.raises(FileNotFoundError, match="holds no checkpoint that can be read"),
        pytest.warns(UserWarning, match="passed over"),
    ):
        checkpoints.restore(jnp.array(0))
    checkpoints.close()


def test_goes_on_saving_after_an_unreadable_one(saved):
    spoil(saved.folder / "30", "truncated")
    with pytest.warns(UserWarning, match="passed over"):
        saved.restore(STATE)
    saved.save(25, STATE)
    assert 25 in saved.steps


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"many": [jnp.zeros(i + 2) for i in range(12)]}, r"30 is of another model.*has \(1,\) where \(2,\) is wanted"),
        ({"many": []}, "30 is of another model or method: it has 15 arrays, not 3"),
    ],
)
def test_another_model(saved, other, reason):
    with pytest.raises(ValueError, match=reason):
        saved.restore(STATE | other)


def test_full_disk(tmp_path, monkeypatch):
    state = jnp.zeros((1000, 1000))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=20_000_000))
    require_checkpoints(tmp_path / "not" / "there" / "yet", state, 1)
    with pytest.raises(OSError, match=r"3 checkpoints need 24 MB and 20 MB are free"):
        require_checkpoints(tmp_path / "not" / "there" / "yet", state, 2)

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(OSError, match="Free some space"):
        train(tmp_path / "run")
    assert not (tmp_path / "run").exists()


METHOD = bism.BiSM(bism.DSM(0.5), response=bism.FirstOrder(), lower_steps=1, optimizer=bism.adam(1e-2), ema=0.9)
MAKERS = (lambda key: bism.GaussianRBM(2, 2, key=key), lambda key: bism.BernoulliPosterior.linear(2, 2, key=key))


def train(folder=None, steps=40, **settings):
    data = np.random.default_rng(0).normal(size=(24, 2))
    every = {"log_every": 3, "evaluate_every": 5, "checkpoint_every": 10}
    defaults: dict[str, Any] = every | {"validation": data[:8], "folder": folder, "progress": False}
    return bism.fit(METHOD, *MAKERS, data=data, steps=steps, batch_size=8, **defaults | settings)


def train_until_killed(folder, last):
    """Killed between two checkpoints; or, with a run to go on with, in the middle of writing the one of `last`."""
    save = Checkpoints.save

    def save_and_die(self, step, state):
        if step == last:  # Orbax writes aside, and then renames
            for place in (os, Path):
                place.rename = place.replace = lambda *args: die()  # type: ignore[assignment]
        save(self, step, state)

    Checkpoints.save = save_and_die
    train(folder, resume=True, callbacks=[lambda run: die() if run.step == last else None])


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def without_time(history):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in history]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return train(tmp_path_factory.mktemp("run"))


def test_killed_twice(uninterrupted, tmp_path):
    environment = os.environ | {"JAX_ENABLE_X64": "1", "JAX_NUMPY_RANK_PROMOTION": "raise"}
    metrics = tmp_path / "metrics.jsonl"
    for last in (12, 30):  # after the checkpoint of 10, and as that of 30 is written
        with metrics.open("a") as file:
            file.write('{"step": 15, "lo')  # a line that a kill cut off
        code = f"import test_checkpoint as t; t.train_until_killed({str(tmp_path)!r}, {last})"
        killed = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, env=environment)
        assert killed.returncode == -signal.SIGKILL
        assert json.loads(metrics.read_text().splitlines()[-1])["step"] == last

    at = []
    run = train(tmp_path, resume=True, callbacks=[lambda run: at.append(run.step)])
    assert at[0] == 21
    assert bits(run.loop) == bits(uninterrupted.loop)
    assert without_time(run.history) == without_time(uninterrupted.history)
    assert [json.loads(line) for line in metrics.read_text().splitlines()] == run.history


def test_load(uninterrupted):
    run = bism.load(uninterrupted.folder, METHOD, *MAKERS)
    assert bits(run.loop) == bits(uninterrupted.loop)
    assert run.history == uninterrupted.history
    earlier = bism.load(uninterrupted.folder, METHOD, *MAKERS, step=20)
    assert earlier.step == earlier.history[-1]["step"] == 20
    assert bits(earlier.state) != bits(run.state)
    with pytest.raises(ValueError, match=r"40 is of another model or method"):
        bism.load(uninterrupted.folder, bism.MaximumLikelihood(), MAKERS[0])
    with pytest.raises(FileNotFoundError, match=r"is not a run: it has no config\.json"):
        bism.load(uninterrupted.folder / "checkpoints", METHOD, *MAKERS)


def test_killed_before_the_first_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    run = train(tmp_path, resume=True, steps=3)
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == run.history


@pytest.fixture
def heard():
    """Interruptions are, as in a terminal; a shell's background jobs are started deaf to them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interruption_waits_until_a_checkpoint_is_whole(heard):
    before, done = signal.getsignal(signal.SIGTERM), []

    def work():
        with checkpoint.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGTERM) is before
