"""Measured variants of a model, kept in SQLite as they finish: a killed search goes on where it was."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from diag.errors import OutputError

Metrics = dict[str, dict[str, float]]


class TrialStore:
    """Metrics by (run key, lowered layers, batches). JSON's own Infinity and NaN stay inside this file."""

    def __init__(self, path: Path, key: str) -> None:
        """`key` identifies model, plan, table and data; trials of another key are never found.

        Raises OutputError when the file cannot be written or is not a trial store.
        """
        self._key = key
        try:
            self._db = sqlite3.connect(path, check_same_thread=False)
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("CREATE TABLE IF NOT EXISTS trials (id TEXT PRIMARY KEY, metrics TEXT NOT NULL)")
            self._db.commit()
        except sqlite3.Error as error:
            raise OutputError(
                f"trials cannot be kept in {str(path)!r}: {error}", "Remove the file."
            ) from error

    def find(self, low: frozenset[str], batches: tuple[int, ...]) -> Metrics | None:
        """Metrics of an earlier trial, None when there was none."""
        row = self._db.execute(
            "SELECT metrics FROM trials WHERE id = ?", (self._id(low, batches),)
        ).fetchone()
        return json.loads(row[0]) if row else None

    def keep(self, low: frozenset[str], batches: tuple[int, ...], metrics: Mapping[str, object]) -> None:
        """Write a trial down; it survives a kill from here on."""
        try:
            with self._db:
                self._db.execute(
                    "INSERT OR REPLACE INTO trials VALUES (?, ?)",
                    (self._id(low, batches), json.dumps(metrics)),
                )
        except sqlite3.Error as error:
            raise OutputError(f"a trial cannot be kept: {error}", "Check the free space.") from error

    def _id(self, low: frozenset[str], batches: tuple[int, ...]) -> str:
        text = "\n".join([self._key, *sorted(low), *map(str, batches)])
        return hashlib.sha256(text.encode()).hexdigest()
