"""What goes wrong is said at once and by name, and what was had before it is kept."""

import shutil
import subprocess
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bism
from bism import training

KEY = jax.random.key(0)
DATA = np.random.default_rng(0).normal(size=(16, 2))


class Scaled(bism.EBM):
    """F(v) = ½ a ‖v‖², whose score matching loss is ½ a² ‖v‖² − 2a."""

    a: jax.Array

    def free_energy(self, v):
        return 0.5 * self.a * jnp.sum(v**2)


def fit(
    method: Any = None,
    model: Any = Scaled(jnp.array(1.0)),
    posterior: Any = None,
    *,
    rate=0.01,
    steps=12,
    batch_size=16,
    **settings,
):
    method = method or bism.ScoreMatching(bism.SM(), optimizer=optax.sgd(rate))
    defaults: dict[str, Any] = {"data": DATA, "key": KEY, "progress": False}
    return bism.fit(method, model, posterior, steps=steps, batch_size=batch_size, **defaults | settings)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


class Free(bism.EBM):
    function: Any = eqx.field(static=True)

    def free_energy(self, v):
        return self.function(v)


class Joint(bism.EBLVM):
    function: Any = eqx.field(static=True)

    def energy(self, v, h):
        return self.function(v) + jnp.sum(h)


POSTERIOR = bism.GaussianPosterior.mlp(2, 3, width=4, depth=1, key=KEY)
BILEVEL = bism.BiSM(bism.DSM(0.5), response=bism.FirstOrder())


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda v: v**2, r"shape \(2,\) and type float64"),
        (lambda v: jnp.sum(v**2, keepdims=True), r"shape \(1,\) and type float64"),
        (lambda v: jnp.sum(v > 0), r"shape \(\) and type int64"),
        (lambda v: (jnp.sum(v), jnp.sum(v)), "tuple"),
        (lambda v: 0.0, "float"),
        (lambda v: None, "NoneType"),
    ],
)
def test_an_energy_is_one_number(function, found):
    with pytest.raises(ValueError, match=rf"Free.free_energy\(v\) must return one floating-point.* it returns {found}"):
        fit(model=Free(function))


def test_a_joint_energy_is_one_number():
    with pytest.raises(ValueError, match=r"Joint.energy\(v, h\) must return one floating-point number; .*shape \(2,\)"):
        fit(BILEVEL, Joint(lambda v: v), POSTERIOR)


def test_posterior_of_another_size():
    posterior = bism.GaussianPosterior.mlp(3, 3, width=4, depth=1, key=KEY)
    with pytest.raises(ValueError, match=r"The posterior does not take arguments of shape \(2,\): "):
        fit(BILEVEL, Joint(jnp.sum), posterior)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"method": bism.DSM(0.3)}, r"the method comes first, as in bism.BiSM\(.*; this is of type DSM"),
        ({"method": bism.BiSM}, "this is the class BiSM: make one of it"),
        ({"model": Scaled}, "model must be a model, or a function of a key.*the class Scaled: make one"),
        ({"model": 3}, "model must be .* of type int"),
        ({"posterior": bism.GaussianPosterior}, "posterior must be a posterior, .* the class GaussianPosterior"),
        ({"steps": 2e4}, "steps must be a whole number, got 20000.0"),
        ({"batch_size": "16"}, "batch_size must be a whole number, got '16'"),
        ({"seeds": True}, "seeds must be a whole number, got True"),
        ({"key": 0.5}, "^key must be a whole number or a jax.random.key, got 0.5"),
        ({"callbacks": print}, "callbacks must be a list of functions"),
        ({"evaluate": [print]}, "evaluate must be a dictionary of functions"),
    ],
)
def test_one_thing_in_place_of_another(wrong, told):
    with pytest.raises(TypeError, match=told):
        fit(**wrong)


def test_seeds_and_keys_of_every_kind_are_the_same_run():
    kinds = (0, np.int64(0), jax.random.key(0), jax.random.PRNGKey(0))
    first, *others = [bits(fit(key=key, steps=2, batch_size=4).state) for key in kinds]
    assert all(other == first for other in others)


def test_energy_not_finite(tmp_path):
    with pytest.raises(bism.Diverged, match=r"not finite at iteration 1\. The energy.* on the first batch: look there"):
        fit(model=Free(lambda v: jnp.sum(v**2) / 0), folder=tmp_path)
    assert not list((tmp_path / "checkpoints").glob("*/default"))


def test_one_of_the_seeds_is_not_finite():
    keys = jax.random.split(KEY, 4)
    bad = [bool(jax.random.bernoulli(jax.random.split(key, 4)[0])) for key in keys]
    assert True in bad
    assert False in bad
    make = lambda key: Scaled(jnp.where(jax.random.bernoulli(key), jnp.nan, 1.0))
    with pytest.raises(bism.Diverged, match=f"loss of seed {bad.index(True)} is not finite at iteration 1"):
        fit(model=make, seeds=4)


def test_diverged(tmp_path):
    a, iteration, square = 1.0, 0, np.mean(np.sum(DATA**2, 1))
    with np.errstate(over="ignore"):
        while np.isfinite(0.5 * np.float64(a) ** 2 * square):  # the run by hand, while its loss is finite
            a, iteration = a - 1e3 * (a * square - 2), iteration + 1
    assert iteration > 20

    good = iteration // 10 * 10
    told = rf"not finite at iteration {iteration + 1}\. A smaller learning rate.* {tmp_path}/checkpoints/{good}\."
    with pytest.raises(bism.Diverged, match=told):
        fit(rate=1e3, steps=1000, folder=tmp_path, log_every=7, checkpoint_every=10)
    method = bism.ScoreMatching(bism.SM(), optimizer=optax.sgd(1e3))
    run = bism.load(tmp_path, method, Scaled(jnp.array(1.0)))
    assert run.step == good
    assert np.isfinite(run.model.a)


class Rooted(bism.EBM):
    """Its loss is finite where its gradient is not."""

    a: jax.Array

    def free_energy(self, v):
        return 0.5 * (1 + jnp.sqrt(self.a)) * jnp.sum(v**2)


def test_the_last_good_state_is_finite(tmp_path):
    with pytest.raises(bism.Diverged, match=r"not finite at iteration"):
        fit(model=Rooted(jnp.array(0.0)), folder=tmp_path, checkpoint_every=1)
    for path in (tmp_path / "checkpoints").glob("[0-9]*"):
        method = bism.ScoreMatching(bism.SM(), optimizer=optax.sgd(0.01))
        run = bism.load(tmp_path, method, Rooted(jnp.array(0.0)), step=int(path.name))
        assert np.isfinite(run.model.a)


def contents(folder):
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_a_run_is_not_overwritten(tmp_path):
    fit(folder=tmp_path, steps=2)
    before = contents(tmp_path)
    assert any("checkpoints" in path.parts for path in before)
    with pytest.raises(FileExistsError, match=r"already holds a run\. Go on with it by resume=True, or --resume"):
        fit(folder=tmp_path, steps=2)
    assert contents(tmp_path) == before


@pytest.fixture(scope="module")
def uninterrupted():
    return fit(batch_size=8, validation=DATA[:4], checkpoint_every=5)


@pytest.mark.parametrize("when", [5, 7])
def test_interrupted(uninterrupted, tmp_path, capsys, when):
    def interrupt(run):
        if run.step == when:
            raise KeyboardInterrupt

    settings = {"batch_size": 8, "validation": DATA[:4], "checkpoint_every": 5, "folder": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        fit(callbacks=[interrupt], **settings)
    assert f"resume=True, goes on from iteration {when}." in capsys.readouterr().err
    seen = []
    run = fit(resume=True, callbacks=[lambda run: seen.append(run.step)], **settings)
    assert seen == list(range(when + 1, 13))
    assert bits(run.loop) == bits(uninterrupted.loop)
    assert [row["loss"] for row in run.history] == [row["loss"] for row in uninterrupted.history]


def test_interrupted_before_it_has_gone_on(tmp_path, monkeypatch):
    """The checkpoint that it would go on from is left as it was: nothing better is at hand."""
    run = fit(folder=tmp_path, steps=6)
    kept = contents(tmp_path / "checkpoints")

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training._Batches, "rows", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fit(folder=tmp_path, resume=True)
    assert contents(tmp_path / "checkpoints") == kept
    assert bits(fit(folder=tmp_path, resume=True, steps=6).state) == bits(run.state)


def test_interrupted_when_its_state_is_given_away(tmp_path, monkeypatch, capsys):
    """A block under way has the arrays: the last checkpoint is what there is."""
    compile, calls = jax.jit, []

    def interrupted(fn, **settings):
        compiled = compile(fn, **settings)

        def call(*args):
            calls.append(fn)
            found = compiled(*args)
            if len(calls) == 8:
                raise KeyboardInterrupt
            return found

        return call if "donate_argnums" in settings else compiled

    with monkeypatch.context() as patch:
        patch.setattr(jax, "jit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fit(folder=tmp_path, checkpoint_every=5, log_every=1)
    assert len(calls) == 8
    assert "goes on from iteration 5." in capsys.readouterr().err
    assert fit(folder=tmp_path, resume=True, checkpoint_every=5, log_every=1).step == 12


def test_a_run_that_failed_before_its_first_checkpoint_may_be_begun_again(tmp_path):
    fit(folder=tmp_path, steps=4)
    for path in (tmp_path / "checkpoints").iterdir():
        shutil.rmtree(path)
    assert fit(folder=tmp_path, steps=6, batch_size=5).step == 6


def test_a_run_goes_on_only_as_it_began(tmp_path):
    fit(folder=tmp_path, steps=4, batch_size=8)
    config = (tmp_path / "config.json").read_text()
    for told, other in {
        r"it has batch_size 8, and 5 is given here": {"batch_size": 5},
        r"it has method ScoreMatching\(\s+optimizer=.*objective=SM\(\)": {"method": bism.ScoreMatching(bism.DSM(0.3))},
        r"it was trained on other data of the same shape": {"data": DATA + 1},
        r"already has 4 iterations, more than the 3 asked for": {"steps": 3},
    }.items():
        with pytest.raises(ValueError, match=f"(?s){told}"):
            fit(folder=tmp_path, resume=True, **{"steps": 6, "batch_size": 8} | other)
    assert (tmp_path / "config.json").read_text() == config
    assert fit(folder=tmp_path, steps=6, batch_size=8, resume=True).step == 6


def test_a_run_of_any_kind_of_key_is_read_back(tmp_path):
    method, model = bism.ScoreMatching(bism.DSM(0.3), optimizer=optax.sgd(0.01)), Scaled(jnp.array(1.0))
    run = fit(method, model, key=jax.random.key(1, impl="rbg"), folder=tmp_path, steps=2)
    assert bits(bism.load(tmp_path, method, model).state) == bits(run.state)


def test_interrupted_before_the_record(uninterrupted, tmp_path, monkeypatch):
    host, calls = training._host, []

    def interrupt(tree):
        calls.append(tree)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return host(tree)

    settings = {"batch_size": 8, "validation": DATA[:4], "folder": tmp_path, "evaluate_every": 1, "checkpoint_every": 5}
    monkeypatch.setattr(training, "_host", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fit(**settings)
    run = fit(resume=True, **settings)
    assert [row["step"] for row in run.history] == [row["step"] for row in uninterrupted.history]


def test_a_failing_callback_is_heard(tmp_path):
    def fail(run):
        if run.step == 7:
            raise RuntimeError("no more paper")

    with pytest.raises(RuntimeError, match="no more paper"):
        fit(folder=tmp_path, callbacks=[fail], checkpoint_every=5)
    assert fit(folder=tmp_path, resume=True).step == 12


def test_import_is_light():
    heavy = {"matplotlib", "sklearn", "orbax", "typer", "rich", "pandas"}
    code = f"import sys, bism; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
