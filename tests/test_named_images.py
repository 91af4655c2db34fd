"""Named sets of images: downloads are checked, CelebA is taken as it comes, the real ones are what they should be."""

import functools
import gzip
import hashlib
import io
import struct
import tarfile
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pooch
import pytest
from PIL import Image

from bism import images as module
from bism.images import NAMED, load_images

RNG = np.random.default_rng(0)

# Downloads, from a server on this machine.


def idx(array):
    return gzip.compress(
        struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}i", *array.shape) + bytes(array.data)
    )


def cifar(train, test):
    """The binary version: label, then the red, green and blue planes, for each image; `train` in five files."""
    rows = lambda x, y: np.concatenate([y[:, None], x.reshape(len(x), -1)], 1).astype(np.uint8).tobytes()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        files = {f"data_batch_{i + 1}.bin": rows(*part) for i, part in enumerate(zip(*train, strict=True))}
        for name, content in {"readme.html": b"", "test_batch.bin": rows(*test), **files}.items():
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()


DIGITS = RNG.integers(0, 256, (7, 28, 28), np.uint8), np.arange(7, dtype=np.uint8)
DIGITS_TEST = RNG.integers(0, 256, (3, 28, 28), np.uint8), np.arange(3, dtype=np.uint8)
PICTURES = RNG.integers(0, 256, (5, 2, 3, 32, 32), np.uint8), np.arange(10, dtype=np.uint8).reshape(5, 2)
PICTURES_TEST = RNG.integers(0, 256, (3, 3, 32, 32), np.uint8), np.arange(3, dtype=np.uint8)
MNIST_FILES = dict(zip(NAMED["mnist"].sha256, map(idx, (*DIGITS, *DIGITS_TEST)), strict=True))
FILES = {
    "mnist": MNIST_FILES,
    "fashion-mnist": MNIST_FILES,
    "cifar10": {"cifar-10-binary.tar.gz": cifar(PICTURES, PICTURES_TEST)},
}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        self.server.asked.append(self.path)  # type: ignore


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The address of a server of the made-up sets, which are the known ones for once; what it was asked; its folder."""
    root = tmp_path / "served"
    for name, files in FILES.items():
        (root / name).mkdir(parents=True)
        for file, content in files.items():
            (root / name / file).write_bytes(content)
        sha256 = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
        monkeypatch.setitem(NAMED, name, NAMED[name]._replace(sha256=sha256))
    http = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(root)))
    http.asked = []  # type: ignore
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}", http.asked, root  # type: ignore
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_download_mnist(server, tmp_path, monkeypatch, name):
    monkeypatch.setenv("BISM_DATA", str(tmp_path / "data"))
    url, asked, _ = server
    found = load_images(name, url=f"{url}/{name}")
    assert asked == [f"/{name}/{file}" for file in MNIST_FILES]
    assert found.test is not None
    assert (found.train.shape, found.test.shape) == ((7, 1, 32, 32), (3, 1, 32, 32))
    np.testing.assert_array_equal(found.crop(found.train)[:, 0], DIGITS[0])
    np.testing.assert_array_equal(found.crop(found.test)[:, 0], DIGITS_TEST[0])
    np.testing.assert_array_equal(found.train_labels, DIGITS[1])
    np.testing.assert_array_equal(found.test_labels, DIGITS_TEST[1])
    assert (found.name, found.size, found.flip) == (name, (28, 28), False)
    assert found.note == "7 of the 60,000 training images; zeros around bring 28×28 to 32×32"

    again = load_images(name, url="http://127.0.0.1:1/")  # from the file it was left in
    np.testing.assert_array_equal(again.train, found.train)
    assert [path.name for path in (tmp_path / "data").glob("*.npz")] == [f"{name}.npz"]


def test_download_cifar(server, tmp_path):
    found = load_images("cifar10", url=f"{server[0]}/cifar10/", folder=tmp_path / "data")
    np.testing.assert_array_equal(found.train, PICTURES[0].reshape(10, 3, 32, 32))
    np.testing.assert_array_equal(found.test, PICTURES_TEST[0])
    np.testing.assert_array_equal(found.train_labels, np.arange(10))
    np.testing.assert_array_equal(found.test_labels, np.arange(3))
    assert (found.size, found.flip, found.note) == ((32, 32), False, "10 of the 50,000 training images")


def test_download_of_another_file(server, tmp_path):
    url, _, root = server
    file = list(MNIST_FILES)[1]
    (root / "mnist" / file).write_bytes(b"spoilt")
    told = rf"mnist could not be fetched\. Check the network.* or put {file} into {tmp_path}/data/mnist by hand\."
    with pytest.raises(OSError, match=rf"{told}.*{url}/mnist/{file}: SHA256 hash of downloaded file.*does not match"):
        load_images("mnist", url=f"{url}/mnist", folder=tmp_path / "data")
    left = [path.name for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert left == [next(iter(MNIST_FILES))]  # what was whole, for the next time; nothing of the other
    (root / "mnist" / file).write_bytes(MNIST_FILES[file])
    assert len(load_images("mnist", url=f"{url}/mnist", folder=tmp_path / "data").train) == 7


def test_spoilt_file_is_fetched_again(server, tmp_path):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "cifar-10-binary.tar.gz").write_bytes(b"half")
    assert len(load_images("cifar10", url=f"{server[0]}/cifar10", folder=tmp_path).train) == 10


def test_files_put_there_by_hand(server, tmp_path):
    (tmp_path / "mnist").mkdir()
    for file, content in MNIST_FILES.items():
        (tmp_path / "mnist" / file).write_bytes(content)
    assert len(load_images("mnist", folder=tmp_path).train) == 7
    assert server[1] == []


def test_second_home(server, tmp_path, monkeypatch):
    homes = ("http://127.0.0.1:1/", f"{server[0]}/cifar10")
    monkeypatch.setitem(NAMED, "cifar10", NAMED["cifar10"]._replace(homes=homes))
    assert len(load_images("cifar10", folder=tmp_path).train) == 10


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_no_network(tmp_path, name):
    file = next(iter(NAMED[name].sha256))
    told = rf"{name} could not be fetched\. Check the network and try again, or put {file} into {tmp_path}/{name} by "
    with pytest.raises(OSError, match=rf"{told}.*http://127.0.0.1:1/{file}: .*refused"):
        load_images(name, url="http://127.0.0.1:1/", folder=tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_missing_page(server, tmp_path):
    with pytest.raises(OSError, match=r"could not be fetched.*404"):
        load_images("mnist", url=f"{server[0]}/nowhere", folder=tmp_path)


def test_homes_and_hashes():
    for name in ("mnist", "fashion-mnist", "cifar10"):
        assert NAMED[name].homes
        assert all(home.endswith("/") for home in NAMED[name].homes)
        assert all(len(bytes.fromhex(sha256)) == 32 for sha256 in NAMED[name].sha256.values())
    assert len({sha256 for known in NAMED.values() for sha256 in known.sha256.values()}) == 9
    assert pooch.__version__


def test_named_files_that_are_not(tmp_path):
    for array in (np.zeros((5, 32, 32), np.uint8), np.zeros((5, 28, 28)), np.zeros((5, 784), np.uint8)):
        np.savez(tmp_path / "mnist.npz", x_train=array)
        with pytest.raises(ValueError, match=rf"mnist.npz is not mnist: it has {array.dtype} of shape .*Delete it to"):
            load_images("mnist", folder=tmp_path)
    (tmp_path / "cifar10.npz").write_bytes(b"half")
    with pytest.raises(
        ValueError, match=r"cifar10.npz is not cifar10: .*cannot be read as an array.*Delete it to have"
    ):
        load_images("cifar10", folder=tmp_path)


def test_interrupted_while_saving(server, tmp_path, monkeypatch):
    def savez(path, **arrays):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", savez)
        with pytest.raises(KeyboardInterrupt):
            load_images("cifar10", url=f"{server[0]}/cifar10", folder=tmp_path)
    assert not list(tmp_path.glob("*.npz"))
    assert not list(tmp_path.glob(".*"))
    assert len(load_images("cifar10", folder=tmp_path).train) == 10


# CelebA, as whoever has it puts it there.


@pytest.fixture
def faces(tmp_path, monkeypatch):
    """Six aligned images, four of them for training: grey levels 10, 20, ... in the central 140×140, white around."""
    monkeypatch.setattr(module, "CELEBA", 4)
    contents = {}
    for i in range(1, 7):
        face = np.full((218, 178, 3), 255, np.uint8)
        face[39:179, 19:159] = 10 * i
        out = io.BytesIO()
        Image.fromarray(face).save(out, "jpeg", quality=100)
        contents[f"{i:06d}.jpg"] = out.getvalue()
    return contents


def put(faces, folder, kind):
    if kind == "folder":
        (folder / "img_align_celeba").mkdir()
        for name, content in faces.items():
            (folder / "img_align_celeba" / name).write_bytes(content)
        return
    inside = {"zip": "img_align_celeba", "zip in a folder": "img_align_celeba/img_align_celeba"}[kind]
    with zipfile.ZipFile(folder / "img_align_celeba.zip", "w") as archive:
        archive.writestr("__MACOSX/img_align_celeba/000001.jpg", b"rubbish")
        for name, content in reversed(faces.items()):
            archive.writestr(f"{inside}/{name}", content)


@pytest.mark.parametrize("side", [32, 64])
@pytest.mark.parametrize("kind", ["zip", "zip in a folder", "folder"])
def test_celeba(faces, tmp_path, kind, side):
    put(faces, tmp_path, kind)
    found = load_images(f"celeba{side}", folder=tmp_path)
    assert found.train.shape == (4, 3, side, side)
    assert found[1:4] == (None, None, None)
    assert (found.name, found.size, found.flip) == (f"celeba{side}", (side, side), True)
    for i, face in enumerate(found.train):  # nothing of the white around, but for what compression let in
        assert np.abs(face[:, 1:-1, 1:-1].astype(int) - 10 * (i + 1)).max() <= 2
    again = load_images(f"celeba{side}", folder=tmp_path)
    np.testing.assert_array_equal(again.train, found.train)
    assert [path.name for path in tmp_path.glob("*.npz")] == [f"celeba{side}.npz"]


def test_celeba_refused(faces, tmp_path):
    told = rf"terms do not let it be fetched.*put img_align_celeba.zip, or the folder .*, into {tmp_path}\."
    with pytest.raises(FileNotFoundError, match=told):
        load_images("celeba32", folder=tmp_path)
    put(faces, tmp_path, "folder")
    third = tmp_path / "img_align_celeba" / "000003.jpg"
    out = io.BytesIO()
    Image.new("RGB", (89, 109)).save(out, "jpeg")
    for content, reason in {
        None: "KeyError",
        third.read_bytes()[:500]: "Truncated File Read",
        out.getvalue(): "109×89 and not 218×178",
    }.items():
        third.unlink()
        if content is not None:
            third.write_bytes(content)
        with pytest.raises(
            ValueError, match=f"000003.jpg of CelebA is missing or broken .*{reason}.*; its first 4 are"
        ):
            load_images("celeba64", folder=tmp_path)
        third.write_bytes(content or b"")
    assert not list(tmp_path.glob("*.npz"))


# The real sets.


@pytest.mark.parametrize(
    ("name", "train", "test", "note"),
    [
        ("mnist", (60_000, 1, 32, 32), (10_000, 1, 32, 32), "zeros around bring 28×28 to 32×32"),
        ("cifar10", (50_000, 3, 32, 32), (10_000, 3, 32, 32), ""),
        ("celeba32", (10_000, 3, 32, 32), None, "10,000 of the 182,637 training images"),
    ],
)
def test_real(real_data, name, train, test, note):
    if not (real_data / f"{name}.npz").exists():
        pytest.skip(f"no {name}.npz in BISM_DATA")
    found = load_images(name)
    assert found.train.shape == train
    assert (None if found.test is None else found.test.shape) == test
    assert found.note == note
    assert found.flip == (name == "celeba32")
    if test is not None:
        labels = [found.train_labels, found.test_labels]
        assert [len(y) for y in labels if y is not None] == [train[0], test[0]]
        assert all(set(np.unique(y)) == set(range(10)) for y in labels if y is not None)
    if name == "cifar10":
        assert hashlib.sha256(np.moveaxis(found.train, 1, -1).tobytes()).hexdigest().startswith("47af8b02cfcfb6cd")
    if name == "mnist":
        assert hashlib.sha256(found.crop(found.train).tobytes()).hexdigest().startswith("741c988805d008ac")
