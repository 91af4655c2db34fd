"""Images from a name or a folder to a trained run; bytes on the device; the run read back; what is refused."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import close
from PIL import Image

import bism
from bism import MDSM, BiSM, Fisher, ScoreMatching
from bism.image_evaluation import Trained
from bism.image_recipe import ImageRecipe, are_images, recipe_of, restore, shape_of, split, to_unit, train
from bism.images import load_images
from bism.synthesis import Annealing, Denoising, encode

DIGITS = load_images("digits")
SMALL: dict[str, Any] = {"width": 4, "steps": 12, "batch_size": 20, "lower_steps": 1, "h_dim": 3}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "run"
    recipe = ImageRecipe.of("digits", DIGITS, **SMALL)
    return train(recipe, folder, progress=False), Trained.of(folder)


def test_the_papers_settings():
    grey = ImageRecipe.of("mnist", replace_images((1, 32, 32)), "paper")
    assert (grey.width, grey.blocks, grey.spacing, grey.sigma_max) == (64, 2, "geometric", 3.0)
    assert (grey.learning_rate, grey.steps, grey.ema, grey.precision) == (1e-4, 100_000, 0.0, "float32")
    colour = ImageRecipe.of("cifar10", replace_images((3, 32, 32)), "paper")
    assert (colour.width, colour.blocks, colour.sigma_min, colour.sigma_max) == (128, 3, 0.05, 1.2)
    assert (colour.learning_rate, colour.steps, colour.batch_size, colour.flip) == (5e-5, 300_000, 100, False)
    faces = ImageRecipe.of("celeba64", replace_images((3, 64, 64), flip=True), "paper")
    assert (faces.blocks, faces.flip) == (4, True)
    method, _, _ = colour.build((3, 32, 32))
    assert isinstance(method, BiSM)
    assert isinstance(method.divergence, Fisher)
    assert (method.objective, method.lower_steps, method.ema) == (MDSM(0.05, 1.2, 0.1, "linear"), 5, None)
    assert isinstance(method.response, bism.FirstOrder)


def test_unrolled_steps_are_counted():
    """Counting an iteration traces the method, its checks of the lower optimiser too."""
    count = lambda unroll: ImageRecipe.of("digits", DIGITS, **SMALL, unroll=unroll).operations((1, 8, 8))
    assert count(2) > 1.2 * count(0)


def test_the_papers_preset_is_the_papers_for_small_images_too():
    assert ImageRecipe.of("digits", DIGITS).width == 16
    assert ImageRecipe.of("digits", DIGITS, "paper").learning_rate == 1e-4
    assert ImageRecipe.of("digits", DIGITS, "paper").width == 64


def test_a_batch_is_no_larger_than_the_images():
    few = DIGITS._replace(train=DIGITS.train[:30], train_labels=None, test=None, test_labels=None)
    assert ImageRecipe.of("few", few).batch_size == 29  # one is held out
    assert ImageRecipe.of("few", few, batch_size=50).batch_size == 50


def replace_images(shape, flip=False):
    return DIGITS._replace(train=np.zeros((200, *shape), np.uint8), flip=flip)


def test_both_schedules_end_together():
    """The lower level's Adam makes K steps in an iteration, and its rate falls as the upper one's does."""
    recipe = replace(ImageRecipe.of("digits", DIGITS), steps=10, lower_steps=3, learning_rate=1e-2)
    method, _, _ = recipe.build((1, 8, 8))
    assert isinstance(method, BiSM)
    assert method.lower_optimizer is not None
    for optimizer, each in ((method.optimizer, 1), (method.lower_optimizer, 3)):
        state, rates = optimizer.init(jnp.zeros(1)), []
        for _ in range(10 * each + 1):
            update, state = optimizer.update(jnp.ones(1), state)
            rates.append(-float(jnp.asarray(update)[0]))
        close(rates[0], 1e-2, rtol=1e-6)
        close(rates[5 * each], 0.5 * (1e-2 + 1e-6), rtol=1e-3)
        close(rates[-1], 1e-6, rtol=1e-3)


def test_bytes_become_numbers_in_the_unit_interval_and_half_are_mirrored():
    batch = jnp.asarray(DIGITS.train[:200])
    np.testing.assert_array_equal(to_unit(False)(batch, jax.random.key(0)), jnp.asarray(batch, float) / 255)
    flipped = to_unit(True)(batch, jax.random.key(0))
    mirrored = jnp.all(flipped == jnp.asarray(batch[..., ::-1], float) / 255, (1, 2, 3))
    same = jnp.all(flipped == jnp.asarray(batch, float) / 255, (1, 2, 3))
    assert (mirrored | same).all()
    assert 70 < mirrored.sum() < 130


def test_a_run_is_read_back_as_it_was(trained):
    run, again = trained
    assert again.recipe == recipe_of(run.folder) == ImageRecipe.of("digits", DIGITS, **SMALL)
    assert again.run.step == 12
    for a, b in zip(
        jax.tree.leaves(eqx.filter(run.loop, eqx.is_array)),
        jax.tree.leaves(eqx.filter(again.run.loop, eqx.is_array)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    assert again.parts.tested
    assert len(again.parts.train) == 1500
    last = run.history[-1]
    assert last.keys() >= {"loss", "lower", "held-out loss", "posterior Fisher"}


def test_the_recorded_fisher_divergence_is_that_of_clean_held_out_images(trained):
    run, again = trained
    exact = again.fisher()[0.0]  # with eight samples of h for one image
    assert 0.8 < run.history[-1]["posterior Fisher"] / exact < 1.25


def test_samples_come_by_every_way(trained):
    _, again = trained
    assert isinstance(again.schedule(), Denoising)
    langevin = again.schedule("langevin", 54)
    assert isinstance(langevin, Annealing)
    assert langevin.steps == 54
    assert again.schedule("langevin").steps == 2700
    for samples in (again.samples(3, steps=10), again.samples(3, joint=True, steps=10)):
        assert samples.shape == (3, 1, 8, 8)
        assert (samples >= 0).all()
        assert (samples <= 1).all()
    h = encode(again.run.posterior, again.parts.train[:2])
    np.testing.assert_array_equal(again.samples(2, h=h, steps=10), again.samples(2, h=h, steps=10))
    for bad, told in (({"sampler": "gibbs"}, "unknown sampler 'gibbs'"), ({"steps": 3}, "10 steps or more")):
        with pytest.raises(ValueError, match=told):
            again.samples(2, **bad)


def test_an_energy_without_latents_trains_and_samples(tmp_path):
    recipe = ImageRecipe.of("digits", DIGITS, method="mdsm", width=4, steps=4, batch_size=10)
    run = train(recipe, tmp_path / "run", progress=False)
    assert isinstance(run.method, ScoreMatching)
    again = Trained.of(tmp_path / "run")
    assert again.svm() is None
    assert again.samples(2, steps=10).shape == (2, 1, 8, 8)
    assert again.energy(again.parts.train[:3]).shape == (3,)
    with pytest.raises(ValueError, match="joint samples need an energy with latents"):
        again.samples(2, joint=True)


def test_a_run_goes_on_with_the_same_settings_only(trained, tmp_path):
    recipe = ImageRecipe.of("digits", DIGITS, **SMALL)
    run, _ = trained
    assert train(recipe, run.folder, resume=True, progress=False).step == 12
    with pytest.raises(ValueError, match="other settings: sigma0"):
        train(replace(recipe, sigma0=0.3), run.folder, resume=True, progress=False)
    with pytest.raises(FileExistsError, match="already holds a run"):
        train(recipe, run.folder, progress=False)


def test_a_folder_of_images_is_trained_on(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "mine").mkdir()
    for i in range(40):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(tmp_path / "mine" / f"{i:02d}.png")
    source = str(tmp_path / "mine")
    assert are_images(source)
    images = load_images(source)
    recipe = ImageRecipe.of(source, images, width=4, h_dim=2, steps=2, batch_size=10, lower_steps=1)
    train(recipe, tmp_path / "run", progress=False)
    _, _, _, parts = restore(tmp_path / "run")
    assert (len(parts.train), len(parts.held_out), parts.tested) == (38, 2, False)
    assert shape_of(parts) == (3, 16, 16)
    assert not any((held == x).all() for held in parts.held_out for x in parts.train)
    np.testing.assert_array_equal(split(images, 0).train, parts.train)


def test_what_is_images_and_what_a_table(tmp_path):
    np.save(tmp_path / "images.npy", np.zeros((3, 8, 8), np.uint8))
    np.save(tmp_path / "table.npy", np.zeros((3, 8)))
    assert are_images(str(tmp_path / "images.npy"))
    assert are_images("digits")
    for other in (str(tmp_path / "table.npy"), "moons", "missing.npy", "my.csv"):
        assert not are_images(other)


def test_settings_that_mean_nothing_are_refused():
    refused: list[tuple[dict[str, Any], str]] = [
        ({"preset": "slow"}, "unknown preset 'slow'; choose from fast, paper"),
        ({"method": "cd"}, "unknown method 'cd'; choose from bimdsm, mdsm"),
        ({"precision": "float16"}, "unknown precision 'float16'"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
    ]
    for given, told in refused:
        with pytest.raises(ValueError, match=told):
            ImageRecipe.of("digits", DIGITS, **given)
