"""Every kind of source becomes the bytes it holds; every bad one is refused by name."""

import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from bism.images import load_images, show

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (5, 16, 8), np.uint8)
COLOUR = RNG.integers(0, 256, (5, 3, 8, 16), np.uint8)


def gradient(height, width, colour=True):
    """Smooth, so that what resizing and compression leave of it is known."""
    y, x = np.mgrid[:height, :width]
    planes = [255 * y / height, 255 * x / width, np.full((height, width), 99)]
    return np.round(np.stack(planes, -1) if colour else planes[0]).astype(np.uint8)


TAKEN = {
    "grey": (GREY, GREY[:, None]),
    "grey with a channel": (GREY[..., None], GREY[:, None]),
    "grey, channel first": (GREY[:, None], GREY[:, None]),
    "colour, channels last": (np.moveaxis(COLOUR, 1, -1), COLOUR),
    "colour, channels first": (COLOUR, COLOUR),
    "floats": (GREY / 255, GREY[:, None]),
    "single precision": (COLOUR.astype(np.float32) / 255, COLOUR),
    "booleans": (GREY > 99, 255 * (GREY[:, None] > 99)),
    "whole numbers": (GREY.astype(int), GREY[:, None]),
}


@pytest.mark.parametrize(("x", "expected"), TAKEN.values(), ids=TAKEN)
def test_arrays_taken(tmp_path, x, expected):
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", data=x, extra=1)
    for source in (x, tmp_path / "x.npy", str(tmp_path / "x.npz")):
        found = load_images(source)
        assert found.train.dtype == np.uint8
        np.testing.assert_array_equal(found.train, expected)
        assert found[1:4] == (None, None, None)
        assert (found.size, found.flip, found.note) == (expected.shape[2:], False, "")


def test_floats_are_rounded():
    values = np.array([0, 0.001, 0.002, 0.5, 0.998, 0.999, 1.0, 1.0]).reshape(1, 1, 8).repeat(8, 1)
    np.testing.assert_array_equal(load_images(values).train[0, 0, 0], [0, 0, 1, 128, 254, 255, 255, 255])


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "above one": (GREY + 0.5, ValueError, r"array, train has values from 0\.5 to .*; floats must lie in \[0, 1\]. Div"),
    "below zero": (GREY / 255 - 0.5, ValueError, r"values from -0\.5 to 0\.5; floats must"),
    "NaN": (np.where(GREY < 9, np.nan, 0.5), ValueError, "NaN or infinite"),
    "large integers": (GREY.astype(int) + 256, ValueError, "whole numbers must lie in 0 to 255"),
    "negative integers": (-GREY.astype(int), ValueError, "from -255 to 0; whole numbers"),
    "zeros and ones": (GREY // 128, ValueError, "whole numbers of at most 1, black when 255 is white"),
    "words": (np.full((2, 8, 8), "a"), TypeError, "of type <U1; pixels are uint8"),
    "complex": (GREY * 1j, TypeError, "of type complex128"),
    "one image": (GREY[0], ValueError, r"must be of shape \(count, height, width\).*it is of \(16, 8\)"),
    "one colour image": (np.moveaxis(COLOUR[0], 0, -1), ValueError, r"it is of \(8, 16, 3\)"),
    "two channels": (np.zeros((5, 8, 8, 2), np.uint8), ValueError, r"it is of \(5, 8, 8, 2\)"),
    "transparency": (np.zeros((5, 8, 8, 4), np.uint8), ValueError, r"it is of \(5, 8, 8, 4\)"),
    "videos": (np.zeros((5, 2, 3, 8, 8), np.uint8), ValueError, r"it is of \(5, 2, 3, 8, 8\)"),
    "none": (GREY[:0], ValueError, r"is empty: shape \(0, 1, 16, 8\)"),
    "odd colour": (COLOUR[..., :15], ValueError, r"8×15 cannot be halved three times. Give side=, .*such as 8"),
    "odd large": (np.zeros((2, 3, 45, 70)), ValueError, r"45×70 cannot be halved three times. .*such as 40"),
}


@pytest.mark.parametrize(("x", "kind", "reason"), REFUSED.values(), ids=REFUSED)
def test_arrays_refused(x, kind, reason):
    with pytest.raises(kind, match=reason):
        load_images(x)


@pytest.mark.parametrize(
    ("shape", "padded", "note"),
    [
        ((28, 28), (32, 32), "zeros around bring 28×28 to 32×32"),
        ((28, 20), (32, 24), "zeros around bring 28×20 to 32×24"),
        ((9, 15), (16, 16), "zeros around bring 9×15 to 16×16"),
        ((8, 6), (8, 8), "zeros around bring 8×6 to 8×8"),
    ],
)
def test_padding_and_back(shape, padded, note):
    x = RNG.integers(1, 256, (3, *shape), np.uint8)
    found = load_images(x)
    assert found.train.shape == (3, 1, *padded)
    assert (found.size, found.note) == (shape, note)
    np.testing.assert_array_equal(found.crop(found.train), x[:, None])
    assert (found.train > 0).sum() == x.size
    rows, columns = (np.flatnonzero(found.train[0, 0].any(axis)) for axis in (1, 0))
    for inside, all_ in zip((rows, columns), padded, strict=True):  # as much before as after, or one more after
        assert all_ - 1 - inside[-1] - inside[0] in (0, 1)
    np.testing.assert_array_equal(found.crop(jnp.asarray(found.train)), x[:, None])
    np.testing.assert_array_equal(show(found.train, found.size), x / np.float32(255))


def test_show():
    grey, colour = show(GREY[:, None]), show(COLOUR)
    assert grey.dtype == colour.dtype == np.float32
    np.testing.assert_array_equal(grey, GREY / np.float32(255))
    np.testing.assert_array_equal(colour, np.moveaxis(COLOUR, 1, -1) / np.float32(255))
    stray = jnp.array([-0.5, 0.0, 0.25, 1.5]).reshape(1, 1, 2, 2)
    np.testing.assert_array_equal(show(stray), [[[0, 0], [0.25, 1]]])
    for wrong in (GREY, COLOUR[:, :2], np.moveaxis(COLOUR, 1, -1)):
        with pytest.raises(ValueError, match=r"must be of shape \(count, 1 or 3, height, width\); they are of"):
            show(wrong)
    with pytest.raises(ValueError, match="8×16 cannot be cropped to 9×9"):
        show(COLOUR, (9, 9))


@pytest.mark.parametrize("side", [8, 16, 40])
def test_side(side):
    for colour in (False, True):
        found = load_images(gradient(24, 48, colour)[None], side=side)
        middle = load_images(gradient(24, 48, colour)[None, :, 12:36]).train
        assert found.train.shape == (1, 3 if colour else 1, side, side)
        for axis in (2, 3):  # a gradient stays one, at the centres of the new pixels
            kept = middle.mean(axis=axis)[0, 0]
            wanted = np.interp((np.arange(side) + 0.5) * 24 / side - 0.5, np.arange(24), kept)
            np.testing.assert_allclose(found.train.mean(axis=axis)[0, 0][2:-2], wanted[2:-2], atol=2)
    assert load_images(GREY, side=13).size == (13, 13)
    assert load_images(GREY, side=13).train.shape == (5, 1, 16, 16)
    np.testing.assert_array_equal(load_images(GREY[:, :8], side=8).train[:, 0], GREY[:, :8])
    with pytest.raises(ValueError, match="side must be at least 1, got 0"):
        load_images(GREY, side=0)


def test_archive_of_parts(tmp_path):
    labels = np.arange(5)
    parts: dict[str, Any] = {"x_train": GREY, "x_test": GREY[:2], "y_train": labels, "y_test": labels[:2]}
    np.savez(tmp_path / "all.npz", **parts)
    found = load_images(tmp_path / "all.npz")
    np.testing.assert_array_equal(found.test, GREY[:2, None])
    np.testing.assert_array_equal(found.train_labels, labels)
    np.testing.assert_array_equal(found.test_labels, labels[:2])
    resized = load_images(tmp_path / "all.npz", side=12)
    assert resized.test is not None
    np.testing.assert_array_equal(resized.test, resized.train[:2])

    wrong: dict[str, tuple[Any, str]] = {
        "y_train": (labels[:4], "5 images for train have 4 labels"),
        "y_test": (labels, "2 images for test have 5 labels"),
        "x_test": (GREY[:2, :8], r"test images are of shape \(1, 8, 8\), training ones of \(1, 16, 8\)"),
    }
    for name, (array, reason) in wrong.items():
        np.savez(tmp_path / "wrong.npz", **parts | {name: array})  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match=f"wrong.npz: {reason}"):
            load_images(tmp_path / "wrong.npz")
    np.savez(tmp_path / "wrong.npz", **parts | {"x_test": GREY[:2] + 1.5})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"wrong.npz, test has values from"):
        load_images(tmp_path / "wrong.npz")


def test_files_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"nothing: no such file or folder. Name a folder.*mnist, fashion-mnist"
    ):
        load_images(tmp_path / "nothing")
    for name in ("x.csv", "x.png", "x"):
        (tmp_path / name).write_text("1,2")
        with pytest.raises(ValueError, match=f"{name}: unknown kind of file .*; use a folder of images, .npy or .npz"):
            load_images(tmp_path / name)
    for name in ("x.npy", "x.npz"):
        (tmp_path / name).write_text("1,2")
        with pytest.raises(ValueError, match=f"{name} cannot be read as an array"):
            load_images(tmp_path / name)
    np.savez(tmp_path / "two.npz", a=GREY, b=GREY)
    with pytest.raises(ValueError, match=r"it has several arrays \(a, b\)"):
        load_images(tmp_path / "two.npz")


def test_folder(tmp_path):
    """Whatever wrote them, and wherever they lie below, images come in the order of their paths."""
    colour = np.moveaxis(COLOUR, 1, -1)
    (tmp_path / "b" / "deep").mkdir(parents=True)
    for i, name in enumerate(["a.png", "b/1.bmp", "b/deep/1.TIFF", "b/x.webp", "c.ppm"]):
        Image.fromarray(colour[i]).save(tmp_path / name, lossless=True)
    for name in ("labels.csv", ".DS_Store", "._a.png", "README"):
        (tmp_path / name).write_text("not an image")
    found = load_images(str(tmp_path))
    np.testing.assert_array_equal(found.train, COLOUR)
    assert found[1:] == (None, None, None, str(tmp_path), (8, 16), False, "")


def test_folder_of_jpegs(tmp_path):
    for i in range(3):
        Image.fromarray(gradient(40, 32)).save(tmp_path / f"{i}.jpg", quality=95)
    exif = Image.Exif()
    exif[0x0112] = 6  # held upright by turning it a quarter
    Image.fromarray(np.rot90(gradient(40, 32))).save(tmp_path / "turned.jpeg", quality=95, exif=exif)
    found = load_images(tmp_path).train
    assert found.shape == (4, 3, 40, 32)
    assert np.abs(found - np.moveaxis(gradient(40, 32), -1, 0)[None].astype(float)).max() < 9


def test_kinds_of_pixels(tmp_path):
    """All greyscale: one channel. Any in colour: three."""
    Image.fromarray(GREY[0]).save(tmp_path / "0.png")
    Image.fromarray(GREY[1].astype(np.uint16) * 257).save(tmp_path / "1.png")  # 16 bits
    Image.fromarray(np.where(GREY[2] > 99, 255, 0).astype(np.uint8)).convert("1").save(tmp_path / "2.png")
    Image.merge("LA", [Image.fromarray(GREY[3])] * 2).save(tmp_path / "3.png")
    expected = GREY[:4, None].copy()
    expected[2] = np.where(expected[2] > 99, 255, 0)
    found = load_images(tmp_path)
    np.testing.assert_array_equal(found.train, expected)
    assert found.note == ""

    colour = np.moveaxis(COLOUR[:2].swapaxes(2, 3), 1, -1)
    Image.fromarray(colour[0]).convert("RGBA").save(tmp_path / "4.png")
    palette = Image.fromarray(colour[1]).quantize(256)
    palette.save(tmp_path / "5.png", transparency=bytes(range(256)))
    found = load_images(tmp_path)
    np.testing.assert_array_equal(found.train[:4], expected.repeat(3, 1))
    np.testing.assert_array_equal(found.train[4], COLOUR[0].swapaxes(1, 2))
    np.testing.assert_array_equal(found.train[5], np.moveaxis(np.asarray(palette.convert("RGB")), -1, 0))
    assert found.note == "4 greyscale images among coloured ones made RGB"


def test_folder_of_several_sizes(tmp_path):
    for i, (height, width) in enumerate([(40, 40), (40, 40), (60, 40), (40, 90)]):
        Image.fromarray(gradient(height, width)).save(tmp_path / f"{i}.png")
    with pytest.raises(ValueError, match=r"several sizes: 0.png is 40×40 and 2.png is 60×40. Give side="):
        load_images(tmp_path)
    found = load_images(tmp_path, side=24)
    assert found.train.shape == (4, 3, 24, 24)
    np.testing.assert_array_equal(found.train[2:3], load_images(gradient(60, 40)[None], side=24).train)
    assert (found.size, found.note) == ((24, 24), "")


def test_folder_of_padded(tmp_path):
    Image.fromarray(GREY[0, :12]).save(tmp_path / "a.png")
    found = load_images(tmp_path)
    np.testing.assert_array_equal(found.train[0, 0, 2:14], GREY[0, :12])
    assert found.note == "zeros around bring 12×8 to 16×8"


def break_(path, how):
    content = path.read_bytes()
    path.write_bytes(
        {"cut": content[: len(content) // 2], "empty": b"", "text": b"no", "spoilt": content[:60] + b"!" * 99}[how]
    )


@pytest.mark.parametrize("suffix", ["png", "jpg", "tiff", "gif", "bmp"])
def test_broken_images(tmp_path, suffix):
    for i in range(5):
        Image.fromarray(gradient(64, 64)).save(tmp_path / f"{i}.{suffix}")
    for i, how in enumerate(["cut", "empty", "text"]):
        break_(tmp_path / f"{i}.{suffix}", how)
    told = rf"3 of 5 image files cannot be read and are left out: 0.{suffix}, 1.{suffix}, 2.{suffix}"
    with pytest.warns(UserWarning, match=rf"{tmp_path}: {told}\.$") as warned:
        found = load_images(tmp_path)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert "\n" not in str(warned[0].message)
    assert found.train.shape == (2, 3, 64, 64)
    assert found.note == told


def test_many_broken_images(tmp_path):
    Image.fromarray(gradient(8, 8)).save(tmp_path / "z.png")
    Image.fromarray(np.ones((8, 8), np.float32)).save(tmp_path / "y.tif")  # what is white is not known
    for i in range(8):
        (tmp_path / f"{i}.png").write_bytes(b"no")
    with pytest.warns(UserWarning, match=r"9 of 10 .*: 0.png, 1.png, 2.png, 3.png, 4.png and 4 more\.$"):
        assert len(load_images(tmp_path).train) == 1
    (tmp_path / "z.png").unlink()
    (tmp_path / "y.tif").unlink()
    with pytest.raises(ValueError, match=r"none of the 8 image files can be read: 0.png.* and 3 more\."):
        load_images(tmp_path)


def test_folder_without_images(tmp_path):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match=f"{tmp_path} has no image files"):
        load_images(tmp_path)
    (tmp_path / "x.txt").write_text("1")
    with pytest.raises(ValueError, match="has no image files"):
        load_images(tmp_path)


def test_digits():
    found, again = load_images("digits"), load_images("digits")
    assert found.test is not None
    assert (found.train.shape, found.test.shape) == ((1500, 1, 8, 8), (297, 1, 8, 8))
    assert (len(found.train_labels), len(found.test_labels)) == (1500, 297)  # type: ignore
    assert (found.name, found.size, found.flip, found.note) == ("digits", (8, 8), False, "")
    np.testing.assert_array_equal(found.train, again.train)
    # The first one of sklearn's, in sixteenths, is a zero.
    np.testing.assert_array_equal(found.train[0, 0, 0], np.round(np.array([0, 0, 5, 13, 9, 1, 0, 0]) * 255 / 16))
    np.testing.assert_array_equal(found.train_labels[:10], np.arange(10))  # type: ignore
    assert set(np.unique(found.train)) == {round(i * 255 / 16) for i in range(17)}


def test_import_is_light():
    code = "import sys, bism.images; print(sorted({'PIL', 'sklearn', 'pooch', 'requests'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
