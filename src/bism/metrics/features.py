"""What features are worth: a linear probe, t-SNE; and whether samples are copies of training images."""

import warnings
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Num

BLOCK = 2048  # images at a time
NEEDED = "This needs scikit-learn: pip install 'bism[images]'."


class Accuracy(NamedTuple):
    percent: float
    converged: bool


class Nearest(NamedTuple):
    indices: Int[np.ndarray, "count k"]  # nearest first
    distances: Float[np.ndarray, "count k"]


def linear_svm(
    train: Num[Any, "count ..."],
    train_labels: Num[Any, "count"],
    test: Num[Any, "other ..."],
    test_labels: Num[Any, "other"],
) -> Accuracy:
    """Test accuracy of scikit-learn's LinearSVC with its defaults, and whether its solver converged."""
    try:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.svm import LinearSVC
    except ImportError as error:
        raise ImportError(NEEDED) from error
    svm = LinearSVC(random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # it is part of the answer
        svm.fit(_rows(train, "train"), np.asarray(train_labels))
    percent = 100 * float(svm.score(_rows(test, "test"), np.asarray(test_labels)))
    return Accuracy(percent, bool(svm.n_iter_ < svm.max_iter))


def tsne(features: Num[Any, "count ..."], random_state: int = 0) -> Float[np.ndarray, "count 2"]:
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise ImportError(NEEDED) from error
    return TSNE(2, random_state=random_state).fit_transform(_rows(features, "features"))


def nearest(samples: Num[Any, "count ..."], train: Num[Any, "other ..."], k: int = 1) -> Nearest:
    """The k training images nearest to each sample, by Euclidean distance of pixels in the images' own units."""
    samples, train = np.asarray(samples), np.asarray(train)
    if samples.shape[1:] != train.shape[1:]:
        raise ValueError(f"samples are of shape {samples.shape[1:]} each and training images of {train.shape[1:]}.")
    if np.issubdtype(samples.dtype, np.integer) != np.issubdtype(train.dtype, np.integer):
        raise TypeError(f"samples are {samples.dtype} and training images {train.dtype}: divide the bytes by 255.")
    samples, train = _rows(samples, "samples"), _rows(train, "training images")
    if not 1 <= k <= len(train):
        raise ValueError(f"k must be between 1 and {len(train)}, the number of training images; got {k}.")
    found = [_nearest(samples[start : start + BLOCK], train, k) for start in range(0, len(samples), BLOCK)]
    return Nearest(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def _nearest(samples, train, k):
    samples = samples.astype(np.float64)
    indices, scores = np.empty((len(samples), 0), int), np.empty((len(samples), 0))
    for start in range(0, len(train), BLOCK):
        block = train[start : start + BLOCK].astype(np.float64)
        there = np.broadcast_to(np.arange(start, start + len(block))[None], (len(samples), len(block)))
        indices = np.concatenate([indices, there], 1)
        scores = np.concatenate([scores, np.sum(block**2, 1)[None] - 2 * samples @ block.T], 1)
        best = np.argpartition(scores, min(k, scores.shape[1]) - 1, 1)[:, :k]
        indices, scores = (np.take_along_axis(x, best, 1) for x in (indices, scores))
    # From the differences, so that the distance of a copy is 0 and not a rounding error.
    distances = np.stack([np.linalg.norm(samples - train[column], axis=1) for column in indices.T], 1)
    order = np.lexsort((indices, distances), 1)
    return tuple(np.take_along_axis(x, order, 1) for x in (indices, distances))


def _rows(x, name):
    x = np.asarray(x)
    if x.ndim < 2 or x.size == 0:
        raise ValueError(f"{name} must have one example a row, shape (count, ...); of shape {x.shape} they have none.")
    x = x.reshape(len(x), -1)
    if not np.isfinite(x).all():
        raise ValueError(f"{name} have NaN or infinite values, first in row {int(np.argmin(np.isfinite(x).all(1)))}.")
    return x
