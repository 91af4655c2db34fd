"""Save and resume: all arrays of a run's state, whole or not at all."""

import logging
import shutil
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


class Checkpoints:
    """The last `keep` states of a run, by iteration."""

    def __init__(self, folder: Path, keep: int = 3):
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.ERROR)
        self._ocp = ocp
        self.folder = Path(folder).absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        try:
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        except OSError as error:
            raise OSError(f"{self.folder}: cannot keep checkpoints here: {error}") from error

    @property
    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: PyTree) -> None:
        leaves = [np.asarray(x) for x in jax.tree.leaves(_data(state))]
        with uninterrupted():
            for later in self.steps:
                if later >= step:  # unreadable, or of a run that went on from before it
                    self._manager.delete(later)
            self._manager.save(step, args=self._ocp.args.StandardSave({"leaves": leaves}))

    def restore(self, like: PyTree, step: int | None = None) -> tuple[int, Any]:
        """The newest state that can be read (or that of `step`), in the structure of `like`."""
        for candidate in [step] if step is not None else reversed(self.steps):
            try:
                # Not by the manager, which learns from the newest, if broken, to read none of the others.
                with self._ocp.StandardCheckpointer() as reader:
                    found = reader.restore(self.folder / str(candidate) / "default")["leaves"]
            except Exception as error:  # Orbax raises many kinds; whichever it was, an older checkpoint may be whole.
                warnings.warn(f"{self.folder}/{candidate} cannot be read and is passed over: {error}", stacklevel=2)
                continue
            return candidate, _fill(like, found, f"{self.folder}/{candidate}")
        raise FileNotFoundError(f"{self.folder} holds no checkpoint that can be read.")

    def close(self) -> None:
        self._manager.close()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Signals to interrupt or to end wait until this is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {
        kind: signal.signal(kind, lambda kind, _: came.append(kind)) for kind in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for kind, handler in handlers.items():
            signal.signal(kind, signal.SIG_DFL if handler is None else handler)
    for kind in came[:1]:
        signal.raise_signal(kind)


def _data(tree):
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, eqx.filter(tree, eqx.is_array))


def _is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _fill(like, leaves, where):
    arrays, static = eqx.partition(like, eqx.is_array)
    expected, structure = jax.tree.flatten(arrays)
    data = jax.tree.leaves(_data(arrays))
    shapes = [(x.shape, np.shape(y)) for x, y in zip(data, leaves, strict=False) if x.shape != np.shape(y)]
    if len(data) != len(leaves) or shapes:
        detail = (
            f"{shapes[0][1]} where {shapes[0][0]} is wanted" if shapes else f"{len(leaves)} arrays, not {len(data)}"
        )
        raise ValueError(f"{where} is of another model or method: it has {detail}.")

    def same_kind(x, y):
        if _is_key(x):
            return jax.random.wrap_key_data(y, impl=jax.random.key_impl(x))
        return jnp.asarray(y, x.dtype)

    return eqx.combine(
        jax.tree.unflatten(structure, [same_kind(*pair) for pair in zip(expected, leaves, strict=True)]), static
    )


def holds_run(folder: Path) -> bool:
    """Whether a run has a checkpoint there: one that failed before that may be begun again."""
    return bool(_kept(folder))


def require_checkpoints(folder: Path, state: PyTree, keep: int) -> None:
    """Refuse to start a run whose checkpoints do not fit on the disk: those kept, and one more while it is written."""
    copies = max(keep + 1 - len(_kept(folder)), 1)
    size = sum(x.nbytes for x in jax.tree.leaves(_data(state))) * copies
    require_space(folder, size, f"{copies} checkpoints", " or keep fewer checkpoints")


def require_space(folder: Path, size: int, what: str, remedy: str = "") -> None:
    free = shutil.disk_usage(_existing(Path(folder).absolute())).free
    if size > free:
        raise OSError(
            f"{folder}: {what} need {size / 1e6:.0f} MB and {free / 1e6:.0f} MB are free. "
            f"Free some space, choose another folder{remedy}."
        )


def _kept(folder):
    return [path for path in (Path(folder) / "checkpoints").glob("*") if path.name.isdigit()]


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)
