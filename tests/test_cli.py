"""The command line, as a user meets it: in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from bism.evaluation import Trained


def bism(*arguments, cwd, quickly=False):
    """Compiled `quickly`, which runs slower: for what compiles much and computes little."""
    flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0"} if quickly else {}
    command = [sys.executable, "-m", "bism", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, env=os.environ | flags)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A Gaussian RBM trained by the command line on a table with units of its own."""
    folder = tmp_path_factory.mktemp("table")
    rng = np.random.default_rng(0)
    table = rng.normal([50.0, -3.0, 0.0], [10.0, 0.1, 1.0], (400, 3))
    np.savetxt(folder / "table.csv", table, delimiter=",", header="a,b,c", comments="")
    done = bism("train", "table.csv", "--model", "grbm", "--steps", 3000, "--batch-size", 50, "--unroll", 1, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, table, done


def test_train_keeps_a_run_folder(trained):
    folder, _, done = trained
    run = folder / "runs" / "table-bidsm"
    assert "report: runs/table-bidsm/report.html" in done.stdout
    config = json.loads((run / "config.json").read_text())
    assert config["config"]["steps"] == 3000
    assert config["settings"]["data_shape"] == [360, 3]
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 3000
    assert (run / "report.html").read_text().count("<img") == 3
    assert sorted(x.name for x in (run / "figures").iterdir()) == ["loss.png", "lower.png", "validation.png"]
    assert "Warning" not in done.stderr


def test_samples_come_in_the_units_of_the_data(trained):
    folder, table, _ = trained
    done = bism("sample", "runs/table-bidsm", "--count", 500, "--steps", 100, "--out", "new/drawn.csv", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "new" / "drawn.csv").read_text().splitlines()[0] == "a,b,c"
    drawn = np.loadtxt(folder / "new" / "drawn.csv", delimiter=",", skiprows=1)
    assert drawn.shape == (500, 3)
    assert (np.abs(drawn.mean(0) - table.mean(0)) < 0.5 * table.std(0)).all()
    assert (np.abs(np.log(drawn.std(0) / table.std(0))) < np.log(2)).all()


def test_evaluate_prints_a_log_likelihood_in_the_units_of_the_data(trained, monkeypatch):
    folder, table, _ = trained
    done = bism("evaluate", "runs/table-bidsm", cwd=folder)
    assert done.returncode == 0, done.stderr
    value = float(next(line for line in done.stdout.splitlines() if line.startswith("log-likelihood")).split()[-1])
    monkeypatch.chdir(folder)
    held_out = Trained.of(folder / "runs" / "table-bidsm").split()[1]
    assert held_out is not None
    z = (held_out - table.mean(0)) / table.std(0)
    gaussian = -0.5 * (z**2).sum(1).mean() - np.log(table.std(0)).sum() - 1.5 * np.log(2 * np.pi)
    assert gaussian - 1.5 < value < gaussian + 0.2
    figures = dict(line.rsplit(maxsplit=1) for line in done.stdout.splitlines())
    assert float(figures["log-likelihood by AIS"]) == pytest.approx(value, abs=0.05)
    assert float(figures["log-likelihood by reverse AIS"]) == pytest.approx(value, abs=0.05)


def test_diagnose_prints_each_response_theorem_2_and_a_verdict(trained):
    folder, _, _ = trained
    done = bism("diagnose", "runs/table-bidsm", cwd=folder)
    assert done.returncode == 0, done.stderr
    for said in ("N=20 ", "NaturalGradient ", "ConjugateGradient ", "plain gradient steps (Theorem 2)", "at K=20"):
        assert said in done.stdout
    rate = next(line for line in done.stdout.splitlines() if line.startswith("conditioned gradient steps"))
    assert float(rate.split()[-1]) > 0.95
    assert " is enough: " in done.stdout.splitlines()[-1]


def test_an_existing_run_is_neither_lost_nor_mixed(trained):
    folder, _, _ = trained
    metrics = folder / "runs" / "table-bidsm" / "metrics.jsonl"
    before = metrics.read_text()
    again = ["train", "table.csv", "--model", "grbm", "--steps", 3000, "--batch-size", 50, "--unroll", 1]
    refused = bism(*again, cwd=folder)
    assert refused.returncode == 1
    assert "already holds a run" in refused.stderr
    other = bism(*again, "--resume", "--sigma", 0.5, cwd=folder)
    assert other.returncode == 1
    assert "other settings: sigma" in other.stderr
    assert metrics.read_text() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "nowhere.npy"), "no such file"),
        (("train", "moons", "--method", "magic"), "unknown method 'magic'; choose from bism, bissm, bidsm"),
        (
            ("train", "moons", "--model", "grbm", "--divergence", "fisher"),
            "a discrete h does not have",
        ),
        (("train", "moons", "--model", "visible"), "--model visible has none: give --method dsm"),
        (("train", "moons", "--method", "dsm"), "give --model visible, or grbm"),
        (("train", "moons", "--implicit", "-N", "3"), "give one of them"),
        (("train", "moons", "--batch-size", "100000"), "there are 54000 examples"),
        (("train", "moons", "--batch-size", "0"), "batch_size must be at least 1, got 0"),
        (("train", "moons", "--learning-rate", "-0.1"), "learning_rate must be positive, got -0.1"),
        (("train", "moons", "--resume"), "runs/moons-bidsm holds no run to go on with"),
        (("sample", "nothing", "--out", "x.txt"), "write samples to a .npy, or of a table to a .csv"),
        (("evaluate", "nothing"), "nothing is not a run"),
        (("reproduce", "checkerboard", "--only", "GAN"), "unknown method 'GAN'"),
    ],
)
def test_mistakes_are_told_in_a_line_or_two(arguments, said, tmp_path):
    done = bism(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) <= 2
    assert "Traceback" not in done.stderr


def test_a_mistyped_run_makes_no_folder(tmp_path):
    done = bism("sample", "nothing", cwd=tmp_path)
    assert (done.returncode, list(tmp_path.iterdir())) == (1, [])
    assert "nothing is not a run" in done.stderr


def test_a_run_that_is_told_to_end_is_saved(tmp_path):
    """By SIGTERM, as schedulers do."""
    arguments = ["train", "moons", "--model", "grbm", "--steps", "1000000", "--out", "run"]
    with subprocess.Popen([sys.executable, "-m", "bism", *arguments], cwd=tmp_path, stderr=subprocess.PIPE) as process:
        metrics, end = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 300
        while not (metrics.exists() and metrics.read_text()) and time.monotonic() < end and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        told = process.stderr.read().decode()
        assert process.wait(60) == 143, told
    step = int(next((tmp_path / "run" / "checkpoints").iterdir()).name)
    assert f"Interrupted; --resume, or resume=True, goes on from iteration {step}." in told


def test_version_and_help(tmp_path):
    assert bism("--version", cwd=tmp_path).stdout.startswith("bism 0.")
    text = bism("train", "--help", cwd=tmp_path).stdout
    assert "--lower-steps" in text
    assert "(20000; images by preset)" in text


def test_images_from_their_name_to_a_report(tmp_path):
    small = ("--steps", 8, "--width", 4, "--h-dim", 3, "-K", 1, "--batch-size", 20)
    done = bism("train", "digits", *small, cwd=tmp_path, quickly=True)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "digits-bimdsm"
    assert "8/8" in done.stderr
    assert "images/s" in done.stderr
    drawn = {path.stem for path in (run / "figures").iterdir()}
    assert drawn == {
        *("loss", "posterior-Fisher", "samples", "nearest", "conditional", "interpolation", "restoration", "energies"),
        "t-sne",
        *(f"samples-{step}" for step in range(1, 9)),
    }
    report = (run / "report.html").read_text()
    assert report.count("<img") == 9
    assert "linear SVM of the latents" in report
    done = bism("sample", run, "--count", 3, "--steps", 10, "--sampler", "langevin", cwd=tmp_path, quickly=True)
    assert done.returncode == 0, done.stderr
    samples = np.load(run / "samples.npy")
    assert (samples.shape, samples.dtype) == ((3, 8, 8), np.uint8)
    assert (run / "samples.png").exists()
    done = bism("diagnose", run, cwd=tmp_path)
    assert done.returncode == 1
    assert "diagnose is for tables" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("digits", "--depth", 3), "--depth is for tables of numbers, and digits holds images"),
        (("moons", "--preset", "paper"), "--preset is for images, and moons holds no images"),
        (("digits", "--preset", "slow"), "unknown preset 'slow'"),
    ],
)
def test_options_of_the_other_kind_are_refused(tmp_path, arguments, told):
    done = bism("train", *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert told in done.stderr
    assert not (tmp_path / "runs").exists()
