"""Data: arrays, files, and named data sets, checked before anything is trained on them."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Num

from .table import read_header, read_table

TEXT = (".csv", ".txt")
FREY_SHA256 = "2438ba4f0d2a6bd8bac43de756141eaa33c8d248dd613d464bdb1210d9b7af78"  # of the pixels


def as_data(x: Any, name: str = "data", like: Array | None = None, stored: bool = False) -> Num[Array, "count ..."]:
    """`x` on the device, or an error that says what is wrong with it and what to do.

    In the working precision, or, `stored`, in its own type, which may be bytes.
    """
    x = checked(x, name, like, stored)
    return jnp.asarray(x) if stored else jnp.asarray(x, jnp.result_type(float))


def checked(x: Any, name: str = "data", like: Array | None = None, stored: bool = False) -> Num[Any, "count ..."]:
    """`x` as it is, if it can be trained on."""
    if isinstance(x, (str, Path)):
        x = load(str(x))
    x = np.asarray(x) if not isinstance(x, jnp.ndarray) else x
    if x.ndim < 2:
        raise ValueError(f"{name} must have one example a row, shape (count, ...); it has shape {tuple(x.shape)}.")
    if x.size == 0:
        raise ValueError(f"{name} is empty: shape {tuple(x.shape)}.")
    if like is not None and x.shape[1:] != like.shape[1:]:
        raise ValueError(f"{name} has examples of shape {tuple(x.shape[1:])} and the data of {tuple(like.shape[1:])}.")
    if stored and np.issubdtype(x.dtype, np.integer):
        return x
    if not np.issubdtype(x.dtype, np.floating):
        raise TypeError(
            f"{name} is of type {x.dtype}; score matching needs real numbers. Convert it, as in "
            f"{name}.astype('float32'), and scale pixels with / 255."
        )
    bad = ~np.isfinite(np.asarray(x)).reshape(len(x), -1)
    if bad.any():
        row = int(np.argmax(bad.any(1)))
        raise ValueError(
            f"{name} has {int(bad.sum())} NaN or infinite values, first in row {row}. Drop those rows or impute them."
        )
    return x


def digest(x: Any) -> str:
    """Of the values, in their own type: the same data have the same."""
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()


def load_file(path: Path) -> np.ndarray:
    """An array from .npy, from .npz (the only array, or `x_train`, `images`, `data`, `x`), or from .csv or .txt."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such file. Name a .npy, .npz or .csv, or one of: {', '.join(sorted(NAMED))}."
        )
    readers = {".npy": _read_npy, ".npz": _read_npz} | dict.fromkeys(TEXT, read_table)
    if path.suffix not in readers:
        raise ValueError(f"{path}: unknown kind of file {path.suffix!r}; use .npy, .npz or .csv.")
    try:
        return readers[path.suffix](path)
    except Exception as error:  # a broken file raises whatever its reader stumbles on
        raise ValueError(f"{path} cannot be read as an array: {error}") from error


def save(path: Path, arrays: Mapping[str, Any]) -> None:
    """A .npz of the arrays, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}.npz")
    try:
        np.savez(unfinished, **arrays)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _read_npy(path):
    with path.open("rb") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _read_npz(path):
    with path.open("rb") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as arrays:
        names = [name for name in ("x_train", "images", "data", "X", "x") if name in arrays] or list(arrays)
        if not names:
            raise ValueError("it has no arrays")
        if len(arrays) > 1 and names == list(arrays):
            raise ValueError(f"it has several arrays ({', '.join(arrays)}) and none is called x_train or data")
        return arrays[names[0]]


def column_names(source: str) -> list[str] | None:
    """Of a table in text that has a line of them."""
    path = Path(source)
    return read_header(path).names if path.suffix in TEXT else None


def checkerboard(count: int, seed: int = 0) -> np.ndarray:
    """Uniform on [0, ½]² ∪ [½, 1]²: density 2 there, so that no model's mean log-likelihood exceeds log 2."""
    rng = np.random.default_rng(seed)
    return (rng.uniform(0, 0.5, (count, 2)) + 0.5 * rng.integers(0, 2, (count, 1))).astype(np.float32)


def moons(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    angle, upper = rng.uniform(0, np.pi, count), rng.integers(0, 2, count)
    x = np.where(upper, np.cos(angle), 1 - np.cos(angle)) - 0.5
    y = np.where(upper, np.sin(angle), 0.5 - np.sin(angle)) - 0.25
    return (1.5 * np.stack([x, y], 1) + rng.normal(0, 0.1, (count, 2))).astype(np.float32)


def rings(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    radius, angle = 0.75 * rng.integers(1, 4, count), rng.uniform(0, 2 * np.pi, count)
    points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1)
    return (points + rng.normal(0, 0.06, (count, 2))).astype(np.float32)


def eight_gaussians(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    angle = 2 * np.pi * rng.integers(0, 8, count) / 8
    points = 2 * np.stack([np.cos(angle), np.sin(angle)], 1)
    return (points + rng.normal(0, 0.15, (count, 2))).astype(np.float32)


NAMED: dict[str, Callable[..., np.ndarray]] = {
    "checkerboard": checkerboard,
    "moons": moons,
    "rings": rings,
    "eight-gaussians": eight_gaussians,
}


def home(folder: str | Path | None = None) -> Path:
    """Where data sets are kept."""
    return Path(folder or os.environ.get("BISM_DATA") or Path.home() / ".cache" / "bism")


def freyface(
    folder: str | Path | None = None, url: str = "https://cs.nyu.edu/~roweis/data/frey_rawface.mat"
) -> np.ndarray:
    """The 1,965 Frey faces, consecutive frames of a video, of 28 × 20 values in [0, 1].

    Read from freyface.npz or frey_rawface.mat in `folder` (BISM_DATA if not given), else fetched there from their home.
    """
    folder = home(folder)
    if (folder / "freyface.npz").exists():
        images = np.load(folder / "freyface.npz")["images"]
    else:
        import pooch
        from scipy.io import loadmat

        try:
            path = pooch.retrieve(url, known_hash=None, fname="frey_rawface.mat", path=folder)
        except Exception as error:  # whatever the network says
            raise OSError(
                f"The Frey faces could not be fetched from {url} ({error}). Put frey_rawface.mat into {folder} by hand."
            ) from error
        images = loadmat(path)["ff"].T.reshape(-1, 28, 20)
    if digest(images) != FREY_SHA256:
        raise ValueError(f"{folder}: the Frey faces there are not the known ones; delete the file to fetch it again.")
    return images.astype(np.float32) / 255


def load(name: str, count: int = 60_000, seed: int = 0) -> np.ndarray:
    """A named data set, or the array in a file."""
    if name == "freyface":
        return freyface()
    return NAMED[name](count, seed) if name in NAMED else load_file(Path(name))
