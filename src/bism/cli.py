"""The command line: parse, call, print."""

import inspect
import signal
import sys
import warnings
from collections.abc import Iterable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from .checkpoint import holds_run, require_space
from .image_recipe import DECIDED, ImageRecipe, are_images
from .images import load_images
from .recipe import Recipe, read_config

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
    help="Learn energy-based models with latent variables from data alone, by bi-level score matching.",
    epilog="Start with [bold]bism reproduce checkerboard[/bold] or [bold]bism train moons[/bold].",
)
reproduce_app = typer.Typer(no_args_is_help=True, help="Run an experiment of the paper again, with its report.")
app.add_typer(reproduce_app, name="reproduce")


def _version(show: bool) -> None:
    if show:
        print(f"bism {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None: ...


def option(text: str, *names: str):
    return typer.Option(*names, help=text)


def train(data: str, out: Path | None, resume: bool, **settings) -> None:
    """Train a model on your data and write its report.

    [bold]bism train my.csv[/bold] learns an energy of a table with two latents; [bold]bism train digits[/bold] one of
    images, by a convolutional network; [bold]bism train cifar10 --preset paper[/bold] does what the paper did. The
    folder then serves [bold]bism sample[/bold], [bold]evaluate[/bold] and [bold]report[/bold].
    """
    given = {name: value for name, value in settings.items() if value is not None}
    images = are_images(data) and "model" not in given
    kind, other = (ImageRecipe, Recipe) if images else (Recipe, ImageRecipe)
    for name in given.keys() - {f.name for f in fields(kind)}:
        flag = f"--{name.replace('_', '-')}"
        raise ValueError(f"{flag} is for {NAMES[other]}, and {data} {'holds' if images else 'holds no'} images.")
    if images:
        from .image_recipe import train as train_images
        from .report.images import grids, write as write_images

        loaded = load_images(data, side=given.get("side"))
        recipe = ImageRecipe.of(data, loaded, **given)
        folder = folder_of(recipe, out, resume)
        callbacks = (grids(recipe, loaded, folder),)
        run = train_images(recipe, folder, images=loaded, resume=resume, callbacks=callbacks)
        write_report = partial(write_images, images=loaded)
    else:
        from .recipe import train as train_table
        from .report.run import write as write_report

        # The whole path, so that the run can be evaluated from anywhere.
        recipe = Recipe(str(Path(data).resolve()) if Path(data).is_file() else data, **given)
        folder = folder_of(recipe, out, resume)
        run = train_table(recipe, folder, resume=resume)
    print(f"{run.step} iterations in {run.seconds:.0f} s; the run is {folder}")
    print(f"report: {write_report(folder)}")


def folder_of(recipe: Recipe | ImageRecipe, out: Path | None, resume: bool) -> Path:
    folder = out or Path("runs") / f"{Path(recipe.data).stem}-{recipe.method}"
    if resume and not holds_run(folder):
        if not (folder / "config.json").exists():
            raise FileNotFoundError(f"{folder} holds no run to go on with: leave out --resume, or name it by --out.")
        warnings.warn(f"{folder} holds no checkpoint yet: its run begins anew.", stacklevel=2)
    return folder


NAMES = {Recipe: "tables of numbers", ImageRecipe: "images"}


def _defaults(of_table: Any, of_images: Any) -> str:
    """What stands behind the help of an option, of tables and, where it is another, of images."""
    shown = [str(f.default) if f and f.default is not None else "" for f in (of_table, of_images)]
    if of_images and of_images.name in DECIDED["grey", "fast"]:
        shown[1] = "by preset"
    if of_table and shown[1] not in ("", shown[0]):
        shown[1] = f"images {shown[1]}"
    told = "; ".join(dict.fromkeys(text for text in shown if text))
    return f" ({told})" if told else ""


def _take_options_from_recipes() -> None:
    """The options of `train` are the fields of the two recipes, which also know the defaults."""
    named = "moons, rings, eight-gaussians, checkerboard; digits, mnist, fashion-mnist, cifar10, celeba32, celeba64"
    annotations: dict[str, Any] = {
        "data": Annotated[
            str, typer.Argument(help=f"A .csv, .npy or .npz, one example a row; a folder of images; or one of {named}.")
        ],
        "out": Annotated[Path | None, option("The run's folder; runs/DATA-METHOD if not given.")],
        "resume": Annotated[bool, option("Go on with the run in the folder.")],
    }
    defaults: dict[str, Any] = {"data": inspect.Parameter.empty, "out": None, "resume": False}
    table, images = ({f.name: f for f in fields(kind)[1:]} for kind in (Recipe, ImageRecipe))
    for name in table | images:
        both = [f for f in (table.get(name), images.get(name)) if f]
        texts = list(dict.fromkeys(f.metadata["help"] for f in both))
        text = " Of images: ".join(texts)
        text += _defaults(table.get(name), images.get(name))
        panel = "Options of both" if len(both) == 2 else f"Options of {NAMES[Recipe if name in table else ImageRecipe]}"
        what = typer.Option(*both[0].metadata["flags"], help=text, rich_help_panel=panel)
        annotations[name] = Annotated[both[0].type | None, what]
        defaults[name] = None
    kind = inspect.Parameter.KEYWORD_ONLY
    train.__annotations__ = annotations
    train.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
        [inspect.Parameter(name, kind, default=defaults[name], annotation=a) for name, a in annotations.items()]
    )
    app.command()(train)


_take_options_from_recipes()


def of_images(run: Path) -> bool:
    return read_config(run).get("kind") == "images"


def _only_images(run: Path, fid: int) -> None:
    if fid:
        raise ValueError(f"--fid is for images, and {run} is of a table.")


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    count: Annotated[int, option("How many.")] = 1000,
    steps: Annotated[
        int | None, option("Steps of each chain: 2000 for tables; for images 100 levels, or 2700 of Langevin.")
    ] = None,
    seed: Annotated[int, option("Of the chains.")] = 0,
    sampler: Annotated[str, option("Of images: ladder, or langevin, the paper's annealing.")] = "ladder",
    joint: Annotated[bool, option("Of images: v and h together, not at the h of training images.")] = False,
    out: Annotated[Path | None, option("A .npy, or of a table a .csv; RUN/samples.npy if not given.")] = None,
) -> None:
    """Draw samples from a trained model: of a table in the data's own units, of images as bytes, and as a picture."""
    import numpy as np

    path = out or run / "samples.npy"
    if path.suffix not in (".npy", ".csv") or (path.suffix == ".csv" and of_images(run)):
        raise ValueError(f"--out {path}: write samples to a .npy, or of a table to a .csv.")
    if count < 1 or (steps is not None and steps < 2):
        raise ValueError("sample: count must be at least 1 and steps at least 2.")
    if not of_images(run) and (joint or sampler != "ladder"):
        raise ValueError(f"--joint and --sampler are for images, and {run} is of a table.")
    path.parent.mkdir(parents=True, exist_ok=True)  # only now: a mistyped RUN has been refused
    if of_images(run):
        from .image_evaluation import Trained
        from .report.images import save_samples

        trained = Trained.of(run)
        require_space(path.parent, count * trained.images.train[0].size, f"{count} samples")
        found = trained.samples(count, seed, joint=joint, sampler=sampler, steps=steps)
        print(f"{count} samples in {path}, the first as a picture in {save_samples(trained, found, path)}")
        return
    from .evaluation import Trained
    from .table import write_table

    trained = Trained.of(run)
    require_space(path.parent, 16 * count * trained.scale.shift.size, f"{count} samples")
    found = trained.draw(count, seed, steps or 2000, progress=True)
    if path.suffix == ".csv":
        write_table(path, found, trained.scale.names)
    else:
        np.save(path, found)
    print(f"{count} samples in {path}")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    fid: Annotated[int, option("Of images: how many samples to take the FID of; 50000 is usual.")] = 0,
    data: Annotated[str, option("Of tables: where the data of the run are, if not where they were.")] = "",
) -> None:
    """Print what can be measured of a trained model: its loss and, where it is tractable, its likelihood.

    A Gaussian RBM too large to enumerate has it by annealed importance sampling, with what tells whether to trust it.
    Of images: a linear classifier on the latents, the Fisher divergence of q, the distance from training images, FID.
    """
    if of_images(run):
        from .image_evaluation import Trained, evaluate as measure_images

        found = measure_images(Trained.of(run), fid)
    else:
        from .evaluation import Trained, evaluate as measure

        _only_images(run, fid)
        trained = Trained.of(run, data)
        found = measure(trained, *trained.split())
    for name, value in found.items():
        print(f"{name:56s} {value:.4f}")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    fid: Annotated[int, option("Of images: how many samples to take the FID of.")] = 0,
    data: Annotated[str, option("Of tables: where the data of the run are, if not where they were.")] = "",
) -> None:
    """Write RUN/report.html: settings, curves, samples; the density in the plane; what an energy of images can do."""
    if of_images(run):
        from .report.images import write as write_images

        print(f"report: {write_images(run, fid)}")
        return
    from .report.run import write

    _only_images(run, fid)
    print(f"report: {write(run, data)}")


@reproduce_app.command()
def checkerboard(
    steps: Annotated[int | None, option("Iterations a method: 100000 as in the paper; 20000 if quick.")] = None,
    runs: Annotated[int | None, option("Runs a method, all at once: 10 as in the paper; 2 if quick.")] = None,
    seed: Annotated[int, option("The same seed gives the same tables.")] = 0,
    only: Annotated[str, option("Only these methods, separated by commas, as in 'DSM,BiDSM'.")] = "",
    quick: Annotated[bool, option("Fewer iterations and runs: a look in two minutes on two cores.")] = False,
    out: Annotated[Path, option("Its folder. Called again, it goes on where it stopped.")] = Path("runs/checkerboard"),
) -> None:
    """A small Gaussian RBM learns a checkerboard by twelve methods: densities, likelihood curves, a table."""
    from .experiments.checkerboard import METHODS as ALL, Settings, reproduce

    chosen = ({"steps": 20_000, "runs": 2} if quick else {}) | _given(steps=steps, runs=runs)
    print(f"report: {reproduce(out, Settings(seed=seed, methods=_names(only, ALL), **chosen))}")


@reproduce_app.command()
def freyface(
    steps: Annotated[int | None, option("Iterations of each run: 20000 as in the paper; 3000 if quick.")] = None,
    seeds: Annotated[
        int | None, option("Runs of each method in the first table: 5, and 2 of the others; 1 if quick.")
    ] = None,
    parts: Annotated[
        str, option("Of table, K, h, time, bias: those to do, separated by commas. All; table and bias if quick.")
    ] = "",
    only: Annotated[str, option("Only the first table, of these methods, as in 'DSM,BiDSM N=5'.")] = "",
    quick: Annotated[bool, option("Fewer iterations, 100 hidden units: minutes on two cores.")] = False,
    data: Annotated[str, option("Grey images in [0, 1] of your own instead: .npy or .npz.")] = "freyface",
    training: Annotated[int, option("The first so many are trained on.")] = 1400,
    validation: Annotated[int, option("The next so many choose the best iterate; the rest are for the test.")] = 300,
    seed: Annotated[int, option("The same seed gives the same tables.")] = 0,
    out: Annotated[Path, option("Its folder. Called again, it goes on where it stopped.")] = Path("runs/freyface"),
) -> None:
    """Gaussian RBMs of the Frey faces: likelihood and Fisher tables over N, K and h, gradient bias, times, samples.

    Without a GPU the whole takes many hours; [bold]--quick[/bold] takes minutes.
    """
    from .experiments.freyface import PARTS, TABLE, Settings, reproduce

    chosen = _given(steps=steps, seeds=seeds, other_seeds=None if seeds is None else min(seeds, 2))
    if parts or only:  # the other parts have methods of their own
        chosen["parts"] = _names(parts or "table", PARTS)
    chosen |= {"data": data, "training": training, "validation": validation, "seed": seed}
    make = Settings.quick if quick else Settings
    print(f"report: {reproduce(out, make(methods=_names(only, TABLE), **chosen))}")


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _names(text: str, every: Iterable[str]) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",")) if text else tuple(every)


def _reproduce_images(name: str, what: str, latents: str, fid_samples: int) -> None:
    @reproduce_app.command(name, help=f"Energies of {what}: samples, latents, learning curves, tables of SVM and FID.")
    def run(
        preset: Annotated[
            str, option("'paper': its settings; 'fast': ours, made for 25 minutes a run on one H200.")
        ] = "fast",
        latents: Annotated[str, option("Numbers of latents, separated by commas: a run for each.")] = latents,
        visible: Annotated[bool, option("MDSM too, an energy without latents.")] = True,
        steps: Annotated[int | None, option("Iterations of each run; the preset's if not given.")] = None,
        fid_samples: Annotated[int, option("For FID, of coloured images; 0 for none.")] = fid_samples,
        seed: Annotated[int, option("The same seed gives the same tables.")] = 0,
        out: Annotated[Path, option("Its folder. Called again, it goes on where it stopped.")] = Path("runs") / name,
    ) -> None:
        from .experiments.images import Settings, reproduce

        numbers = tuple(int(h) for h in latents.split(",") if h)
        settings = Settings(DATA.get(name, name), preset, numbers, visible, steps, fid_samples, seed)
        print(f"report: {reproduce(out, settings)}")


DATA = {"celeba": "celeba32"}
_reproduce_images("mnist", "MNIST's digits", "20,50,100", 0)
_reproduce_images("cifar10", "CIFAR-10's images", "20,50,100", 10_000)
_reproduce_images("celeba", "CelebA's faces, of 32 × 32", "50", 10_000)
_reproduce_images("digits", "scikit-learn's 8 × 8 digits, in minutes without a GPU", "16", 0)


@app.command()
def diagnose(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    tolerance: Annotated[float, option("The relative gradient bias that is good enough.")] = 0.1,
    data: Annotated[str, option("Where the data of the run are, if not where they were.")] = "",
) -> None:
    """Measure how far the hypergradient of a table's run is from the true one; say which N, K or response it needs."""
    from .evaluation import diagnose_run

    if of_images(run):
        raise ValueError(
            f"{run} is of images, whose lower problem is too large to solve to its end: diagnose is for tables. "
            "`bism evaluate` tells how near q is to the posterior, by the level of noise."
        )
    print("Solving the lower problem on one batch, in double precision: about a minute.", file=sys.stderr)
    found = diagnose_run(run, data)
    if found.has_reference:
        print(f"{'response':20s} {'K':>3s} {'bias':>9s} {'ms':>8s}")
        for c in found.candidates:
            print(f"{c.name:20s} {c.lower_steps:3d} {c.bias:9.2%} {c.milliseconds:8.2f}")
        print("distance of q from the best q: " + ", ".join(f"{d:.3g} at K={k}" for k, d in found.distance.items()))
        for name, rate in {"plain": found.plain, "conditioned": found.conditioned}.items():
            kappa, r_squared = rate.fit
            print(f"{name} gradient steps (Theorem 2): bias falls as {kappa:.4f}^N, R² {r_squared:.4f}")
        print(f"undamped conjugate gradients at the best q: bias {found.floor:.1e}, the floor of this measurement")
    for level, value in found.fisher.items():
        print(f"Fisher divergence of q from the posterior, noise {level:.2f}: {value:.4g}")
    print(found.verdict(tolerance))


def main() -> None:
    ended = []

    def end(*_: Any) -> None:  # what a scheduler sends: save, as when interrupted
        ended.append(True)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    warnings.showwarning = lambda message, *_: print(f"bism: {message}", file=sys.stderr)
    try:
        app()
    except SystemExit:
        if ended:
            sys.exit(128 + signal.SIGTERM)
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    except ImportError as error:
        print(f"bism: {error}. Images need more than the core: pip install 'bism[images]'.", file=sys.stderr)
        sys.exit(1)
    except (ValueError, TypeError, OSError, ArithmeticError, MemoryError) as error:
        print(f"bism: {error}", file=sys.stderr)
        sys.exit(1)
