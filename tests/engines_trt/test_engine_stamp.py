"""An engine is never taken for another's."""

from __future__ import annotations

from pathlib import Path

import pytest

from diag.engines.stamp import Identity, Stamp, check_stamp, read_stamp, sha256_of, stamp_path, write_stamp
from diag.errors import EngineError

IDENTITY = Identity("m" * 64, "p" * 64, "t" * 64)


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    file = tmp_path / "m.engine"
    file.write_bytes(b"vtrt and more")
    stamp = Stamp(
        engine_sha256=sha256_of(file),
        identity=IDENTITY,
        flavour="tensorrt-rtx",
        version="1.7.1",
        compute_capability="SM89",
        flags={"tf32": "on"},
        profiles={"x": [[1, 64], [8, 64], [16, 64]]},
    )
    write_stamp(file, stamp)
    return file


def test_round_trip_and_fit(engine: Path) -> None:
    stamp = check_stamp(
        engine, IDENTITY, flavour="tensorrt-rtx", version="1.7.1", flags={"tf32": "on", "REFIT": "off"}
    )
    assert stamp == read_stamp(engine)
    assert check_stamp(engine, Identity()) == stamp


@pytest.mark.parametrize(
    ("identity", "more", "says"),
    [
        (Identity("x" * 64), {}, "another model"),
        (Identity(plan_sha256="x" * 64), {}, "another plan"),
        (Identity(table_sha256="x" * 64), {}, "another table"),
        (Identity(), {"flavour": "tensorrt"}, "flavour 'tensorrt-rtx'"),
        (Identity(), {"version": "1.8"}, "version '1.7.1', asked for '1.8'"),
        (Identity(), {"compute_capability": "SM120"}, "compute capability 'SM89'"),
        (Identity(), {"flags": {"tf32": "off"}}, "tf32 on, asked for off"),
    ],
)
def test_each_difference_is_refused(
    identity: Identity, more: dict[str, str], says: str, engine: Path
) -> None:
    with pytest.raises(EngineError, match=says):
        check_stamp(engine, identity, **more)  # type: ignore[arg-type]


def test_all_differences_are_told_at_once(engine: Path) -> None:
    with pytest.raises(EngineError, match=r"another model.*another plan.*version"):
        check_stamp(engine, Identity("x" * 64, "y" * 64), version="2")


def test_a_changed_engine_is_refused(engine: Path) -> None:
    engine.write_bytes(b"vtrt and other")
    with pytest.raises(EngineError, match="changed since it was stamped"):
        check_stamp(engine, IDENTITY)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"schema": "trtdiag.engine/9"}', '{"schema": "trtdiag.engine/1"}']
)
def test_a_malformed_stamp(text: str, engine: Path) -> None:
    stamp_path(engine).write_text(text)
    with pytest.raises(EngineError, match="malformed"):
        read_stamp(engine)


def test_a_missing_stamp(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no stamp"):
        read_stamp(tmp_path / "m.engine")
