"""Every input that cannot be trained on is refused by name; files are read; the toy data sets are what they say."""

from typing import Any

import jax
import numpy as np
import pytest

import bism
from bism.data import NAMED, as_data, checkerboard, column_names, load
from bism.table import write_table

GOOD = np.arange(6.0).reshape(3, 2)
HOLED = np.array([[0.0, 1.0], [np.nan, np.inf], [2.0, np.nan]])

REFUSED = {
    "integers": (np.ones((3, 2), int), TypeError, r"data is of type int64.*astype\('float32'\).*/ 255"),
    "pixels": (np.ones((3, 2), np.uint8), TypeError, "of type uint8"),
    "booleans": (np.ones((3, 2), bool), TypeError, "of type bool"),
    "complex": (np.ones((3, 2), complex), TypeError, "of type complex128"),
    "objects": ([[1.0, None]], TypeError, "of type object"),
    "NaN and Inf": (HOLED, ValueError, "3 NaN or infinite values, first in row 1"),
    "Inf in an image": (np.where(np.arange(18).reshape(2, 3, 3) == 13, np.inf, 0.0), ValueError, "1 NaN.* row 1"),
    "no rows": (np.zeros((0, 2)), ValueError, r"data is empty: shape \(0, 2\)"),
    "no columns": (np.zeros((3, 0)), ValueError, "empty"),
    "one dimension": (np.zeros(3), ValueError, r"one example a row.*shape \(3,\)"),
    "a number": (1.0, ValueError, r"shape \(\)"),
    "ragged": ([[1.0, 2.0], [3.0]], ValueError, "inhomogeneous"),
}


@pytest.mark.parametrize(("x", "kind", "reason"), REFUSED.values(), ids=REFUSED)
def test_arrays_refused(x, kind, reason):
    with pytest.raises(kind, match=reason):
        as_data(x)


def test_arrays_taken():
    for x in (GOOD, GOOD.tolist(), GOOD.astype(np.float32), jax.numpy.asarray(GOOD), np.asfortranarray(GOOD)):
        data = as_data(x)
        assert data.dtype == np.float64  # the working precision of these tests
        np.testing.assert_array_equal(data, GOOD)


def fit(data: Any = GOOD, **settings):
    defaults: dict[str, Any] = {"steps": 1, "batch_size": 2}
    model = bism.GaussianRBM(2, 2, key=jax.random.key(0))
    return bism.fit(bism.MaximumLikelihood(), model, data=data, progress=False, **defaults | settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"batch_size": 4}, "batch_size is 4 and there are 3 examples"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"seeds": -1}, "seeds must be at least 1, got -1"),
        ({"keep": 0}, "keep must be at least 1, got 0"),
        ({"validation": GOOD[:, :1]}, r"validation has examples of shape \(1,\) and the data of \(2,\)"),
        ({"validation": HOLED}, "validation has 3 NaN or infinite values, first in row 1"),
        ({"validation": GOOD[:0]}, "validation is empty"),
        ({"data": GOOD[:, :1]}, r"GaussianRBM.free_energy does not take arguments of shape \(1,\)"),
        ({"data": "nowhere.npy"}, "nowhere.npy: no such file"),
    ],
)
def test_fit_refuses(settings, reason):
    with pytest.raises((ValueError, FileNotFoundError), match=reason):
        fit(**settings)


@pytest.mark.parametrize("name", ["log_every", "evaluate_every", "checkpoint_every"])
def test_fit_refuses_to_log_at_negative_intervals(name):
    def stop(run):
        if len(run.history) > 5:
            raise RuntimeError("this would go on for ever")

    with pytest.raises(ValueError, match=name):
        fit(steps=3, callbacks=[stop], **{name: -2})


@pytest.fixture
def files(tmp_path):
    np.save(tmp_path / "x.npy", GOOD)
    np.savez(tmp_path / "one.npz", anything=GOOD)
    np.savez(tmp_path / "named.npz", y=np.zeros(3), x_train=GOOD)
    np.savez(tmp_path / "two.npz", a=GOOD, b=GOOD)
    np.savez(tmp_path / "none.npz")
    np.savetxt(tmp_path / "x.csv", GOOD, delimiter=",")
    np.savetxt(tmp_path / "x.txt", GOOD)
    (tmp_path / "header.csv").write_text("height,weight\n0,1\n2,3\n4,5\n")
    (tmp_path / "semicolon.csv").write_text("\ufeffheight;weight\r\n0;1\r\n2;3\r\n4;5\r\n")
    (tmp_path / "tab.csv").write_text('# measured\n\n"height"\t"of, it"\n0\t1\n2\t"3"\n\n4\t5\n')
    (tmp_path / "gap.csv").write_text("0,1\n2,\n4,5\n")
    (tmp_path / "nan.csv").write_text("0,1\n2,nan\n4,5\n")
    (tmp_path / "word.csv").write_text("height,size\n\n2,tall\n4,5\n")
    (tmp_path / "comma.csv").write_text("0;1\n2;3,5\n")
    (tmp_path / "ragged.csv").write_text("0,1\n2\n")
    (tmp_path / "names.csv").write_text("height,weight\n")
    (tmp_path / "blank.csv").write_text("\n")
    (tmp_path / "column.csv").write_text("0\n2\n4\n")
    (tmp_path / "row.csv").write_text("0,2\n")
    (tmp_path / "cut.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-8])
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "garbage.npz").write_bytes(b"garbage")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "one.npz").read_bytes()[:100])
    (tmp_path / "array.npz").write_bytes((tmp_path / "x.npy").read_bytes())
    (tmp_path / "archive.npy").write_bytes((tmp_path / "one.npz").read_bytes())
    np.save(tmp_path / "objects.npy", np.array([{}, None]), allow_pickle=True)
    (tmp_path / "x.parquet").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    return tmp_path


NAMED_CSV = ("semicolon.csv", "tab.csv")


@pytest.mark.parametrize("name", ["x.npy", "one.npz", "named.npz", "x.csv", "x.txt", "header.csv", *NAMED_CSV])
def test_files_read(files, name):
    np.testing.assert_array_equal(as_data(str(files / name)), GOOD)
    np.testing.assert_array_equal(load(str(files / name)), GOOD)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("two.npz", r"two.npz cannot be read as an array: it has several arrays \(a, b\)"),
        ("nan.csv", "1 NaN or infinite values, first in row 1"),
        ("gap.csv", "line 2, column 2 is empty; drop such rows or fill them in"),
        ("word.csv", r"line 3, column 2 \(size\): 'tall' is not a number; leave such a column out"),
        ("comma.csv", "line 2, column 2: '3,5' has a decimal comma; write a point"),
        ("ragged.csv", "ragged.csv cannot be read as an array: line 2 has 1 values and the first line 2"),
        ("names.csv", "it has no rows of numbers"),
        ("blank.csv", "it is empty"),
        ("cut.npy", "cut.npy cannot be read as an array"),
        ("empty.npy", "empty.npy cannot be read as an array"),
        ("garbage.npz", "garbage.npz cannot be read as an array"),
        ("cut.npz", "cut.npz cannot be read as an array"),
        ("none.npz", "none.npz cannot be read as an array: it has no arrays"),
        ("array.npz", "array.npz cannot be read as an array"),
        ("archive.npy", "archive.npy cannot be read as an array"),
        ("objects.npy", "objects.npy cannot be read as an array"),
        ("x.parquet", "unknown kind of file '.parquet'; use .npy, .npz or .csv"),
        ("folder", "unknown kind of file ''"),
    ],
)
def test_files_refused(files, name, reason):
    with pytest.raises(ValueError, match=reason):
        as_data(files / name)


def test_names_of_columns_are_kept(files):
    assert column_names(str(files / "header.csv")) == ["height", "weight"]
    assert column_names(str(files / "tab.csv")) == ["height", "of, it"]
    assert column_names(str(files / "x.csv")) is column_names("moons") is None
    write_table(files / "again.csv", GOOD, ["height", "of, it"])
    assert column_names(str(files / "again.csv")) == ["height", "of, it"]
    np.testing.assert_array_equal(load(str(files / "again.csv")), GOOD)


@pytest.mark.parametrize(("name", "expected"), [("column.csv", [[0.0], [2.0], [4.0]]), ("row.csv", [[0.0, 2.0]])])
def test_one_column_and_one_row(files, name, expected):
    np.testing.assert_array_equal(as_data(files / name), expected)


def test_missing_file():
    with pytest.raises(FileNotFoundError, match=r"nowhere.npy: no such file.*checkerboard, eight-gaussians, moons"):
        load("nowhere.npy")


def test_a_named_data_set_is_data():
    np.testing.assert_array_equal(as_data("moons"), NAMED["moons"](60_000))


COUNT = 20_000


@pytest.mark.parametrize("name", NAMED)
def test_named_data_is_decided_by_its_seed(name):
    x = load(name, 50, seed=3)
    assert x.shape == (50, 2)
    assert x.dtype == np.float32
    np.testing.assert_array_equal(x, load(name, 50, seed=3))
    assert not np.isin(x, load(name, 50, seed=4)).any()


def test_checkerboard():
    x = checkerboard(COUNT)
    low, high = ((x >= 0) & (x < 0.5)).all(1), ((x >= 0.5) & (x < 1)).all(1)
    assert (low | high).all()
    # Density 2 on both squares: each of the sixteen cells of side 1/8 of a square has a 32nd of the points.
    cells = np.histogram2d(*x.T, bins=8, range=[[0, 1], [0, 1]])[0] / COUNT * 64
    on = np.kron(np.eye(2), np.ones((4, 4)))
    np.testing.assert_allclose(cells, 2 * on, atol=0.35)
    np.testing.assert_allclose(cells.sum() / 64, 1)
    np.testing.assert_allclose(x.mean(0), 0.5, atol=0.01)
    np.testing.assert_allclose(np.cov(x.T), [[1 / 12, 1 / 16], [1 / 16, 1 / 12]], atol=0.002)


def test_eight_gaussians():
    x = load("eight-gaussians", COUNT)
    corner = np.round(np.arctan2(x[:, 1], x[:, 0]) / (np.pi / 4)).astype(int) % 8
    np.testing.assert_allclose(np.bincount(corner) / COUNT, 1 / 8, atol=0.01)
    centre = 2 * np.stack([np.cos(corner * np.pi / 4), np.sin(corner * np.pi / 4)], 1)
    np.testing.assert_allclose((x - centre).std(0), 0.15, atol=0.005)


def test_rings():
    radius = np.linalg.norm(load("rings", COUNT), axis=1)
    ring = np.round(radius / 0.75).astype(int)
    np.testing.assert_allclose(np.bincount(ring)[1:4] / COUNT, 1 / 3, atol=0.01)
    np.testing.assert_allclose((radius - 0.75 * ring).std(), 0.06, atol=0.005)
    np.testing.assert_allclose(load("rings", COUNT).mean(0), 0, atol=0.03)


def test_moons():
    x = load("moons", COUNT).astype(float) / 1.5
    to_upper = np.abs(np.hypot(x[:, 0] + 0.5, x[:, 1] + 0.25) - 1)  # two half circles of radius 1
    to_lower = np.abs(np.hypot(x[:, 0] - 0.5, x[:, 1] - 0.25) - 1)
    nearest = np.minimum(to_upper, to_lower)
    assert nearest.max() < 6 * 0.1 / 1.5
    np.testing.assert_allclose((to_upper < to_lower).mean(), 0.5, atol=0.02)
    np.testing.assert_allclose(x.mean(0), 0, atol=0.01)
