"""The Fréchet inception distance between two sets of images (Heusel et al., 2017)."""

import hashlib
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Num

from ..data import save
from .inception import Inception, as_bytes, features


@dataclass(frozen=True, eq=False)
class Statistics:
    mean: Float[np.ndarray, "features"]
    covariance: Float[np.ndarray, "features features"]
    count: int


def fid(
    images: Num[Any, "count channels height width"],
    reference: Num[Any, "other channels height width"],
    network: Inception,
    batch_size: int = 250,
) -> float:
    """Of `images` from `reference`, whose statistics are kept on disk, beside the network.

    Few images score worse: compare only figures of the same count; 50,000 is usual.
    """
    found = statistics(features(images, network, batch_size))
    return frechet(found, reference_statistics(reference, network, batch_size))


def statistics(features: Float[Any, "count features"]) -> Statistics:
    x = np.array(features, np.float64)
    if x.ndim != 2 or len(x) < 2:
        raise ValueError(f"A covariance needs two rows of features or more; these are of shape {x.shape}.")
    if not np.isfinite(x).all():
        raise ValueError("The features have NaN or infinite values.")
    mean = x.mean(0)
    x -= mean
    return Statistics(mean, x.T @ x / (len(x) - 1), len(x))


def frechet(a: Statistics, b: Statistics) -> float:
    """|mₐ - m_b|² + tr Cₐ + tr C_b - 2 tr (Cₐ C_b)^½ between the Gaussians of these means and covariances."""
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"These are statistics of {len(a.mean)} and {len(b.mean)} features.")
    # With C = R Rᵀ, tr (Cₐ C_b)^½ is the sum of the singular values of Rₐᵀ R_b: no root is taken of a rounding error.
    root = np.linalg.svd(_root(a.covariance).T @ _root(b.covariance), compute_uv=False).sum()
    traces = np.trace(a.covariance) + np.trace(b.covariance)
    return max(0.0, float(np.sum((a.mean - b.mean) ** 2) + traces - 2 * root))


def _root(covariance):
    values, vectors = np.linalg.eigh(covariance)
    null = values <= len(values) * np.finfo(float).eps * values[-1]
    return vectors * np.sqrt(np.where(null, 0, values))[None]


def reference_statistics(
    images: Num[Any, "count channels height width"], network: Inception, batch_size: int = 250
) -> Statistics:
    """The statistics of these images' features, computed once."""
    images = as_bytes(images)
    digest = hashlib.sha256(f"{network.sha256} {images.shape}".encode())
    digest.update(np.ascontiguousarray(images).data)
    path = network.path.with_name(f"fid-statistics-{digest.hexdigest()[:32]}.npz")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            kept = Statistics(arrays["mean"], arrays["covariance"], int(arrays["count"]))
            if kept.count == len(images) and kept.covariance.shape == 2 * kept.mean.shape:
                return kept
    except Exception:  # not there, or broken in whatever way: made again
        pass
    found = statistics(features(images, network, batch_size))
    try:
        save(path, vars(found))
    except OSError as error:
        warnings.warn(f"The statistics of the reference could not be kept in {path.parent}: {error}.", stacklevel=2)
    return found
