"""Image data sets: bytes of shape (count, channels, height, width), checked before anything is trained on them."""

import gzip
import re
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from .data import home, load_file, save

Bytes = UInt8[np.ndarray, "count channels height width"]


class Images(NamedTuple):
    train: Bytes
    test: Bytes | None
    train_labels: np.ndarray | None
    test_labels: np.ndarray | None
    name: str
    size: tuple[int, int]  # height and width before zeros were laid around
    flip: bool  # whether an image and its mirror image are as good
    note: str  # what was done to the images, or is missing, in words; often ""

    def crop(self, images):
        """Images of the padded size, of any type, without the padding."""
        return _centre(images, self.size)


class _Named(NamedTuple):
    shape: tuple[int, ...]
    images: int  # for training
    homes: tuple[str, ...] = ()
    sha256: dict[str, str] = {}


_IDX = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
_IDX += ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
_MNIST = (
    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
)
_FASHION = (
    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
)
# The binary version of CIFAR-10 has the images of the Python version in the same order, and no pickles to trust.
_CIFAR = {"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"}
_MNIST_HOMES = ("http://yann.lecun.com/exdb/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/")
_FASHION_HOME = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"

CELEBA = 182_637  # the first images of CelebA: its training and validation parts
NAMED = {
    "mnist": _Named((28, 28), 60_000, _MNIST_HOMES, dict(zip(_IDX, _MNIST, strict=True))),
    "fashion-mnist": _Named((28, 28), 60_000, (_FASHION_HOME,), dict(zip(_IDX, _FASHION, strict=True))),
    "cifar10": _Named((32, 32, 3), 50_000, ("https://www.cs.toronto.edu/~kriz/",), _CIFAR),
    "celeba32": _Named((32, 32, 3), CELEBA),
    "celeba64": _Named((64, 64, 3), CELEBA),
    "digits": _Named((8, 8), 1_500),
}


def load_images(
    source: str | Path | np.ndarray,
    *,
    side: int | None = None,
    folder: str | Path | None = None,
    url: str | None = None,
) -> Images:
    """A named data set, a folder of image files, or an array in a .npy or .npz file, checked, as bytes.

    With `side`, images are cut to their central square and resized to side × side. The networks halve images three
    times, so greyscale ones are padded with zeros to multiples of 8, as MNIST is from 28 to 32; `crop` undoes that.
    Named sets are read from `folder` (BISM_DATA if not given), else fetched there from their home, or from `url`.
    """
    if side is not None and side < 1:
        raise ValueError(f"side must be at least 1, got {side}.")
    name, notes = "array" if isinstance(source, np.ndarray) else str(source), []
    if isinstance(source, np.ndarray):
        arrays = {"train": source}
    elif source in NAMED:
        arrays, notes = _named(name, home(folder), url)
    elif Path(source).is_dir():
        arrays, notes = _folder(Path(source), side)
    else:
        arrays = _file(Path(source))
    parts = {part: _as_bytes(arrays[part], f"{name}, {part}") for part in ("train", "test") if part in arrays}
    if "test" in parts and parts["test"].shape[1:] != parts["train"].shape[1:]:
        raise ValueError(
            f"{name}: test images are of shape {parts['test'].shape[1:]}, training ones of {parts['train'].shape[1:]}."
        )
    for part, images in parts.items():
        if (labels := arrays.get(f"{part}_labels")) is not None and len(labels) != len(images):
            raise ValueError(f"{name}: {len(images)} images for {part} have {len(labels)} labels.")
    if side is not None and parts["train"].shape[2:] != (side, side):
        parts = {part: _resized(images, side) for part, images in parts.items()}
    height, width = parts["train"].shape[2:]
    down, across = -height % 8, -width % 8
    if down or across:
        if parts["train"].shape[1] == 3:
            raise ValueError(
                f"{name}: colour images of {height}×{width} cannot be halved three times. Give side=, or --side, a "
                f"multiple of 8 such as {max(min(height, width) // 8 * 8, 8)}, to cut them to a square and resize them."
            )
        frame = ((0, 0), (0, 0), (down // 2, down - down // 2), (across // 2, across - across // 2))
        parts = {part: np.pad(images, frame) for part, images in parts.items()}
        notes.append(f"zeros around bring {height}×{width} to {height + down}×{width + across}")
    labels = arrays.get("train_labels"), arrays.get("test_labels")
    flip = isinstance(source, str) and source in ("celeba32", "celeba64")
    return Images(parts["train"], parts.get("test"), *labels, name, (height, width), flip, "; ".join(notes))


def as_bytes(images: np.ndarray) -> np.ndarray:
    """From [0, 1]."""
    return np.round(255 * images).astype(np.uint8)


def show(images, size: tuple[int, int] | None = None) -> Float[np.ndarray, "count height width *colour"]:
    """Values in [0, 1] for plotting, channels last, one channel dropped; without padding where a `size` is given."""
    images = np.asarray(images)
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images must be of shape (count, 1 or 3, height, width); they are of {images.shape}.")
    images = _centre(images, size) if size else images
    images = images / np.float32(255) if images.dtype == np.uint8 else np.clip(images, 0, 1)
    return images[:, 0] if images.shape[1] == 1 else np.moveaxis(images, 1, -1)


def _centre(images, size):
    top, left = (images.shape[-2] - size[0]) // 2, (images.shape[-1] - size[1]) // 2
    if top < 0 or left < 0:
        raise ValueError(f"images of {images.shape[-2]}×{images.shape[-1]} cannot be cropped to {size[0]}×{size[1]}.")
    return images[..., top : top + size[0], left : left + size[1]]


def _as_bytes(x: Any, name: str) -> Bytes:
    """Channels first, values 0 to 255, or an error that says what is wrong and what to do."""
    x = np.asarray(x)
    if x.ndim == 3 and x.shape[-1] > 4:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[-1] in (1, 3):
        x = np.moveaxis(x, -1, 1)
    if x.ndim != 4 or x.shape[1] not in (1, 3):
        raise ValueError(
            f"{name} must be of shape (count, height, width), (count, height, width, 1 or 3) or (count, 1 or 3, "
            f"height, width); it is of {x.shape}."
        )
    if x.size == 0:
        raise ValueError(f"{name} is empty: shape {x.shape}.")
    if np.issubdtype(x.dtype, np.floating):
        if not np.isfinite(x).all():
            raise ValueError(f"{name} has NaN or infinite values.")
        if x.min() < 0 or x.max() > 1:
            raise ValueError(
                f"{name} has values from {x.min():.4g} to {x.max():.4g}; floats must lie in [0, 1]. Divide pixels of 0 "
                "to 255 by 255, or store them as uint8."
            )
        return np.round(x * 255).astype(np.uint8)
    if x.dtype == bool:
        return x.astype(np.uint8) * 255
    if not np.issubdtype(x.dtype, np.integer):
        raise TypeError(f"{name} is of type {x.dtype}; pixels are uint8 in 0 to 255, or floats in [0, 1].")
    if x.min() < 0 or x.max() > 255:
        raise ValueError(f"{name} has values from {x.min()} to {x.max()}; whole numbers must lie in 0 to 255.")
    if x.max() <= 1:
        raise ValueError(f"{name} has whole numbers of at most {x.max()}, black when 255 is white; make them floats.")
    return np.ascontiguousarray(x, np.uint8)


def _square(image, side, edge=None):
    """The central square of a Pillow image, `edge` wide if given, resized."""
    from PIL import Image

    edge = edge or min(image.size)
    left, top = (image.width - edge) // 2, (image.height - edge) // 2
    return image.crop((left, top, left + edge, top + edge)).resize((side, side), Image.Resampling.LANCZOS)


def _resized(images, side):
    from PIL import Image

    last = np.squeeze(np.moveaxis(images, 1, -1), -1) if images.shape[1] == 1 else np.moveaxis(images, 1, -1)
    rows = np.stack([np.asarray(_square(Image.fromarray(np.ascontiguousarray(image)), side)) for image in last])
    return rows[:, None] if images.shape[1] == 1 else np.ascontiguousarray(np.moveaxis(rows, -1, 1))


def _file(path: Path) -> dict[str, np.ndarray]:
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such file or folder. Name a folder of images, a .npy or .npz, or one of: {', '.join(NAMED)}."
        )
    if path.suffix not in (".npy", ".npz"):
        raise ValueError(f"{path}: unknown kind of file {path.suffix!r}; use a folder of images, .npy or .npz.")
    arrays = {"train": load_file(path)}
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            names = {"x_test": "test", "y_train": "train_labels", "y_test": "test_labels"}
            arrays |= {ours: file[theirs] for theirs, ours in names.items() if theirs in file}
    return arrays


def _folder(folder: Path, side: int | None) -> tuple[dict[str, np.ndarray], list[str]]:
    """Every image file in a folder and those below it, in the order of their paths."""
    from PIL import Image

    readable = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    files = (p for p in folder.rglob("*") if p.suffix.lower() in readable and not p.name.startswith("."))
    paths = sorted(p for p in files if p.is_file())
    if not paths:
        raise ValueError(f"{folder} has no image files.")
    images, broken = {}, []
    for path in paths:
        try:
            image = _read(partial(path.open, "rb"))
        except Exception:  # a broken file raises whatever its decoder stumbles on
            broken.append(str(path.relative_to(folder)))
            continue
        images[path] = image = _square(image, side) if side else image
        first = next(iter(images))
        if image.size != images[first].size:
            told = [f"{p.relative_to(folder)} is {images[p].height}×{images[p].width}" for p in (first, path)]
            both = " and ".join(told)
            raise ValueError(
                f"{folder}: images of several sizes: {both}. Give side=, or --side, to bring all to one square."
            )
    notes = []
    if broken:
        told = ", ".join(broken[:5]) + (f" and {len(broken) - 5} more" if len(broken) > 5 else "")
        if not images:
            raise ValueError(f"{folder}: none of the {len(paths)} image files can be read: {told}.")
        said = f"{len(broken)} of {len(paths)} image files cannot be read and are left out: {told}"
        warnings.warn(f"{folder}: {said}.", stacklevel=3)
        notes.append(said)
    grey = sum(image.mode == "L" for image in images.values())
    mode = "L" if grey == len(images) else "RGB"
    if 0 < grey < len(images):
        notes.append(f"{grey} greyscale images among coloured ones made RGB")
    return {"train": np.stack([np.asarray(image.convert(mode)) for image in images.values()])}, notes


def _read(opened: Callable) -> Any:
    """A Pillow image: 'L' if it was greyscale, else 'RGB'. Transparency is dropped, of an animation the start taken."""
    from PIL import Image, ImageOps

    with opened() as file, Image.open(file) as image:
        image = ImageOps.exif_transpose(image)
        if image.mode[0] in "IF":  # 16-bit greyscale is brought to a byte; beyond that, what white is is not known
            deep = np.asarray(image)
            if image.mode == "F" or deep.min() < 0 or deep.max() > 65535:
                raise ValueError("neither 8 nor 16 bits a pixel")
            return Image.fromarray(np.round(deep / 257).astype(np.uint8))
        image = image.convert("RGBA") if image.mode == "P" else image
        return image.convert("L" if image.mode in ("1", "L", "LA", "La") else "RGB")


def _named(name: str, folder: Path, url: str | None) -> tuple[dict[str, np.ndarray], list[str]]:
    if name == "digits":
        return _digits(), []
    path, known = folder / f"{name}.npz", NAMED[name]
    if not path.exists():
        save(path, _celeba(known.shape[0], folder) if name.startswith("celeba") else _download(name, folder, url))
    try:
        arrays = _file(path)
        if arrays["train"].shape[1:] != known.shape or arrays["train"].dtype != np.uint8:
            raise ValueError(f"it has {arrays['train'].dtype} of shape {arrays['train'].shape}")
    except ValueError as error:
        raise ValueError(f"{path} is not {name}: {error}. Delete it to have it made again.") from error
    count = len(arrays["train"])
    return arrays, [f"{count:,} of the {known.images:,} training images"] if count != known.images else []


def _digits():
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    images, labels = np.round(digits.images * 255 / 16).astype(np.uint8), digits.target
    return {"train": images[:1500], "test": images[1500:], "train_labels": labels[:1500], "test_labels": labels[1500:]}


def _download(name: str, folder: Path, url: str | None) -> dict[str, np.ndarray]:
    import pooch

    folder = folder / name
    paths = []
    for file, sha256 in NAMED[name].sha256.items():
        failures = []
        for place in (url,) if url else NAMED[name].homes:
            address = f"{place.rstrip('/')}/{file}"
            try:
                paths.append(Path(pooch.retrieve(address, f"sha256:{sha256}", fname=file, path=folder)))
                break
            except Exception as error:  # whatever the network says; or another file than the known one
                failures.append(f"{address}: {error}")
        else:
            raise OSError(
                f"{name} could not be fetched. Check the network and try again, or put {file} into {folder} by hand. "
                f"({'; '.join(failures)})"
            )
    arrays = _read_cifar(paths[0]) if name == "cifar10" else [_read_idx(path) for path in paths]
    return dict(zip(("x_train", "y_train", "x_test", "y_test"), arrays, strict=True))


def _read_idx(path):
    with gzip.open(path) as file:
        content = file.read()
    shape = np.frombuffer(content, ">i4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def _read_cifar(path):
    with tarfile.open(path) as archive:
        parts = {Path(member.name).name: archive.extractfile(member) for member in archive if member.isfile()}
        contents = {name: part.read() for name, part in parts.items() if part is not None}
    train = b"".join(contents[f"data_batch_{i}.bin"] for i in range(1, 6))
    for rows in (np.frombuffer(part, np.uint8).reshape(-1, 3073) for part in (train, contents["test_batch.bin"])):
        yield np.ascontiguousarray(np.moveaxis(rows[:, 1:].reshape(-1, 3, 32, 32), 1, -1))
        yield rows[:, 0]


def _celeba(side: int, folder: Path) -> dict[str, np.ndarray]:
    """The first CELEBA of the aligned images, their central 140×140 resized."""
    archive, loose = folder / "img_align_celeba.zip", folder / "img_align_celeba"
    if not archive.exists() and not loose.is_dir():
        raise FileNotFoundError(
            f"CelebA's terms do not let it be fetched for you. Ask for it at mmlab.ie.cuhk.edu.hk/projects/CelebA.html "
            f"and put img_align_celeba.zip, or the folder img_align_celeba of its jpgs, into {folder}."
        )

    def read(files):
        opened = {Path(name).name: open_ for name, open_ in files if re.search(r"(^|/)\d{6}\.jpg$", name)}
        images = np.empty((CELEBA, side, side, 3), np.uint8)
        for i, name in enumerate(f"{number:06d}.jpg" for number in range(1, CELEBA + 1)):
            try:
                image = _read(opened[name])
                if image.size != (178, 218):
                    raise ValueError(f"it is {image.height}×{image.width} and not 218×178")
                images[i] = np.asarray(_square(image.convert("RGB"), side, 140))
            except Exception as error:  # missing, or broken in any way
                raise ValueError(
                    f"{folder}: the aligned image {name} of CelebA is missing or broken ({error!r}); its first "
                    f"{CELEBA:,} are needed."
                ) from error
        return {"images": images}

    if not archive.exists():
        return read((path.as_posix(), partial(path.open, "rb")) for path in loose.rglob("*.jpg"))
    with zipfile.ZipFile(archive) as file:
        return read((name, partial(file.open, name)) for name in file.namelist() if "__MACOSX" not in name)
