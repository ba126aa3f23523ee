"""What an engine was built from, kept beside it, so that it is never taken for another's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from diag.errors import EngineError
from diag.files import write_text

SCHEMA = "trtdiag.engine/1"
SUFFIX = ".json"

_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Identity:
    """SHA-256 of what went into an engine; empty where there was none."""

    model_sha256: str = ""
    plan_sha256: str = ""
    table_sha256: str = ""


@dataclass(frozen=True, slots=True)
class Stamp:
    """All that decides what an engine computes, and where it can run."""

    engine_sha256: str
    identity: Identity
    flavour: str
    version: str
    compute_capability: str = ""
    gpu: str = ""
    flags: Mapping[str, str] = field(default_factory=dict)
    profiles: Mapping[str, list[list[int]]] = field(default_factory=dict)
    timing_cache_sha256: str = ""
    log: str = ""
    kernels: int = 0


def stamp_path(engine: str | Path) -> Path:
    """Where the stamp of an engine lies: `<engine>.json`."""
    file = Path(engine)
    return file.with_name(file.name + SUFFIX)


def write_stamp(engine: str | Path, stamp: Stamp) -> None:
    """Write the stamp beside the engine."""
    write_text(json.dumps({"schema": SCHEMA, **asdict(stamp)}, indent=1) + "\n", stamp_path(engine))


def read_stamp(engine: str | Path) -> Stamp:
    """The stamp of an engine. Raises EngineError when it is missing or malformed."""
    file = stamp_path(engine)
    if not file.is_file():
        raise EngineError(
            f"engine {str(engine)!r} has no stamp {file.name!r} beside it: what it is built from is unknown",
            "Build it with trtdiag build, or copy the stamp along with the engine.",
        )
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if values.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        identity = Identity(**values.pop("identity"))
        return Stamp(identity=identity, **values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineError(f"stamp {str(file)!r} is malformed: {error}", "Build the engine again.") from error


def check_stamp(
    engine: str | Path,
    identity: Identity,
    *,
    flavour: str = "",
    version: str = "",
    compute_capability: str = "",
    flags: Mapping[str, str] | None = None,
) -> Stamp:
    """The engine's stamp when it fits what is asked for; what is left empty is not asked.

    Raises EngineError that lists every difference: the engine file changed, or it was built from another
    model, plan or table, by another version, for another GPU, or with other flags.
    """
    stamp = read_stamp(engine)
    differences = _identity_differences(stamp.identity, identity)
    asked = {"flavour": flavour, "version": version, "compute_capability": compute_capability}
    for name, value in asked.items():
        if value and getattr(stamp, name) != value:
            differences.append(f"{name.replace('_', ' ')} {getattr(stamp, name)!r}, asked for {value!r}")
    for name, value in (flags or {}).items():
        if stamp.flags.get(name, "off") != value:
            differences.append(f"{name} {stamp.flags.get(name, 'off')}, asked for {value}")
    if sha256_of(Path(engine)) != stamp.engine_sha256:
        differences.append("the engine file itself changed since it was stamped")
    if differences:
        raise EngineError(
            f"engine {str(engine)!r} is not the one asked for: {'; '.join(differences)}",
            "Build it again with trtdiag build.",
        )
    return stamp


def _identity_differences(built: Identity, asked: Identity) -> list[str]:
    found = []
    for entry in fields(Identity):
        have, want = getattr(built, entry.name), getattr(asked, entry.name)
        if want and have != want:
            found.append(f"built from another {entry.name.removesuffix('_sha256')} ({have[:12] or 'none'})")
    return found


def sha256_of(path: Path) -> str:
    """SHA-256 of a file; empty when it does not exist. Raises EngineError when it cannot be read."""
    if not path.is_file():
        return ""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise EngineError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    return digest.hexdigest()
