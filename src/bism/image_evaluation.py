"""What can be measured of an energy of images: its latents, its samples, how near q is to the posterior."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from .diagnosis import posterior_fisher
from .image_recipe import HELD_OUT, ImageRecipe, Parts, restore, shape_of
from .images import Images, as_bytes
from .metrics import features, fid, inception
from .sampling import ladder_levels, paper_temperatures
from .synthesis import (
    Annealing,
    Denoising,
    PosteriorChain,
    Schedule,
    encode,
    energies,
    generate,
    posterior_chain,
)
from .training import Run

SAMPLERS = ("ladder", "langevin")


class Trained(NamedTuple):
    """A run on images, and what it was trained on."""

    recipe: ImageRecipe
    run: Run
    images: Images
    parts: Parts

    @classmethod
    def of(cls, folder: Path, step: int | None = None, images: Images | None = None) -> "Trained":
        return cls(*restore(folder, step, images))

    def schedule(self, sampler: str = "ladder", steps: int | None = None) -> Schedule:
        """Down a ladder of noise levels from the highest of the training, or the paper's annealing."""
        if sampler not in SAMPLERS:
            raise ValueError(f"unknown sampler {sampler!r}; choose from {', '.join(SAMPLERS)}.")
        if steps is not None and steps < 10:
            raise ValueError(f"a sampler needs 10 steps or more, got {steps}.")
        recipe = self.recipe
        if sampler == "ladder":
            levels = ladder_levels(steps or 100, recipe.sigma_max, min(0.02, recipe.sigma_min))
            return Denoising(levels=levels, sigma0=recipe.sigma0)
        shares = (500, 2000, 200)  # of the paper's 2,700 steps
        parts = shares if steps is None else [max(steps * share // sum(shares), 1) for share in shares]
        return Annealing(temperatures=paper_temperatures(*parts), sigma0=recipe.sigma0)

    def samples(self, count: int, seed: int = 0, *, h: Any = None, joint: bool = False, **schedule: Any):
        """(count, channels, height, width) in [0, 1]: at the given h, jointly with h, else at h of training images."""
        latent: dict[str, Any] = {}
        if joint and not self.recipe.bilevel:
            raise ValueError("joint samples need an energy with latents: this run has none.")
        if self.recipe.bilevel:
            latent = {"joint": True, "h_dim": self.recipe.h_dim} if joint else {"h": h}
        if self.recipe.bilevel and not joint and h is None:
            latent = {"posterior": self.run.posterior, "clean": self.parts.train}
        key, shape = jax.random.key(seed), shape_of(self.parts)
        return generate(self.run.model, key, count, self.schedule(**schedule), shape=shape, **latent)

    def svm(self) -> features.Accuracy | None:
        """A linear classifier of the latents' means; None without latents or labels."""
        labels, held_labels = self.parts.train_labels, self.parts.held_out_labels
        if not self.recipe.bilevel or labels is None or held_labels is None:
            return None
        codes = [encode(self.run.posterior, v) for v in (self.parts.train, self.parts.held_out)]
        return features.linear_svm(codes[0], labels, codes[1], held_labels)

    def fid(self, count: int, network: inception.Inception, seed: int = 0, **schedule: Any) -> float:
        """Of `count` samples from the training images."""
        return fid.fid(self.samples(count, seed, **schedule), self.parts.train, network)

    def fisher(self) -> dict[float, float]:
        """Of q from the posterior on held-out images, by the level of the noise on them."""
        levels = (0.0, *np.linspace(self.recipe.sigma_min, self.recipe.sigma_max, 4).tolist())
        v = self.parts.held_out[:HELD_OUT] / np.float32(255)
        return posterior_fisher(self.run.state, jax.numpy.asarray(v), jax.random.key(0), levels)

    def chains(self, count: int = 16, steps: int = 4000) -> PosteriorChain:
        """p(h|v) of held-out images by Langevin, beside q."""
        return posterior_chain(
            self.run.model, self.run.posterior, self.parts.held_out[:count], jax.random.key(0), steps
        )

    def energy(self, v) -> Float[np.ndarray, "count"]:
        return energies(self.run.model, self.run.posterior, v)


def evaluate(trained: Trained, fid_samples: int = 0) -> dict[str, float]:
    """Named figures of a run on its held-out images."""
    network = inception.load() if fid_samples else None  # first of all: it may be missing
    recorded = [row["held-out loss"] for row in trained.run.history if "held-out loss" in row]
    found = {"held-out loss": float(recorded[-1])} if recorded else {}
    if trained.recipe.bilevel:
        for level, value in trained.fisher().items():
            found[f"Fisher divergence of q, noise {level:.2f}"] = value
        chains = trained.chains()
        found["mean of q from p(h|v)'s, in deviations, by Langevin"] = float(np.median(np.abs(chains.shift)))
        found["deviation of q over p(h|v)'s"] = float(np.median(chains.spread))
    if accuracy := trained.svm():
        found["linear SVM of the latents, %"] = accuracy.percent
    nearest = lambda v: float(np.median(features.nearest(v, trained.parts.train).distances)) / 255
    found["distance of samples to the nearest training image"] = nearest(as_bytes(trained.samples(100)))
    found["the same of held-out images"] = nearest(trained.parts.held_out[:100])
    if network is not None:
        found[f"FID of {fid_samples:,} samples"] = trained.fid(fid_samples, network)
    return found
