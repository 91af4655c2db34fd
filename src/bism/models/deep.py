"""Energies of images: the residual networks of the paper, with and without latent variables, and their posterior.

One image is (channels, height, width) with values in [0, 1]. With `dtype="bfloat16"` the convolutions are computed in
16 bits; the parameters and gradients are stored, and the dense layers computed, in the precision of v.
"""

import itertools
from collections.abc import Sequence
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ..energy import EBLVM, EBM
from ..posterior import GaussianPosterior

Image = Float[Array, "channels height width"]
Shape = tuple[int, int, int]
Precision = Literal["bfloat16"] | None  # not float16, whose range ends at 65504: an energy's gradients go beyond


def convolve(layer: eqx.nn.Conv2d, x: Image, *, pool: bool = False) -> Image:
    """The layer in the precision of x; with `pool`, the layer and the 2×2 average pooling after it."""
    kernel, stride = layer.weight, layer.stride
    if pool:
        # The pooled outputs are those of the mean of the kernel's four shifts, at 1/2.25 of the operations.
        kernel, stride = jnp.pad(kernel, ((0, 0), (0, 0), (1, 1), (1, 1))), (2, 2)
        kernel = kernel[..., 1:, :] + kernel[..., :-1, :]
        kernel = (kernel[..., 1:] + kernel[..., :-1]) / 4
    kernel = kernel.astype(x.dtype)
    if jax.default_backend() == "cpu":
        y = convolve_by_product(x, kernel, stride, layer.padding)
    else:
        y = jax.lax.conv_general_dilated(x[None], kernel, stride, layer.padding)[0]
    return y if layer.bias is None else y + layer.bias.astype(x.dtype)


def convolve_by_product(x: Image, kernel: Float[Array, "out in kh kw"], stride, padding) -> Image:
    """The convolution as one matrix product: on a CPU, XLA computes the gradients of others in plain loops."""
    x = jnp.pad(x, ((0, 0), *padding))
    starts = itertools.product(*map(range, kernel.shape[2:]))
    ends = [size - k + 1 for size, k in zip(x.shape[1:], kernel.shape[2:], strict=True)]
    shifts = [x[:, i : i + ends[0] : stride[0], j : j + ends[1] : stride[1]] for i, j in starts]
    return jnp.einsum("ckhw,ock->ohw", jnp.stack(shifts, 1), kernel.reshape(*kernel.shape[:2], -1))


def average_pool(x: Image) -> Image:
    channels, height, width = x.shape
    return x.reshape(channels, height // 2, 2, width // 2, 2).mean((2, 4))


class Block(eqx.Module):
    """x ↦ conv(ELU(conv(ELU(x)))) + shortcut(x), both halved in height and width where `down`."""

    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    shortcut: eqx.nn.Conv2d
    down: bool = eqx.field(static=True)

    def __init__(self, channels: int, out_channels: int, *, down: bool, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.conv1 = eqx.nn.Conv2d(channels, channels, 3, padding=1, use_bias=False, key=keys[0])
        self.conv2 = eqx.nn.Conv2d(channels, out_channels, 3, padding=1, key=keys[1])
        self.shortcut = eqx.nn.Conv2d(channels, out_channels, 1, key=keys[2])
        self.down = down

    def __call__(self, x: Image) -> Image:
        y = convolve(self.conv1, jax.nn.elu(x))
        y = convolve(self.conv2, jax.nn.elu(y), pool=self.down)
        return y + convolve(self.shortcut, average_pool(x) if self.down else x)


class ResidualNet(eqx.Module):
    """v ↦ its features, (height/8)(width/8) · 8 `width` of them: three stages of `blocks` blocks, no normalisation."""

    stem: eqx.nn.Conv2d
    blocks: tuple[Block, ...]
    shape: Shape = eqx.field(static=True)
    dtype: Precision = eqx.field(static=True)

    def __init__(self, shape: Shape, *, width: int, blocks: int, dtype: Precision = None, key: PRNGKeyArray):
        self.shape, self.dtype = _check_shape("ResidualNet", shape), _check_dtype("ResidualNet", dtype)
        _check_sizes("ResidualNet", width=width, blocks=blocks)
        if shape[1] % 8 or shape[2] % 8:
            raise ValueError(
                f"ResidualNet halves an image three times, so height and width must be divisible by 8, not "
                f"{shape[1]}×{shape[2]}: pad the images to {shape[1] + -shape[1] % 8}×{shape[2] + -shape[2] % 8}."
            )
        stem_key, *keys = jax.random.split(key, 1 + 3 * blocks)
        self.stem = eqx.nn.Conv2d(shape[0], width, 3, padding=1, key=stem_key)
        outs = [width * 2 ** (1 + i // blocks) for i in range(3 * blocks)]
        ins = [width, *outs[:-1]]
        self.blocks = tuple(
            Block(a, b, down=i % blocks == 0, key=k) for i, (a, b, k) in enumerate(zip(ins, outs, keys, strict=True))
        )

    @property
    def units(self) -> int:
        return self.shape[1] * self.shape[2] // 64

    @property
    def size(self) -> int:
        return self.units * self.blocks[-1].conv2.out_channels

    def __call__(self, v: Image) -> Float[Array, " features"]:
        _check_image("ResidualNet", self.shape, v)
        x = convolve(self.stem, v.astype(self.dtype or v.dtype))
        for block in self.blocks:
            x = block(x)
        return x.ravel().astype(v.dtype)


class SquareHead(eqx.Module):
    """x ↦ ‖ELU(Ax + a)‖²."""  # g₃

    linear: eqx.nn.Linear

    def __init__(self, size: int, net: ResidualNet, *, key: PRNGKeyArray):
        self.linear = eqx.nn.Linear(size, net.size // 2, key=key)

    def __call__(self, x: Float[Array, " size"]) -> Float[Array, ""]:
        return jnp.sum(jax.nn.elu(self.linear(x)) ** 2)


class ResNetEnergy(EBLVM):
    """E(v, h) = g₃(g₂(g₁(v), h)): g₁ a residual network, g₂ = concat[g₁(v) + h, h], g₃ = ‖ELU(linear)‖².

    The paper's: width 64 with 2 blocks a stage (12 layers) on MNIST; width 128 with 3 (18) on CIFAR-10, 4 (24) on
    CelebA of 64×64.
    """

    net: ResidualNet
    to_h: eqx.nn.Linear
    head: SquareHead

    def __init__(
        self, shape: Shape, h_dim: int, *, width: int = 64, blocks: int = 2, dtype: Precision = None, key: PRNGKeyArray
    ):
        _check_sizes("ResNetEnergy", h_dim=h_dim)
        net_key, h_key, head_key = jax.random.split(key, 3)
        self.net = ResidualNet(shape, width=width, blocks=blocks, dtype=dtype, key=net_key)
        self.to_h = eqx.nn.Linear(self.net.size, h_dim, key=h_key)
        self.head = SquareHead(2 * h_dim, self.net, key=head_key)

    def encode(self, v: Image) -> Float[Array, " h"]:
        return self.to_h(self.net(v))  # g₁

    def energy(self, v, h):
        return self.given(v)(h)

    def given(self, v):
        code = self.encode(v)
        return lambda h: self.head(jnp.concatenate([code + h, h]))  # g₃ ∘ g₂


class ResNetFreeEnergy(EBM):
    """F(v) = ‖ELU(linear(features of v))‖²: the fully visible companion."""

    net: ResidualNet
    head: SquareHead

    def __init__(self, shape: Shape, *, width: int = 64, blocks: int = 2, dtype: Precision = None, key: PRNGKeyArray):
        net_key, head_key = jax.random.split(key)
        self.net = ResidualNet(shape, width=width, blocks=blocks, dtype=dtype, key=net_key)
        self.head = SquareHead(self.net.size, self.net, key=head_key)

    def free_energy(self, v):
        return self.head(self.net(v))


class ConvPosteriorNet(eqx.Module):
    """v ↦ (mean, log_std) of h: convolutions of stride 2, then one linear layer for each of the two."""

    convs: tuple[eqx.nn.Conv2d, ...]
    mean: eqx.nn.Linear
    log_std: eqx.nn.Linear
    shape: Shape = eqx.field(static=True)
    dtype: Precision = eqx.field(static=True)

    def __init__(
        self,
        shape: Shape,
        h_dim: int,
        *,
        widths: Sequence[int] = (64, 128, 256),
        dtype: Precision = None,
        key: PRNGKeyArray,
    ):
        self.shape, self.dtype = _check_shape("conv_posterior", shape), _check_dtype("conv_posterior", dtype)
        _check_sizes("conv_posterior", h_dim=h_dim, widths=min(widths, default=0))
        mean_key, log_std_key, *keys = jax.random.split(key, 2 + len(widths))
        ins = [shape[0], *widths[:-1]]
        self.convs = tuple(
            eqx.nn.Conv2d(a, b, 3, stride=2, padding=1, key=k) for a, b, k in zip(ins, widths, keys, strict=True)
        )
        shrink = 2 ** len(widths)
        size = widths[-1] * -(-shape[1] // shrink) * -(-shape[2] // shrink)
        self.mean = eqx.nn.Linear(size, h_dim, key=mean_key)
        self.log_std = eqx.nn.Linear(size, h_dim, key=log_std_key)

    def __call__(self, v: Image) -> tuple[Float[Array, " h"], Float[Array, " h"]]:
        _check_image("conv_posterior", self.shape, v)
        x = v.astype(self.dtype or v.dtype)
        for conv in self.convs:
            x = jax.nn.leaky_relu(convolve(conv, x), 0.2)
        x = x.ravel().astype(v.dtype)
        return self.mean(x), self.log_std(x)


def conv_posterior(
    shape: Shape,
    h_dim: int,
    *,
    widths: Sequence[int] = (64, 128, 256),
    dtype: Precision = None,
    key: PRNGKeyArray,
) -> GaussianPosterior:
    """The paper's posterior of an image: Gaussian, by a small convolutional network."""
    return GaussianPosterior(ConvPosteriorNet(shape, h_dim, widths=widths, dtype=dtype, key=key))


def _check_shape(name, shape) -> Shape:
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"{name}: shape must be the (channels, height, width) of one image, got {tuple(shape)}.")
    channels, height, width = map(int, shape)
    return channels, height, width


def _check_sizes(name, **sizes):
    for size, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}: {size} must be at least 1, got {value}.")


def _check_dtype(name, dtype) -> Precision:
    if dtype not in (None, "bfloat16"):
        raise ValueError(f"{name}: dtype must be None, for the precision of v, or 'bfloat16', got {dtype!r}.")
    return dtype


def _check_image(name, shape, v):
    if v.shape != shape:
        raise ValueError(f"{name} was made for one image of shape {shape}, and was given {v.shape}.")
