"""Features and distances have their known values; the cache never answers with another's; every bad input is told."""

import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from bism.data import save
from bism.metrics import features as probes, fid as module, inception
from bism.metrics.fid import Statistics, fid, frechet, reference_statistics, statistics
from bism.metrics.inception import CONVS, POOLS, as_bytes, convert, from_torch, load

RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (6, 3, 4, 5), np.uint8)


# The network.


@pytest.fixture(scope="session")
def network(real_data):
    if not (real_data / "fid_inception_v3.npz").exists():
        pytest.skip("no fid_inception_v3.npz in BISM_DATA")
    return load()


def test_known_features(network, golden):
    known = golden("inception_check")
    images, expected = np.moveaxis(known["images"], -1, 1)[:5], known["features_f16_weights"][:5]
    if not network.sha256.startswith("bb36ec65"):  # not the weights that were rounded to float16
        expected = known["features"][:5]
    found = inception.features(images, network, batch_size=3)  # the second batch is filled up
    assert (found.shape, found.dtype) == ((5, 2048), np.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5)
    as_floats = inception.features(jnp.asarray(images[:3] / 255), network, batch_size=3)
    np.testing.assert_array_equal(as_floats, found[:3])


def test_grey_is_three_equal_channels(network):
    grey = RNG.integers(0, 256, (1, 1, 28, 20), np.uint8)
    single, triple = (inception.features(x, network) for x in (grey, grey.repeat(3, 1)))
    np.testing.assert_allclose(single, triple, rtol=0, atol=1e-5)
    assert triple.std() > 0.1


@pytest.mark.parametrize("count", [1, 20, 32, 299, 400])
def test_interpolation(count):
    expected = np.zeros((299, count))
    for i in range(299):
        source = min(max((i + 0.5) * count / 299 - 0.5, 0), count - 1)
        below = int(source)
        expected[i, below] += 1 - (source - below)
        expected[i, min(below + 1, count - 1)] += source - below
    found = inception._interpolation(count)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    x = jnp.asarray(RNG.normal(size=count))
    resized = jax.image.resize(x, (299,), "bilinear", antialias=False)
    np.testing.assert_allclose(found @ np.asarray(x), resized, rtol=0, atol=1e-4)


def test_pools():
    x = RNG.normal(size=(2, 6, 7, 3)).astype(np.float32) - 9  # all negative: zeros around would show
    windows = np.full((3, 3, 2, 6, 7, 3), np.nan)
    for i in range(3):
        for j in range(3):
            shifted = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=np.nan)
            windows[i, j] = shifted[:, i : i + 6, j : j + 7]
    halved = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (1, 2)).max((-1, -2))[:, ::2, ::2]
    expected = {"average": np.nanmean(windows, (0, 1)), "maximum": np.nanmax(windows, (0, 1)), "halve": halved}
    assert set(expected) == set(POOLS)
    for name, values in expected.items():
        found = POOLS[name](jnp.asarray(x))
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, values, rtol=1e-6)


def test_bytes():
    np.testing.assert_array_equal(as_bytes(COLOUR), COLOUR)
    np.testing.assert_array_equal(as_bytes(COLOUR / 255), COLOUR)
    np.testing.assert_array_equal(as_bytes(jnp.asarray(COLOUR, jnp.float32) / 255), COLOUR)
    values = np.array([0, 0.001, 0.002, 0.499, 0.998, 1.0]).reshape(1, 1, 2, 3)
    np.testing.assert_array_equal(as_bytes(values).ravel(), [0, 0, 1, 127, 254, 255])
    np.testing.assert_array_equal(as_bytes(jnp.ones((1, 1, 2, 2), jnp.bfloat16)), 255)


@pytest.mark.parametrize(
    ("images", "kind", "reason"),
    [
        (COLOUR[0], ValueError, r"shape \(count, 1 or 3, height, width\); they are of \(3, 4, 5\)"),
        (np.moveaxis(COLOUR, 1, -1), ValueError, r"they are of \(6, 4, 5, 3\)"),
        (COLOUR[:0], ValueError, r"they are of \(0, 3, 4, 5\)"),
        (COLOUR.astype(int), TypeError, "of type int64; they must be uint8, or floats"),
        (COLOUR.astype(float), ValueError, r"from 0 to 255; floats must lie in \[0, 1\]"),
        (COLOUR / 255 - 0.1, ValueError, r"from -0\.1 to 0\.9; floats"),
        (np.full((2, 1, 3, 3), np.nan), ValueError, "from nan to nan"),
    ],
)
def test_refused_images(images, kind, reason):
    with pytest.raises(kind, match=reason):
        as_bytes(images)
    with pytest.raises(kind, match=reason):
        fid(images, COLOUR, fake_network("/nowhere"))


def test_refused_batch_size():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        inception.features(COLOUR, fake_network("/nowhere"), batch_size=0)


# Its weights.

PAIRS = """
conv Conv2d_1a_3x3
conv_1 Conv2d_2a_3x3
conv_2 Conv2d_2b_3x3
conv_3 Conv2d_3b_1x1
conv_4 Conv2d_4a_3x3
mixed.conv Mixed_5b.branch1x1
mixed.tower.conv_1 Mixed_5b.branch5x5_2
mixed_1.tower_1.conv_2 Mixed_5c.branch3x3dbl_3
mixed_2.tower_2.conv Mixed_5d.branch_pool
mixed_3.conv Mixed_6a.branch3x3
mixed_3.tower.conv_2 Mixed_6a.branch3x3dbl_3
mixed_4.tower.conv_1 Mixed_6b.branch7x7_2
mixed_5.tower_1.conv Mixed_6c.branch7x7dbl_1
mixed_6.tower_1.conv_4 Mixed_6d.branch7x7dbl_5
mixed_7.tower_2.conv Mixed_6e.branch_pool
mixed_8.tower.conv_1 Mixed_7a.branch3x3_2
mixed_8.tower_1.conv_3 Mixed_7a.branch7x7x3_4
mixed_9.tower_conv Mixed_7b.branch3x3_1
mixed_9.tower_mixed_conv Mixed_7b.branch3x3_2a
mixed_9.tower_mixed_conv_1 Mixed_7b.branch3x3_2b
mixed_10.tower_1_conv_1 Mixed_7c.branch3x3dbl_2
mixed_10.tower_1_mixed_conv Mixed_7c.branch3x3dbl_3a
mixed_10.tower_1_mixed_conv_1 Mixed_7c.branch3x3dbl_3b
mixed_10.tower_2_conv Mixed_7c.branch_pool
"""


@pytest.fixture(scope="module")
def state():
    """As pytorch-fid's state dict, each tensor filled with a number of its own; and what a network has beyond ours."""
    parts = "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"
    found = {"fc.weight": np.zeros((1008, 2048)), "Conv2d_1a_3x3.bn.num_batches_tracked": np.array(0)}
    for i, conv in enumerate(CONVS.values()):
        found[f"{conv.torch}.conv.weight"] = np.full(conv.shape, i + 1, np.float32)
        for j, part in enumerate(parts):
            found[f"{conv.torch}.{part}"] = np.full(conv.shape[0], 100 * j + i + 2, np.float32)
    return found


def test_names_of_pytorch_fid(state):
    found = from_torch(state)
    assert len(found) == 376
    assert len({tensor.flat[0] for name, tensor in found.items() if name.endswith("beta")}) == 94
    assert sum(tensor.size for name, tensor in found.items() if name.endswith("weight")) == 21_751_136
    for ours, theirs in (line.split() for line in PAIRS.split("\n") if line):
        scale = state[f"{theirs}.bn.weight"].flat[0]
        for part, tensor, factor in (
            ("weight", "conv.weight", scale),
            ("beta", "bn.bias", 1),
            ("mean", "bn.running_mean", scale),
            ("var", "bn.running_var", 1),
        ):
            np.testing.assert_array_equal(found[f"{ours}.{part}"], state[f"{theirs}.{tensor}"] * factor)


def test_convert_and_load(state, tmp_path, monkeypatch):
    weights = tmp_path / "weights.pth"

    def load_state(path, map_location, weights_only):
        assert (path, map_location, weights_only) == (weights, "cpu", True)
        return state

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(load=load_state))
    monkeypatch.setenv("BISM_DATA", str(tmp_path / "data"))
    assert convert(weights) == tmp_path / "data" / "fid_inception_v3.npz"
    network = load()
    kernel, shift = network.layers["mixed_4.tower.conv_1"]
    assert (kernel.shape, shift.shape) == ((1, 7, 128, 128), (1, 1, 1, 128))
    assert kernel.dtype == shift.dtype == jnp.float32
    i = list(CONVS).index("mixed_4.tower.conv_1")
    weight, scale, beta, mean, var = i + 1, i + 2, i + 102, i + 202, i + 302  # and their batch norm:
    for x in (0.0, 1.0):
        expected = (x * weight - mean) * scale / np.sqrt(var + 0.001) + beta
        np.testing.assert_allclose(x * kernel[0, 0, 0, 0] + shift[0, 0, 0, 0], expected, rtol=1e-6)


def test_refused_state_dicts(state):
    with pytest.raises(
        ValueError, match=r"state dict is not .*: Mixed_7c.branch_pool.bn.running_var is missing.\nFetch https"
    ):
        from_torch({name: x for name, x in state.items() if name != "Mixed_7c.branch_pool.bn.running_var"})
    torchvision = state | {"Mixed_5b.branch_pool.conv.weight": np.zeros((64, 192, 1, 1))}
    with pytest.raises(
        ValueError, match=r"Mixed_5b.branch_pool.conv.weight is of shape \(64, 192, 1, 1\), not \(32, 192, 1"
    ):
        from_torch(torchvision)


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="needs torch: pip install torch"):
        convert("weights.pth")


def test_refused_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("BISM_DATA", str(tmp_path))
    path = tmp_path / "fid_inception_v3.npz"
    told = (
        r"\nFetch https://github.com/mseitzer/pytorch-fid/releases/.*-6726825d.pth and run bism.metrics.inception.conv"
    )
    with pytest.raises(FileNotFoundError, match=f"{path}: no such file, and FID needs the weights.*{told}"):
        load()
    path.write_bytes(b"half")
    with pytest.raises(ValueError, match=f"{path} cannot be read: .*{told}"):
        load()
    save(path, {"conv.weight": np.zeros((32, 3, 3, 3))})
    with pytest.raises(ValueError, match=f"{path} is not FID's Inception-v3: conv.beta is missing.{told}"):
        load()
    save(path, {"conv.weight": np.zeros((32, 3, 3, 5))})
    with pytest.raises(ValueError, match=rf"conv.weight is of shape \(32, 3, 3, 5\), not \(32, 3, 3, 3\).{told}"):
        load(str(path))
    with pytest.raises(FileNotFoundError, match=r"/elsewhere\.npz: no such file"):
        load(tmp_path / "elsewhere.npz")


# The distance.


def gaussian(mean, covariance):
    return Statistics(np.asarray(mean, float), np.asarray(covariance, float), 100)


def test_known_distance(golden):
    known = golden("inception_check")
    a, b = statistics(known["fid_a"]), statistics(known["fid_b"])
    np.testing.assert_allclose(frechet(a, b), known["fid_distance"], rtol=1e-12)
    np.testing.assert_allclose(frechet(b, a), known["fid_distance"], rtol=1e-12)
    assert frechet(a, a) < 1e-12


def test_statistics():
    x = RNG.normal(size=(50, 7)).astype(np.float32)
    found = statistics(x)
    assert (found.count, found.mean.dtype, found.covariance.dtype) == (50, np.float64, np.float64)
    np.testing.assert_allclose(found.mean, x.astype(float).mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.covariance, np.cov(x.astype(float), rowvar=False), rtol=1e-12)
    with pytest.raises(ValueError, match=r"two rows of features or more; these are of shape \(1, 7\)"):
        statistics(x[:1])
    with pytest.raises(ValueError, match="NaN or infinite"):
        statistics(np.where(x > 1, np.inf, x))


def test_distance_of_gaussians_with_common_axes():
    axes = np.linalg.qr(RNG.normal(size=(6, 6)))[0]
    a, b, mean = RNG.uniform(0, 9, 6), RNG.uniform(0, 9, 6), RNG.normal(size=6)
    found = frechet(gaussian(np.zeros(6), axes * a @ axes.T), gaussian(mean, axes * b @ axes.T))
    np.testing.assert_allclose(found, np.sum(mean**2) + np.sum((np.sqrt(a) - np.sqrt(b)) ** 2), rtol=1e-12)


def test_distance_of_two_by_two_gaussians():
    """The trace of the root of a 2×2 matrix M is √(tr M + 2 √det M)."""
    a, b = (x @ x.T for x in RNG.normal(size=(2, 2, 2)))
    root = np.sqrt(np.trace(a @ b) + 2 * np.sqrt(np.linalg.det(a @ b)))
    found = frechet(gaussian([0, 0], a), gaussian([3, 4], b))
    np.testing.assert_allclose(found, 25 + np.trace(a) + np.trace(b) - 2 * root, rtol=1e-12)


def test_distance_of_singular_gaussians():
    u, v = RNG.normal(size=(2, 300))
    lines = gaussian(np.zeros(300), np.outer(u, u)), gaussian(np.zeros(300), np.outer(v, v))
    np.testing.assert_allclose(frechet(*lines), u @ u + v @ v - 2 * abs(u @ v), rtol=1e-12)
    np.testing.assert_allclose(frechet(lines[0], gaussian(np.ones(300), np.zeros((300, 300)))), 300 + u @ u, rtol=1e-12)
    few = RNG.normal(size=(20, 300))  # of rank 19
    assert frechet(statistics(few), statistics(few)) < 1e-10
    np.testing.assert_allclose(frechet(statistics(few), statistics(few + 2)), 4 * 300, rtol=1e-12)
    trace = np.trace(statistics(few).covariance)
    np.testing.assert_allclose(
        frechet(statistics(few - few.mean(0)[None]), statistics(3 * (few - few.mean(0)[None]))), 4 * trace
    )


def test_distance_of_unlike_features():
    with pytest.raises(ValueError, match="statistics of 2 and 3 features"):
        frechet(gaussian(np.zeros(2), np.eye(2)), gaussian(np.zeros(3), np.eye(3)))


# The cache of the reference.


def fake_network(folder, sha256="a"):
    return inception.Inception({}, Path(folder) / "fid_inception_v3.npz", sha256)


@pytest.fixture
def computed(monkeypatch):
    """Features that are the first pixels, and the batches they were asked of."""
    asked = []

    def features(images, network, batch_size):
        asked.append(as_bytes(images))
        return asked[-1].reshape(len(images), -1)[:, :5].astype(np.float32)

    monkeypatch.setattr(module, "features", features)
    return asked


def test_fid(computed, tmp_path):
    images, reference = COLOUR / 255, RNG.integers(0, 256, (9, 3, 4, 5), np.uint8)
    rows = [statistics(x.reshape(len(x), -1)[:, :5]) for x in (COLOUR, reference)]
    for _ in range(2):
        np.testing.assert_allclose(fid(images, reference, fake_network(tmp_path)), frechet(*rows), rtol=1e-12)
    assert [len(x) for x in computed] == [6, 9, 6]
    assert fid(reference, reference, fake_network(tmp_path)) < 1e-9 * np.trace(rows[1].covariance)


def test_reference_is_computed_once(computed, tmp_path):
    network = fake_network(tmp_path)
    first, again = (reference_statistics(COLOUR, network) for _ in range(2))
    assert len(computed) == 1
    for name in ("mean", "covariance", "count"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    reference_statistics(COLOUR / 255, network)  # the same bytes
    assert len(computed) == 1
    others = COLOUR.copy(), COLOUR[:5], COLOUR.reshape(6, 3, 5, 4), np.ascontiguousarray(COLOUR[::-1])
    others[0][-1, -1, -1, -1] ^= 1
    for count, other in enumerate(others, 2):
        reference_statistics(other, network)
        assert len(computed) == count
    reference_statistics(COLOUR, fake_network(tmp_path, "b"))
    assert len(computed) == len(others) + 2
    assert len(list(tmp_path.iterdir())) == len(others) + 2


@pytest.mark.parametrize("content", [b"", b"rubbish", None, {"mean": np.zeros(5)}, "few"])
def test_broken_cache(computed, tmp_path, content):
    network = fake_network(tmp_path)
    first = reference_statistics(COLOUR, network)
    (path,) = tmp_path.iterdir()
    if content is None:
        path.write_bytes(path.read_bytes()[:-100])
    elif content == "few":
        np.savez(path, mean=first.mean[:4], covariance=first.covariance, count=6)
    elif isinstance(content, dict):
        np.savez(path, **content)
    else:
        path.write_bytes(content)
    for _ in range(2):
        np.testing.assert_array_equal(reference_statistics(COLOUR, network).covariance, first.covariance)
    assert len(computed) == 2


def test_interrupted_while_keeping(computed, tmp_path, monkeypatch):
    def savez(path, **arrays):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", savez)
    with pytest.raises(KeyboardInterrupt):
        reference_statistics(COLOUR, fake_network(tmp_path))
    assert not list(tmp_path.iterdir())


def test_folder_that_cannot_be_written(computed, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.warns(UserWarning, match=f"could not be kept in {tmp_path}/file: "):
        found = reference_statistics(COLOUR, fake_network(tmp_path / "file"))
    assert found.count == 6


# Probes.


def test_svm_of_separable_classes():
    labels = RNG.integers(0, 3, 300)
    x = 4 * np.eye(3)[labels] + RNG.uniform(-1, 1, (300, 3))
    assert probes.linear_svm(x[:200], labels[:200], x[200:], labels[200:]) == (100.0, True)
    wrong = (labels + (np.arange(300) % 4 == 0)) % 3  # each fourth label
    assert probes.linear_svm(x[:200], labels[:200], x[200:], wrong[200:]) == (75.0, True)
    images = x.reshape(300, 1, 3, 1)
    assert probes.linear_svm(images[:200], labels[:200], jnp.asarray(images[200:]), labels[200:]).percent == 100


def test_svm_that_does_not_converge():
    x, labels = 1e4 * RNG.normal(size=(60, 70)), RNG.integers(0, 2, 60)
    x[30:] = x[:30]  # each point twice, with labels at odds
    found = probes.linear_svm(x, labels, x, labels)
    assert not found.converged
    assert 50 <= found.percent <= 90


def test_tsne():
    x = RNG.normal(size=(80, 10))
    x[:40] += 50
    with threadpool_limits(1):  # on busy cores its threads wait for one another
        found, again = (probes.tsne(x.astype(np.float32)) for _ in range(2))
    np.testing.assert_array_equal(found, again)
    assert found.shape == (80, 2)
    centres = found[:40].mean(0), found[40:].mean(0)
    spread = max(
        np.linalg.norm(part - centre[None], axis=1).max()
        for part, centre in zip(np.split(found, 2), centres, strict=True)
    )
    assert np.linalg.norm(centres[0] - centres[1]) > 2 * spread


@pytest.mark.parametrize("block", [1, 7, 1000])
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_nearest(monkeypatch, block, kind):
    monkeypatch.setattr(probes, "BLOCK", block)
    samples, train = (RNG.integers(0, 256, (n, 3, 2, 2), np.uint8).astype(kind) for n in (9, 30))
    samples[4] = train[17]
    distances = np.linalg.norm((samples[:, None].astype(float) - train[None]).reshape(9, 30, 12), axis=-1)
    for k in (1, 3, 30):
        found = probes.nearest(jnp.asarray(samples), train, k)
        np.testing.assert_array_equal(found.indices, np.argsort(distances, 1)[:, :k])
        np.testing.assert_allclose(found.distances, np.sort(distances, 1)[:, :k], rtol=1e-12)
        assert (found.indices[4, 0], found.distances[4, 0]) == (17, 0)


def test_nearest_of_nearly_copies():
    train = 1000 + RNG.uniform(size=(50, 400))
    found = probes.nearest(train[[3, 30]] + 1e-5 * np.eye(400)[:2], train)
    np.testing.assert_array_equal(found.indices, [[3], [30]])
    np.testing.assert_allclose(found.distances, 1e-5, rtol=1e-6)


@pytest.mark.parametrize(
    ("samples", "train", "k", "kind", "reason"),
    [
        (COLOUR, COLOUR[:, :1], 1, ValueError, r"of shape \(3, 4, 5\) each and training images of \(1, 4, 5\)"),
        (COLOUR / 255, COLOUR, 1, TypeError, "float64 and training images uint8: divide the bytes by 255"),
        (COLOUR, COLOUR, 7, ValueError, "k must be between 1 and 6, the number of training images; got 7"),
        (COLOUR, COLOUR, 0, ValueError, "got 0"),
        (COLOUR[:0], COLOUR, 1, ValueError, "samples must have one example a row"),
        (COLOUR * np.nan, COLOUR / 255, 1, ValueError, "samples have NaN or infinite values, first in row 0"),
    ],
)
def test_nearest_refused(samples, train, k, kind, reason):
    with pytest.raises(kind, match=reason):
        probes.nearest(samples, train, k)


@pytest.mark.parametrize("call", [lambda: probes.linear_svm(*4 * [COLOUR]), lambda: probes.tsne(COLOUR)])
def test_without_scikit_learn(monkeypatch, call):
    for name in ("sklearn", *(name for name in sys.modules if name.startswith("sklearn."))):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'bism\[images\]'"):
        call()


def test_import_is_light():
    code = "import sys, bism.metrics; print(sorted({'sklearn', 'torch', 'PIL', 'matplotlib'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
