"""The command line: parse, call, print."""

import inspect
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from .recipe import Recipe, train as train_by_recipe

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

    [bold]bism train my.csv[/bold] learns an energy with two latents; [bold]bism train moons --method bissm[/bold] tries
    another objective. The folder then serves [bold]bism sample[/bold], [bold]evaluate[/bold] and [bold]report[/bold].
    """
    recipe = Recipe(data, **settings)
    folder = out or Path("runs") / f"{Path(data).stem}-{recipe.method}"
    run = train_by_recipe(recipe, folder, resume=resume)
    print(f"{run.step} iterations in {run.seconds:.0f} s; the run is {folder}")
    report(folder)


def _take_options_from_recipe() -> None:
    """The options of `train` are the recipe's fields."""
    toys = "moons, rings, eight-gaussians, checkerboard"
    annotations: dict[str, Any] = {
        "data": Annotated[str, typer.Argument(help=f"A .npy, .npz or .csv, one example a row; or one of {toys}.")],
        "out": Annotated[Path | None, option("The run's folder; runs/DATA-METHOD if not given.")],
        "resume": Annotated[bool, option("Go on with the run in the folder.")],
    }
    defaults: dict[str, Any] = {"data": inspect.Parameter.empty, "out": None, "resume": False}
    for f in fields(Recipe)[1:]:
        annotations[f.name] = Annotated[f.type, option(f.metadata["help"], *f.metadata["flags"])]
        defaults[f.name] = f.default
    kind = inspect.Parameter.KEYWORD_ONLY
    train.__annotations__ = annotations
    train.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
        [inspect.Parameter(name, kind, default=defaults[name], annotation=a) for name, a in annotations.items()]
    )
    app.command()(train)


_take_options_from_recipe()


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    count: Annotated[int, option("How many.")] = 1000,
    steps: Annotated[int, option("Steps of each chain.")] = 2000,
    seed: Annotated[int, option("Of the chains.")] = 0,
    out: Annotated[Path | None, option("Where to; RUN/samples.npy if not given.")] = None,
) -> None:
    """Draw samples from a trained model, in the data's own units."""
    import numpy as np

    from .recipe import draw, restore

    recipe, trained, scale, _ = restore(run)
    path = out or run / "samples.npy"
    np.save(path, draw(recipe, trained, scale, count, seed, steps))
    print(f"{count} samples in {path}")


@app.command()
def evaluate(run: Annotated[Path, typer.Argument(help="A run's folder.")]) -> None:
    """Print what can be measured of a trained model: its loss and, where it is tractable, its likelihood."""
    from .evaluation import evaluate as measure

    for name, value in measure(run).items():
        print(f"{name:42s} {value:.4f}")


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run's folder.")]) -> None:
    """Write RUN/report.html: settings, curves, samples and, in the plane, the density and the latents."""
    from .report.run import write

    print(f"report: {write(run)}")


@reproduce_app.command()
def checkerboard(
    steps: Annotated[int, option("Iterations a method; the paper's is 100000.")] = 100_000,
    runs: Annotated[int, option("Runs a method, all at once; the paper's is 10.")] = 10,
    seed: Annotated[int, option("The same seed gives the same tables.")] = 0,
    only: Annotated[str, option("Only these methods, separated by commas, as in 'DSM,BiDSM'.")] = "",
    quick: Annotated[bool, option("20000 iterations, 2 runs: a look in two minutes on two cores.")] = False,
    out: Annotated[Path, option("Its folder. Called again, it goes on where it stopped.")] = Path("runs/checkerboard"),
) -> None:
    """A small Gaussian RBM learns a checkerboard by twelve methods: densities, likelihood curves, a table."""
    from .experiments.checkerboard import METHODS as ALL, Settings, reproduce

    steps, runs = (20_000, 2) if quick else (steps, runs)
    names = tuple(name.strip() for name in only.split(",")) if only else tuple(ALL)
    print(f"report: {reproduce(out, Settings(steps, runs, seed=seed, methods=names))}")


@reproduce_app.command()
def freyface(
    steps: Annotated[int, option("Iterations of each run; the paper's is 20000.")] = 20_000,
    seeds: Annotated[int, option("Runs of each method in the first table, all at once.")] = 5,
    parts: Annotated[
        str, option("Of table, K, h, time, bias: those to do, separated by commas.")
    ] = "table,K,h,time,bias",
    quick: Annotated[bool, option("3000 iterations, 100 hidden units, one seed, table and bias only.")] = False,
    data: Annotated[str, option("Grey images in [0, 1] of your own instead: .npy or .npz.")] = "freyface",
    training: Annotated[int, option("The first so many are trained on.")] = 1400,
    validation: Annotated[int, option("The next so many choose the best iterate; the rest are for the test.")] = 300,
    out: Annotated[Path, option("Its folder. Called again, it goes on where it stopped.")] = Path("runs/freyface"),
) -> None:
    """Gaussian RBMs of the Frey faces: likelihood and Fisher tables over N, K and h, gradient bias, times, samples.

    Without a GPU the whole takes many hours; [bold]--quick[/bold] takes minutes.
    """
    from .experiments.freyface import Settings, reproduce

    settings = {"data": data, "training": training, "validation": validation}
    chosen = {"steps": steps, "seeds": seeds, "parts": tuple(name.strip() for name in parts.split(","))}
    print(f"report: {reproduce(out, Settings.quick(**settings) if quick else Settings(**chosen, **settings))}")


@app.command()
def diagnose(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    tolerance: Annotated[float, option("The relative gradient bias that is good enough.")] = 0.1,
) -> None:
    """Measure how far the run's hypergradient is from the true one, and say which N, K or response it needs."""
    from .evaluation import diagnose_run

    found = diagnose_run(run)
    print(f"{'response':20s} {'K':>3s} {'bias':>9s} {'ms':>8s}")
    for c in found.candidates:
        print(f"{c.name:20s} {c.lower_steps:3d} {c.bias:9.2%} {c.milliseconds:8.2f}")
    print("distance of q from the best q: " + ", ".join(f"{d:.3g} at K={k}" for k, d in found.distance.items()))
    kappa, r_squared = found.rate.fit
    print(f"plain gradient steps (Theorem 2): bias falls as {kappa:.4f}^N, R² {r_squared:.2f}")
    for level, value in found.fisher.items():
        print(f"Fisher divergence of q from the posterior, noise {level:.2f}: {value:.4g}")
    print(found.verdict(tolerance))


def main() -> None:
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, TypeError, OSError, ArithmeticError) as error:
        print(f"bism: {error}", file=sys.stderr)
        sys.exit(1)
