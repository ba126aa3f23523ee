"""The real command as a process: interrupted, killed, without room, without a reader."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest

from diag.report.io import read_report

BATCHES = 8


@pytest.fixture
def slow(tmp_path):
    """Data that take their time: a script that sleeps before each batch, as long as the file `sleep` says."""
    script = tmp_path / "slow.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import time
            from pathlib import Path

            from fixtures.graphs import bert

            def load_data():
                for seed in range({BATCHES}):
                    time.sleep(float(Path(__file__).with_name("sleep").read_text()))
                    yield bert().batch(2, seed)
            """
        )
    )
    (tmp_path / "sleep").write_text("0.2")
    return script


def stop_half_way(words, environment, after, how):
    """Run until layers are compared and `after` seconds have passed; then send it the signal."""
    with subprocess.Popen(
        words, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "comparing layers" in line:
                break
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(after)
        running.send_signal(how)
        return running.wait(30), running.stderr.read()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_goes_on(process, command, environment, model, slow, tmp_path, how):
    out = tmp_path / "out"
    words = ["compare", str(model), "--format", "int8", "--data", str(slow), "--out", str(out)]
    code, err = stop_half_way([*command, *words], environment, 0.2 * BATCHES / 2 + 0.1, how)
    if how is signal.SIGINT:
        assert code == 130
        assert err.splitlines()[-1].startswith("trtdiag: interrupted")
        assert "Traceback" not in err
    assert [path.name for path in out.iterdir()] == [".compare.state.npz"]
    (tmp_path / "sleep").write_text("0")
    ended = process(*words)
    assert ended.code == 0, ended.err
    assert f"of {BATCHES} batches were done before" in ended.err
    plain = process(*words[:-1], tmp_path / "plain")
    assert "resumed" not in plain.err
    assert sorted(path.name for path in out.iterdir()) == ["plan.yaml", "report.html", "report.json"]
    assert numbers(out) == numbers(tmp_path / "plain")


def numbers(folder):
    """The report without what may differ between two runs of the same thing."""
    body = read_report(folder / "report.json").model_dump(exclude={"run": {"command", "seconds", "started"}})
    del body["run"]["peak_memory_mb"]
    for finding in body["findings"]:
        finding["mend"].pop("command")
    return body


def test_a_second_run_of_the_same_does_not_resume(process, model, data, tmp_path):
    words = ("compare", model, "--format", "fp16", "--data", data, "--out", tmp_path / "out")
    assert [("resumed" in process(*words).err) for _ in range(2)] == [False, False]


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("compare MODEL --format int8 --data DATA --out OUT", []),
        ("compare MODEL --format fp16 --data DATA --out OUT --save-typed", []),
        ("convert MODEL --format fp16 --out OUT/typed.onnx", []),
        ("report REPORT --out OUT/page.html", []),
    ],
)
def test_no_room_for_results(process, model, data, report, tmp_path, words, kept):
    """No file may grow beyond 4 kB: the error that a full disk gives, in another shade."""
    out = tmp_path / "out"
    names = {"MODEL": model, "DATA": data, "OUT": out, "REPORT": report}
    for name, path in names.items():
        words = words.replace(name, str(path))

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    ended = process(*shlex.split(words), preexec_fn=limit)
    assert ended.code == 3
    assert ended.out == ""
    last = ended.err.splitlines()[-1]
    assert last.startswith("trtdiag: error: ")
    assert "cannot be written: File too large" in last
    assert "Traceback" not in ended.err
    assert [path.name for path in out.iterdir()] == kept


def test_an_earlier_report_survives_a_full_disk(process, model, data, tmp_path):
    out = tmp_path / "out"
    words = ("compare", model, "--data", data, "--out", out, "--quiet")
    assert process(*words, "--format", "fp16").code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    assert process(*words, "--format", "int8", preexec_fn=limit).code == 3
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_full_disk(command, environment, model, data):
    """A file system of its own, of 64 kB, where the system lets us make one."""
    unshare = shutil.which("unshare")
    mounts = [unshare or "", "--mount", "--map-root-user", "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
    if unshare is None or subprocess.run(mounts, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    words = [*command, "compare", str(model), "--format", "int8", "--data", str(data), "--out", "/mnt/out"]
    script = f"{mounts[-1]}; {shlex.join(words)}; echo $?; ls -A /mnt/out"
    done = subprocess.run([*mounts[:-1], script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3"]
    assert done.stderr.splitlines()[-1].endswith(
        "No space left on device. Check the folder and the free space."
    )


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_standard_output_that_is_full(process, report, more):
    with Path("/dev/full").open("w") as full:
        ended = process(
            "gate", report, "--fail-under", "sqnr_db>=1", *more, stdout=full, stderr=-1, capture_output=False
        )
    assert ended.code == 3
    assert ended.err == "trtdiag: error: standard output cannot be written: No space left on device.\n"


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_reader_that_goes_away(command, environment, report, more):
    """As in `trtdiag ... | head -0`: no traceback, and the exit code still says what was found."""
    reading, writing = os.pipe()
    os.close(reading)
    words = [*command, "gate", str(report), "--fail-under", "sqnr_db>=99", *more]
    done = subprocess.run(
        words, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_runs_in_any_folder_and_writes_only_into_out(process, model, data, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    words = ("compare", model, "--format", "int8", "--data", data, "--out", tmp_path / "out", "--quiet")
    assert process(*words, cwd=tmp_path / "elsewhere").code == 0
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_relative_paths(process, model, tmp_path):
    words = (
        "compare",
        model.name,
        "--format",
        "fp16",
        "--data",
        "data",
        "--out",
        tmp_path / "out",
        "--quiet",
    )
    assert process(*words, cwd=model.parent).code == 0
    assert read_report(tmp_path / "out" / "report.json").model.path == model.name


def test_random_data_are_said_loudly(trtdiag, image_model, tmp_path):
    words = ("compare", image_model, "--format", "fp16", "--data", "random:1", "--limit", "2")
    run = trtdiag(*words, "--out", tmp_path / "out", "--json").json["run"]
    assert (run["random_data"], run["seed"], run["batches"]) == (True, 1, 2)
    assert "andom" in trtdiag(*words, "--out", tmp_path / "out").out


def test_data_that_the_model_cannot_take(trtdiag, model, tmp_path):
    """64 positions where the model knows 48: ONNX Runtime stops, and the sentence says what to look at."""
    words = ("compare", model, "--format", "fp16", "--data", "random:1", "--out", tmp_path / "out")
    ended = trtdiag(*words)
    assert ended.code == 3
    assert "Gather" in ended.err
    assert "Check the data" in ended.err
