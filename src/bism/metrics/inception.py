"""The Inception-v3 of December 2015, the one behind the usual FID numbers, up to its 2048 pooled features."""

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Num, UInt8

from ..data import home, save

WEIGHTS = "pt_inception-2015-12-05-6726825d.pth"
URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{WEIGHTS}"
HOW = f"\nFetch {URL} and run bism.metrics.inception.convert('{WEIGHTS}') once, where torch is installed."

# A line is a branch, from the block's input; the branches' outputs are concatenated. A step is a pool or a convolution,
# "our name=pytorch-fid's, kernel, channels", with stride 1 and zeros around, or "valid", or "halve" (valid, stride 2).
# A layer that two branches share is written twice, and computed once.
STEM = """\
conv=Conv2d_1a_3x3 3x3 32 halve > conv_1=Conv2d_2a_3x3 3x3 32 valid > conv_2=Conv2d_2b_3x3 3x3 64 > halve > \
conv_3=Conv2d_3b_1x1 1x1 80 > conv_4=Conv2d_4a_3x3 3x3 192 valid > halve"""
A = """\
conv=branch1x1 1x1 64
tower.conv=branch5x5_1 1x1 48 > tower.conv_1=branch5x5_2 5x5 64
tower_1.conv=branch3x3dbl_1 1x1 64 > tower_1.conv_1=branch3x3dbl_2 3x3 96 > tower_1.conv_2=branch3x3dbl_3 3x3 96
average > tower_2.conv=branch_pool 1x1 {}"""
B = """\
conv=branch3x3 3x3 384 halve
tower.conv=branch3x3dbl_1 1x1 64 > tower.conv_1=branch3x3dbl_2 3x3 96 > tower.conv_2=branch3x3dbl_3 3x3 96 halve
halve"""
C = """\
conv=branch1x1 1x1 192
tower.conv=branch7x7_1 1x1 {0} > tower.conv_1=branch7x7_2 1x7 {0} > tower.conv_2=branch7x7_3 7x1 192
tower_1.conv=branch7x7dbl_1 1x1 {0} > tower_1.conv_1=branch7x7dbl_2 7x1 {0} > tower_1.conv_2=branch7x7dbl_3 1x7 {0} > \
tower_1.conv_3=branch7x7dbl_4 7x1 {0} > tower_1.conv_4=branch7x7dbl_5 1x7 192
average > tower_2.conv=branch_pool 1x1 192"""
D = """\
tower.conv=branch3x3_1 1x1 192 > tower.conv_1=branch3x3_2 3x3 320 halve
tower_1.conv=branch7x7x3_1 1x1 192 > tower_1.conv_1=branch7x7x3_2 1x7 192 > tower_1.conv_2=branch7x7x3_3 7x1 192 > \
tower_1.conv_3=branch7x7x3_4 3x3 192 halve
halve"""
E = """\
conv=branch1x1 1x1 320
tower_conv=branch3x3_1 1x1 384 > tower_mixed_conv=branch3x3_2a 1x3 384
tower_conv=branch3x3_1 1x1 384 > tower_mixed_conv_1=branch3x3_2b 3x1 384
tower_1_conv=branch3x3dbl_1 1x1 448 > tower_1_conv_1=branch3x3dbl_2 3x3 384 > \
tower_1_mixed_conv=branch3x3dbl_3a 1x3 384
tower_1_conv=branch3x3dbl_1 1x1 448 > tower_1_conv_1=branch3x3dbl_2 3x3 384 > \
tower_1_mixed_conv_1=branch3x3dbl_3b 3x1 384
{} > tower_2_conv=branch_pool 1x1 192"""
BLOCKS = (
    ("", "", STEM),
    ("mixed.", "Mixed_5b.", A.format(32)),
    ("mixed_1.", "Mixed_5c.", A.format(64)),
    ("mixed_2.", "Mixed_5d.", A.format(64)),
    ("mixed_3.", "Mixed_6a.", B),
    ("mixed_4.", "Mixed_6b.", C.format(128)),
    ("mixed_5.", "Mixed_6c.", C.format(160)),
    ("mixed_6.", "Mixed_6d.", C.format(160)),
    ("mixed_7.", "Mixed_6e.", C.format(192)),
    ("mixed_8.", "Mixed_7a.", D),
    ("mixed_9.", "Mixed_7b.", E.format("average")),
    ("mixed_10.", "Mixed_7c.", E.format("maximum")),
)


class Conv(NamedTuple):
    name: str
    torch: str
    shape: tuple[int, int, int, int]  # of the kernel: output, input, height, width
    how: str = ""


def _blocks() -> Iterator[list[list[Conv | str]]]:
    inputs = 3
    for ours, theirs, text in BLOCKS:
        block, outputs = [], 0
        for line in text.splitlines():
            branch, channels = [], inputs
            for step in line.split(" > "):
                if "=" in step:
                    names, size, out, *how = step.split()
                    name, torch = names.split("=")
                    height, width = map(int, size.split("x"))
                    step = Conv(ours + name, theirs + torch, (int(out), channels, height, width), *how)
                    channels = int(out)
                branch.append(step)
            block.append(branch)
            outputs += channels
        inputs = outputs
        yield block


NETWORK = list(_blocks())
CONVS = {step.name: step for block in NETWORK for branch in block for step in branch if isinstance(step, Conv)}
Layers = dict[str, tuple[Float32[Array, "height width input output"], Float32[Array, "1 1 1 output"]]]


class Inception(NamedTuple):
    layers: Layers  # kernel and shift of each convolution and its batch norm together
    path: Path
    sha256: str  # of the tensors there


def load(path: str | Path | None = None) -> Inception:
    """The network in `path`, by default fid_inception_v3.npz in the folder BISM_DATA or ~/.cache/bism."""
    path = _path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file, and FID needs the weights of Inception-v3.{HOW}")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            tensors = {name: arrays[name] for name in arrays}
    except Exception as error:  # a broken file raises whatever its reader stumbles on
        raise ValueError(f"{path} cannot be read: {error}.{HOW}") from error
    parts = "weight", "beta", "mean", "var"
    layers = {name: _fold(*_take(tensors, name, parts, conv.shape, path)) for name, conv in CONVS.items()}
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + tensor.tobytes())
    return Inception(layers, path, digest.hexdigest())


def _path(path):
    return Path(path or home() / "fid_inception_v3.npz")


def _take(tensors, layer, parts, shape, source):
    """A layer's tensors, the first of them its kernel."""
    found = [tensors.get(f"{layer}.{part}") for part in parts]
    for part, tensor, wanted in zip(parts, found, (shape, *4 * [shape[:1]]), strict=False):
        told = "is missing" if tensor is None else f"is of shape {tensor.shape}, not {wanted}"
        if tensor is None or tensor.shape != wanted:
            raise ValueError(f"{source} is not FID's Inception-v3: {layer}.{part} {told}.{HOW}")
    return found


def _fold(weight, beta, mean, var):
    """Kernel and shift of y = (conv(x, weight) - mean) / sqrt(var + 0.001) + beta."""
    scale = 1 / np.sqrt(var.astype(np.float64) + 0.001)
    kernel, shift = weight.transpose(2, 3, 1, 0) * scale, beta - mean * scale
    return jnp.asarray(kernel, jnp.float32), jnp.asarray(shift.reshape(1, 1, 1, -1), jnp.float32)


def convert(weights: str | Path, out: str | Path | None = None) -> Path:
    """pytorch-fid's weights as the file that `load` reads, by default where it looks for it."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("Reading a .pth needs torch: pip install torch, here or where you convert.") from error
    state = torch.load(weights, map_location="cpu", weights_only=True)
    save(_path(out), from_torch({name: np.asarray(tensor) for name, tensor in state.items()}))
    return _path(out)


def from_torch(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """pytorch-fid's state dict under our names; the scale of a batch norm goes into the kernel and the mean."""
    parts, tensors = ("conv.weight", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"), {}
    for name, conv in CONVS.items():
        weight, scale, beta, mean, var = _take(state, conv.torch, parts, conv.shape, "The state dict")
        scaled = {"weight": weight * scale.reshape(-1, 1, 1, 1), "beta": beta, "mean": mean * scale, "var": var}
        tensors |= {f"{name}.{part}": tensor for part, tensor in scaled.items()}
    return tensors


def features(
    images: Num[Any, "count channels height width"], network: Inception, batch_size: int = 250
) -> Float32[np.ndarray, "count 2048"]:
    """The pooled features of bytes, or of floats in [0, 1], which are rounded to bytes as saved images are."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    images = as_bytes(images)
    size, found = min(batch_size, len(images)), []
    for start in range(0, len(images), size):
        batch = images[start : start + size]
        found.append(_pooled(network.layers, np.pad(batch, ((0, size - len(batch)), (0, 0), (0, 0), (0, 0)))))
    return np.concatenate([np.asarray(rows) for rows in found])[: len(images)]


def as_bytes(images: Any) -> UInt8[np.ndarray, "count channels height width"]:
    images = np.asarray(images)
    if images.ndim != 4 or images.shape[1] not in (1, 3) or images.size == 0:
        raise ValueError(f"images must be of shape (count, 1 or 3, height, width); they are of {images.shape}.")
    if images.dtype == np.uint8:
        return images
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise TypeError(f"images are of type {images.dtype}; they must be uint8, or floats in [0, 1].")
    low, high = images.min(), images.max()
    if not (low >= 0 and high <= 1):  # or NaN
        raise ValueError(f"images have values from {low:.4g} to {high:.4g}; floats must lie in [0, 1]. Clip them?")
    return np.round(images.astype(np.float32) * 255).astype(np.uint8)


@jax.jit
def _pooled(layers: Layers, images: UInt8[Array, "batch channels height width"]) -> Float32[Array, "batch 2048"]:
    x = (images.astype(jnp.float32) - 128) / 128
    rows, columns = (_interpolation(count) for count in images.shape[2:])
    x = jnp.einsum("nchw,ih,jw->nijc", x, rows, columns, precision="highest")
    x = jnp.broadcast_to(x, (*x.shape[:3], 3))
    for block in NETWORK:
        x = jnp.concatenate([reduce(partial(_apply, layers), branch, x) for branch in block], -1)
    return x.mean((1, 2))


def _interpolation(count: int) -> Float32[np.ndarray, "299 count"]:
    """Bilinear as pytorch-fid's: corners not aligned, no antialiasing. The scale of pixels is TensorFlow's, above."""
    position = np.clip((np.arange(299) + 0.5) * count / 299 - 0.5, 0, count - 1)
    return np.maximum(1 - np.abs(position[:, None] - np.arange(count)[None]), 0).astype(np.float32)


def _apply(layers, x, step):
    if isinstance(step, str):
        return POOLS[step](x)
    kernel, shift = layers[step.name]
    stride, padding = 2 if step.how == "halve" else 1, "VALID" if step.how else "SAME"
    axes = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=axes, precision="highest")
    return jax.nn.relu(x + shift)


def _pool(x, initial, reducer, stride=1, padding="SAME"):
    return lax.reduce_window(x, np.float32(initial), reducer, (1, 3, 3, 1), (1, stride, stride, 1), padding)


POOLS = {
    "halve": lambda x: _pool(x, -np.inf, lax.max, 2, "VALID"),
    "maximum": lambda x: _pool(x, -np.inf, lax.max),
    # Over the positions inside the image: the padding is not counted.
    "average": lambda x: _pool(x, 0, lax.add) / _pool(jnp.ones_like(x[:1, :, :, :1]), 0, lax.add),
}
