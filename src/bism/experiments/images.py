"""The paper's experiments on images: energies with and without latents of MNIST, CIFAR-10 and CelebA (its section 5.3).

On the 8 × 8 digits the same runs in minutes on a laptop.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ..checkpoint import Checkpoints
from ..image_evaluation import Trained
from ..image_recipe import ImageRecipe, train
from ..images import Images, load_images
from ..metrics import inception
from .claim import claim

STOPS = 5  # of each training's last third: the paper's early stopping, which has 20
# The paper's figures: FID, and FID at the best of the stops; accuracy of a linear SVM in percent, "raw" of the pixels.
PAPER_FID = {
    "MDSM": (39.12, 30.19),
    "BiMDSM h=20": (34.55, 26.62),
    "BiMDSM h=50": (38.82, 29.43),
    "BiMDSM h=100": (36.13, 26.90),
}
PAPER_SVM = {
    "mnist": {"raw": 91.58, "BiMDSM h=20": 93.85, "BiMDSM h=50": 97.39, "BiMDSM h=100": 97.75},
    "cifar10": {"raw": 28.19, "BiMDSM h=20": 34.83, "BiMDSM h=50": 39.58, "BiMDSM h=100": 46.46},
}
Measured = dict[str, float]


@dataclass
class Settings:
    data: str
    preset: str = "fast"
    latents: tuple[int, ...] = (20, 50, 100)
    visible: bool = True  # MDSM too
    steps: int | None = None  # as the preset says
    fid_samples: int = 10_000  # 0: no FID
    seed: int = 0

    def recipes(self, images: Images) -> dict[str, ImageRecipe]:
        given: dict[str, Any] = {"seed": self.seed} | ({} if self.steps is None else {"steps": self.steps})
        of = lambda **more: ImageRecipe.of(self.data, images, self.preset, **given, **more)
        found = {f"BiMDSM h={h}": of(h_dim=h) for h in self.latents}
        return found | ({"MDSM": of(method="mdsm")} if self.visible else {})


def measure(trained: Trained, network: inception.Inception | None, count: int) -> Measured:
    """What is reported of a run; each figure is written down as it is had, and not computed again."""
    assert trained.run.folder is not None
    path = trained.run.folder / "measured.json"
    found: Measured = json.loads(path.read_text()) if path.exists() else {}

    def once(name: str, compute: Callable[[], float]) -> float:
        if name not in found:
            found[name] = compute()
            path.write_text(json.dumps(found, indent=2) + "\n")
        return found[name]

    once("SVM", lambda: math.nan if (accuracy := trained.svm()) is None else accuracy.percent)
    if trained.recipe.bilevel and not any(name.startswith("Fisher") for name in found):
        for level, value in trained.fisher().items():
            once(f"Fisher {level:.2f}", lambda value=value: value)
    if network is not None:
        last = trained.run.step
        fid_at = lambda step, count: Trained.of(path.parent, step, trained.images).fid(count, network)
        stops = Checkpoints(path.parent / "checkpoints").steps
        best = min(stops, key=lambda step: once(f"FID of 1000 at {step}", lambda: fid_at(step, 1000)))
        for step in {last, best}:
            once(f"FID of {count} at {step}", lambda step=step: fid_at(step, count))
        found |= {"FID": found[f"FID of {count} at {last}"], "FID, best stop": found[f"FID of {count} at {best}"]}
    return found


def reproduce(folder: Path, settings: Settings, progress: bool = True) -> Path:
    """Train and measure what is missing, and write the report. Its path."""
    from ..report import Page
    from ..report.images import grids, learning, map_of_latents, pictures

    folder, images = Path(folder), load_images(settings.data)
    colour = images.train.shape[1] == 3
    network = inception.load() if colour and settings.fid_samples else None  # at once: it may be missing
    recipes = settings.recipes(images)
    claim(folder, settings.data, settings, free=("latents", "visible", "fid_samples"))
    runs: dict[str, Trained] = {}
    measured: dict[str, Measured] = {}
    for name, recipe in recipes.items():
        log = max(recipe.steps // 100, 1)
        train(
            recipe,
            folder / name,
            images=images,
            resume=True,
            keep=STOPS if colour else 1,
            checkpoint_every=8 * log,  # at 72, 80, 88, 96 and 100 %
            progress=f"{name:12s}" if progress else False,
            callbacks=(grids(recipe, images, folder / name),),
        )
        runs[name] = Trained.of(folder / name, images=images)
        measured[name] = measure(runs[name], network, settings.fid_samples)
    (folder / "results.json").write_text(json.dumps(measured, indent=2) + "\n")

    first = next(iter(recipes.values()))
    page = Page(
        f"{settings.data}: {', '.join(recipes)}",
        f"Residual energies trained for {first.steps:,} iterations of {first.batch_size} of {len(images.train):,} "
        f"images by the preset '{settings.preset}', on {jax.devices()[0].device_kind}. {images.note}",
    )
    tables(page, measured, settings)
    page.heading("Learning")
    learning(page, {name: t.run for name, t in runs.items()})
    shown = next((t for t in runs.values() if t.recipe.bilevel), next(iter(runs.values())))
    pictures(page, shown)
    if shown.parts.held_out_labels is not None and shown.recipe.bilevel:
        map_of_latents(page, shown)
    return page.write(folder)


def tables(page: Any, measured: dict[str, Measured], settings: Settings) -> None:
    none = math.nan
    paper_svm = PAPER_SVM.get(settings.data, {})
    if any(not math.isnan(m["SVM"]) for m in measured.values()):
        page.heading("What the latents know")
        rows = [[name, m["SVM"], paper_svm.get(name, none)] for name, m in measured.items() if not math.isnan(m["SVM"])]
        rows += [["pixels", "", paper_svm["raw"]]] if "raw" in paper_svm else []
        page.table(["", "linear SVM, %", "paper"], rows, "Test accuracy of a linear classifier of the posterior means.")
    fisher = {name: {k: v for k, v in m.items() if k.startswith("Fisher")} for name, m in measured.items()}
    fisher = {name: values for name, values in fisher.items() if values}
    if fisher:
        page.heading("How near q is to the posterior")
        header = [f"noise {level.removeprefix('Fisher ')}" for level in next(iter(fisher.values()))]
        caption = "Fisher divergence of q from p(h|v), held-out images. The paper's falls to between 10 and 100."
        page.table(["", *header], [[name, *values.values()] for name, values in fisher.items()], caption)
    if any("FID" in m for m in measured.values()):
        page.heading("How good samples are")
        cifar = settings.data == "cifar10"
        paper = lambda name: PAPER_FID.get(name, (none, none)) if cifar else (none, none)
        rows = [[n, m["FID"], paper(n)[0], m["FID, best stop"], paper(n)[1]] for n, m in measured.items() if "FID" in m]
        page.table(
            ["", "FID", "paper", "FID, best stop", "paper"],
            rows,
            f"Of {settings.fid_samples:,} samples down a ladder of 100 levels; the paper's: 50,000, by 2,700 Langevin "
            f"steps. Best stop: of {STOPS} checkpoints in the last third, the one of least FID by 1,000 samples.",
        )
