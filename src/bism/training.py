"""`fit`: the one loop, for every method."""

import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from .checkpoint import Checkpoints, holds_run, require_checkpoints
from .checks import as_key, check_arguments
from .cost import memory_error
from .data import as_data, digest
from .energy import EBLVM, EBM
from .method import Method, State, parameters
from .posterior import Posterior
from .progress import Progress
from .sampling import sample
from .version import __version__

STACKED = 1_000_000  # parameters times examples in a batch, up to which a CPU trains seeds at once
Maker = Callable[[PRNGKeyArray], Any]
Prepare = Callable[[Array, PRNGKeyArray], Float[Array, "batch ..."]]
Evaluation = Callable[[Any, Any], Float[Array, ""]]


class Diverged(FloatingPointError):
    """The loss of a run is no longer finite."""


class Loop(eqx.Module):
    """All that changes from one iteration to the next: what a checkpoint holds."""

    state: State
    best: State | None  # the state of least validation loss so far
    best_loss: Array


@dataclass(repr=False)
class Run:
    """What training gave. With `seeds`, every array has them along a leading axis; `run[i]` is one of them."""

    method: Method
    loop: Loop
    step: int
    history: list[dict[str, Any]]
    seeds: int | None = None
    folder: Path | None = None
    shape: tuple[int, ...] = ()  # of one v
    seconds: float = 0.0

    @property
    def state(self) -> State:
        return self.loop.state

    @property
    def model(self) -> Any:
        """The model to use: the moving average of θ where the method keeps one."""
        return self.loop.state.best

    @property
    def posterior(self) -> Any:
        return self.loop.state.q

    @property
    def best(self) -> State:
        """The state of least validation loss; the last one if nothing was validated."""
        return self.loop.state if self.loop.best is None else self.loop.best

    def at_best(self) -> "Run":
        """The run as it was when its validation loss was least; as it is, if nothing was validated."""
        if self.loop.best is None or self.seeds is not None:
            return self
        steps, losses = self.curve("validation")
        return replace(self, loop=replace(self.loop, state=self.best), step=int(steps[np.nanargmin(losses)]))

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(iterations, values) of a metric or an evaluation."""
        rows = [row for row in self.history if name in row]
        if not rows:
            known = sorted({key for row in self.history for key in row} - {"step", "seconds"})
            raise KeyError(f"no {name!r} was recorded; there is {', '.join(known)}.")
        return np.array([row["step"] for row in rows]), np.array([row[name] for row in rows])

    def __getitem__(self, seed: int) -> "Run":
        if self.seeds is None:
            raise TypeError("this run has one seed; there is nothing to index.")
        if not -self.seeds <= seed < self.seeds:
            raise IndexError(f"seed {seed} of {self.seeds}.")
        pick = lambda x: x[seed] if isinstance(x, list) else x
        history = [{name: pick(value) for name, value in row.items()} for row in self.history]
        loop = jax.tree.map(lambda x: x[seed] if eqx.is_array(x) else x, self.loop)
        return Run(self.method, loop, self.step, history, None, self.folder, self.shape, self.seconds)

    def __repr__(self) -> str:
        last = {name: value for name, value in (self.history or [{}])[-1].items() if name not in ("step", "seconds")}
        of = "" if self.seeds is None else f", {self.seeds} seeds"
        return f"Run({type(self.method).__name__} of a {type(self.model).__name__}, {self.step} iterations{of}, {last})"

    def sample(self, key: PRNGKeyArray | int, count: int, **settings: Any) -> Float[Array, "count ..."]:
        """`count` samples of `model`: `bism.sample`, told the sizes of v and h and whether h is bits."""
        if self.seeds is not None:
            raise TypeError("these are several runs: sample one of them, as in run[0].sample(key, count).")
        latent: dict[str, Any] = {}
        if self.posterior is not None:
            h = eqx.filter_eval_shape(lambda v: self.posterior(v).mean, jnp.zeros(self.shape))
            latent = {"h_shape": h.shape, "binary": self.posterior.discrete}
        return sample(self.model, key, count, shape=self.shape, **latent, **settings)


def fit(
    method: Method,
    model: EBM | EBLVM | Maker,
    posterior: Posterior | Maker | None = None,
    *,
    data: Any,
    steps: int,
    batch_size: int = 100,
    key: PRNGKeyArray | int = 0,
    seeds: int | None = None,
    validation: Any = None,
    evaluate: Mapping[str, Evaluation] | None = None,
    log_every: int | None = None,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    keep: int = 3,
    config: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callable[[Run], object]] = (),
    progress: bool | str = True,
    prepare: Prepare | None = None,
    rate: Callable[[float], str] | None = None,
) -> Run:
    """Train `model` (and `posterior`) on `data` by `method` for `steps` iterations.

    model, posterior: modules, or functions of a key that make them, so that each seed starts elsewhere.
    seeds: train this many runs at once, under vmap; everything that comes back has them along a leading axis.
    validation: held-out data; the method's own loss on it is recorded, and `run.best` is the state that had the least.
    evaluate: named functions (model, posterior) -> number, recorded every `evaluate_every` iterations.
    folder: where the run is kept (settings, metrics, checkpoints). With `resume`, a run found there goes on.
    callbacks: each is called with the run so far, at every log.
    prepare: a function (batch as stored, key) -> batch, applied within the compiled loop: bytes to [0, 1], flips. The
        data then stay on the device in the type they have.
    rate: what the progress says of so many iterations a second; without it, that number.

    The same key gives the same run to the last bit on the same CPU, in one go or resumed, whatever is logged; on a GPU
    it does with XLA_FLAGS=--xla_gpu_deterministic_ops=true.
    """
    counts = {"steps": steps, "batch_size": batch_size, "keep": keep, "log_every": log_every, "seeds": seeds}
    counts |= {"evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every}
    given = {name: count for name, count in counts.items() if count is not None}
    check_arguments(method, model, posterior, callbacks, evaluate, **given)
    key = as_key(key)
    data = as_data(data, "data", stored=prepare is not None)
    held_out = None if validation is None else as_data(validation, "validation", like=data, stored=prepare is not None)
    log_every = max(steps // 100, 1) if log_every is None else log_every
    evaluate_every = 10 * log_every if evaluate_every is None else evaluate_every
    checkpoint_every = 10 * log_every if checkpoint_every is None else checkpoint_every
    intervals = {"log_every": log_every, "evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every}
    if batch_size > len(data):
        raise ValueError(f"fit: batch_size is {batch_size} and there are {len(data)} examples; make it smaller.")

    if folder is not None:
        folder = Path(folder)
        if holds_run(folder) and not resume:
            raise FileExistsError(
                f"{folder} already holds a run. Go on with it by resume=True, or --resume, or give another folder."
            )

    prepare = prepare or _as_stored
    first = prepare(data[:batch_size], key)
    if first.shape[0] != batch_size or not jnp.issubdtype(first.dtype, jnp.floating):
        raise TypeError(
            f"prepare must give {batch_size} examples of real numbers; it gives {first.dtype}{first.shape}."
        )
    loop, loop_key = _begin(method, model, posterior, first, key, seeds, held_out is not None)
    # A module given as it is may share its arrays with the caller, or with the average; training donates its own.
    arrays, static = eqx.partition(loop, eqx.is_array)
    arrays = jax.tree.map(jnp.copy, arrays)
    over_seeds = (lambda fn, axes: fn) if seeds is None else partial(_side_by_side, arrays, batch_size)
    run_block = jax.jit(over_seeds(_block(method, static, prepare), (0, 0, 0, None, None)), donate_argnums=0)
    run_evaluations = jax.jit(over_seeds(_evaluations(evaluate or {}, static), (0,)))
    run_validation = jax.jit(over_seeds(_validation(method, static, prepare), (0, None, 0)))

    settings = {"steps": steps, "batch_size": batch_size, "seeds": seeds, "data_shape": list(data.shape)}
    settings |= {"example_shape": list(first.shape[1:]), "validated": held_out is not None}
    settings |= {"key": np.asarray(jax.random.key_data(key)).tolist(), "key_impl": str(jax.random.key_impl(key))}
    settings |= {"method": eqx.tree_pformat(method, width=100), "data": digest(data)}
    run = Run(method, loop, 0, [], seeds, folder, first.shape[1:])
    checkpoints = None
    if folder is not None:
        require_checkpoints(folder, arrays, keep)
        checkpoints = Checkpoints(folder / "checkpoints", keep)
        if resume and checkpoints.steps:
            _refuse_other(folder, settings)
            run.step, loop = checkpoints.restore(loop)
            if run.step > steps:
                raise ValueError(f"{folder} already has {run.step} iterations, more than the {steps} asked for.")
            arrays = eqx.filter(loop, eqx.is_array)
        run.history = _truncate(folder / "metrics.jsonl", run.step)
        _write_config(folder, settings, config)
    run.loop = eqx.combine(arrays, static)
    del loop  # the first state; its memory is needed
    before = run.history[-1]["seconds"] if run.history else 0.0
    started, begun_at = time.perf_counter(), run.step
    bar = Progress(steps, progress, start=run.step, rate=rate)
    block = math.gcd(*intervals.values())  # iterations between two moments when something is to be done
    batches = _Batches(len(data), batch_size, loop_key, over_seeds)
    pending = []  # (iterations, metrics, first bad one) of the blocks that are not recorded yet

    def settle() -> None:
        """Record the last blocks: on the way, or when an interruption came before it was done."""
        nonlocal arrays
        if not pending:
            return
        _stop_if_bad([bad for _, _, bad in pending], checkpoints)
        run.seconds = before + time.perf_counter() - started
        record = {"step": run.step, "seconds": round(run.seconds, 3)} | _mean(pending)
        if run.step % evaluate_every == 0 or run.step == steps:
            record |= _host(run_evaluations(arrays))
            if held_out is not None:
                arrays, losses = run_validation(arrays, held_out, loop_key)
                record["validation"] = _host(losses)
        pending.clear()
        run.history.append(record)
        run.loop = eqx.combine(jax.tree.map(jnp.copy, arrays) if callbacks else arrays, static)
        if folder is not None:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        if checkpoints and (run.step % checkpoint_every == 0 or run.step == steps):
            checkpoints.save(run.step, run.loop)
        bar.update(run.step, (run.step - begun_at) / (run.seconds - before), record)

    try:
        while run.step < steps:
            stop = min((run.step // block + 1) * block, steps)
            iterations = jnp.arange(run.step, stop)
            given = batches.rows(run.step, stop), loop_key, iterations, data
            try:
                arrays, *found = run_block(arrays, *given)
                if run.step == begun_at:
                    jax.block_until_ready(found)  # memory that is short shows here
            except jax.errors.JaxRuntimeError as error:
                raise memory_error(error, run_block, (arrays, *given), batch_size) from error
            pending.append((stop - run.step, *found))
            run.step = stop
            if stop == steps or any(stop % every == 0 for every in intervals.values()):
                settle()
                for callback in callbacks:
                    callback(run)
    except KeyboardInterrupt:
        if checkpoints and not any(x.is_deleted() for x in jax.tree.leaves(arrays)):  # given to a block under way
            settle()
            if run.step not in (0, *checkpoints.steps):
                checkpoints.save(run.step, eqx.combine(arrays, static))
        if checkpoints and checkpoints.steps:
            bar.say(f"Interrupted; --resume, or resume=True, goes on from iteration {checkpoints.steps[-1]}.")
        raise
    finally:
        bar.close()
        if checkpoints:
            checkpoints.close()
    run.loop = eqx.combine(arrays, static)
    run.seconds = before + time.perf_counter() - started
    return run


def load(folder: str | Path, method: Method, model: Any, posterior: Any = None, *, step: int | None = None) -> Run:
    """The run that `fit` left in `folder`, given the same method, model and posterior (or their makers)."""
    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} is not a run: it has no config.json.")
    settings = json.loads((folder / "config.json").read_text())["settings"]
    batch = jnp.zeros((settings["batch_size"], *settings["example_shape"]))
    key = jax.random.wrap_key_data(jnp.array(settings["key"], jnp.uint32), impl=settings.get("key_impl"))
    seeds = settings["seeds"]
    loop, _ = _begin(method, model, posterior, batch, key, seeds, settings["validated"])
    checkpoints = Checkpoints(folder / "checkpoints")
    try:
        step, loop = checkpoints.restore(loop, step)
    finally:
        checkpoints.close()
    history = [row for row in _records(folder / "metrics.jsonl") if row["step"] <= step]
    return Run(method, loop, step, history, seeds, folder, tuple(settings["example_shape"]))


def _as_stored(batch, key):
    return batch


def _begin(method, model, posterior, batch, key, seeds, validated):
    """The loop before its first iteration, one a seed, and the keys of the iterations."""

    def begin(key):
        model_key, posterior_key, init_key, loop_key = jax.random.split(key, 4)
        made = model if isinstance(model, (EBM, EBLVM)) else model(model_key)
        q = posterior if posterior is None or isinstance(posterior, Posterior) else posterior(posterior_key)
        state = method.init(made, q, batch=batch, key=init_key)
        return Loop(state, state if validated else None, jnp.array(jnp.inf)), loop_key

    return begin(key) if seeds is None else eqx.filter_vmap(begin)(jax.random.split(key, seeds))


def _side_by_side(arrays, batch_size, fn, axes):
    """`fn` of each seed: all at once, but one by one on a CPU where the products of matrices are large."""
    values = sum(x[0].size for x in jax.tree.leaves(parameters(arrays.state.model)))
    if jax.default_backend() != "cpu" or values * batch_size < STACKED:
        return jax.vmap(fn, in_axes=axes)

    def one_by_one(*args):
        mapped = [arg for arg, axis in zip(args, axes, strict=True) if axis == 0]
        given = lambda each: [next(each) if axis == 0 else arg for arg, axis in zip(args, axes, strict=True)]
        return jax.lax.map(lambda mapped: fn(*given(iter(mapped))), mapped)

    return one_by_one


class _Batches:
    """The rows of the data in each iteration's batch: every epoch a new shuffle, of which only the key is kept."""

    def __init__(self, count, batch_size, key, over_seeds):
        self.per_epoch, self.key = count // batch_size, key
        self.first, self.rows_of = 0, None  # the iteration of the first of the rows at hand

        def shuffle(epochs, key):
            key = jax.random.fold_in(key, 2**31 - 2)  # the iterations have the numbers from 0
            one = lambda epoch: jax.random.permutation(jax.random.fold_in(key, epoch), count).astype(jnp.int32)
            rows = jax.vmap(one)(epochs)[:, : self.per_epoch * batch_size]
            return rows.reshape(-1, batch_size)

        self.shuffle = jax.jit(over_seeds(shuffle, (None, 0)))

    def rows(self, start: int, stop: int) -> Array:
        """(iterations, batch), after an axis of the seeds where there are any."""
        if self.rows_of is None or not self.first <= start <= stop <= self.first + self.rows_of.shape[-2]:
            epoch = start // self.per_epoch
            # The epoch after the last one needed too, so that the number is the same whatever the start.
            epochs = epoch + jnp.arange((stop - start - 1) // self.per_epoch + 2)
            self.first, self.rows_of = epoch * self.per_epoch, self.shuffle(epochs, self.key)
        return self.rows_of[..., start - self.first : stop - self.first, :]


def _block(method, static, prepare):
    """Iterations in one compiled loop, a batch of rows for each."""

    def block(arrays, rows, key, iterations, data):
        def one(arrays, at):
            i, rows = at
            loop = eqx.combine(arrays, static)
            step_key = jax.random.fold_in(key, i)
            batch = prepare(data[rows], jax.random.fold_in(step_key, 2))
            state, metrics = method.step(loop.state, batch, jax.random.fold_in(step_key, 1))
            loop = Loop(state, loop.best, loop.best_loss)
            return eqx.filter(loop, eqx.is_array), metrics

        arrays, metrics = jax.lax.scan(one, arrays, (iterations, rows))
        finite = jnp.all(jnp.array([jnp.isfinite(values) for values in metrics.values()]), 0)
        # The last update may have spoilt what the next loss would show.
        sound = jnp.all(jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(parameters(arrays.state))]))
        finite = finite.at[-1].set(finite[-1] & sound)
        bad = jnp.where(finite.all(), -1, iterations[jnp.argmin(finite)])
        return arrays, {name: values.mean() for name, values in metrics.items()}, bad

    return block


def _evaluations(evaluate, static):
    def run(arrays):
        state = eqx.combine(arrays, static).state
        return {name: fn(state.best, state.q) for name, fn in evaluate.items()}

    return run


def _validation(method, static, prepare):
    """The method's loss on all held-out data under noise that is the same each time; the best state is kept."""

    def run(arrays, held_out, key):
        loop = eqx.combine(arrays, static)
        key = jax.random.fold_in(key, 2**31 - 1)
        loss = method.validate(loop.state, prepare(held_out, jax.random.fold_in(key, 1)), key)
        better = loss < loop.best_loss
        choose = lambda new, old: jnp.where(better, new, old) if eqx.is_array(new) else new
        best = jax.tree.map(choose, loop.state, loop.best)
        loop = Loop(loop.state, best, jnp.where(better, loss, loop.best_loss))
        return eqx.filter(loop, eqx.is_array), loss

    return run


def _host(tree):
    """Plain numbers, or lists of them over the seeds."""
    return jax.tree.map(lambda x: np.asarray(x).tolist(), tree)


def _mean(pending):
    """The metrics of several blocks in one, as plain numbers."""
    weights = np.array([count for count, _, _ in pending])
    rows = [jax.tree.map(np.asarray, metrics) for _, metrics, _ in pending]
    return {name: np.average([row[name] for row in rows], 0, weights).tolist() for name in rows[0]}


def _stop_if_bad(bad, checkpoints):
    bad = np.atleast_1d(next((b for b in map(np.asarray, bad) if (b >= 0).any()), -1))
    if (bad < 0).all():
        return
    seed = int(np.argmax(bad >= 0))
    which = f" of seed {seed}" if len(bad) > 1 else ""
    iteration = int(bad[seed]) + 1
    if iteration == 1:
        hint = "The energy, or its gradient, is not finite on the first batch: look there."
    else:
        hint = "A smaller learning rate or clipped gradients (optax.clip_by_global_norm) may help."
    if checkpoints and checkpoints.steps:
        hint += f" The last good state is {checkpoints.folder}/{checkpoints.steps[-1]}."
    raise Diverged(f"The loss{which} is not finite at iteration {iteration}. {hint}")


def _refuse_other(folder, settings):
    """What a run goes on with must be what it began with, but for its length."""
    there = json.loads((folder / "config.json").read_text())["settings"]
    for name, value in settings.items():
        if name == "data" and there.get(name) != value:
            raise ValueError(f"{folder} cannot go on: it was trained on other data of the same shape.")
        if name != "steps" and there.get(name) != value:
            raise ValueError(f"{folder} cannot go on: it has {name} {there.get(name)}, and {value} is given here.")


def _write_config(folder, settings, config):
    folder.mkdir(parents=True, exist_ok=True)
    versions = {name: version(name) for name in ("jax", "equinox", "optax")}
    versions |= {"bism": __version__, "python": platform.python_version()}
    device = jax.devices()[0]
    about = settings | {"device": f"{device.platform}: {device.device_kind}", "versions": versions}
    text = json.dumps({"settings": about, "config": dict(config or {})}, indent=2, default=str)
    (folder / "config.json").write_text(text + "\n")


def _records(path):
    """The whole lines of a run's metrics; a line cut off by a crash, and what came after it, is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _truncate(path, step):
    """The records up to a checkpoint's iteration, and the file cut back to them."""
    rows = [row for row in _records(path) if row["step"] <= step]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows
