"""Measured variants of a model, kept in SQLite as they finish: a killed search goes on where it was."""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path

from diag.errors import OutputError
from diag.pipeline.search.outcome import Outcome


class TrialStore:
    """Outcomes by (run key, lowered layers, batch)."""

    def __init__(self, path: Path, key: str) -> None:
        """`key` identifies model, plan, table and data; trials of another key are never found.

        Raises OutputError when the file cannot be written or is not a trial store.
        """
        self._key = key
        try:
            self._db = sqlite3.connect(path, check_same_thread=False)
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("CREATE TABLE IF NOT EXISTS trials (id TEXT PRIMARY KEY, outcome TEXT NOT NULL)")
            self._db.commit()
        except sqlite3.Error as error:
            raise OutputError(
                f"trials cannot be kept in {str(path)!r}: {error}", "Remove the file."
            ) from error

    def find(self, low: frozenset[str], batch: int) -> Outcome | None:
        """What an earlier trial came to, None when there was none."""
        row = self._db.execute("SELECT outcome FROM trials WHERE id = ?", (self._id(low, batch),)).fetchone()
        return Outcome.load(row[0]) if row else None

    def keep(self, low: frozenset[str], batch: int, outcome: Outcome) -> None:
        """Write a trial down; it survives a kill from here on."""
        try:
            with self._db:
                self._db.execute(
                    "INSERT OR REPLACE INTO trials VALUES (?, ?)", (self._id(low, batch), outcome.dump())
                )
        except sqlite3.Error as error:
            raise OutputError(f"a trial cannot be kept: {error}", "Check the free space.") from error

    def _id(self, low: frozenset[str], batch: int) -> str:
        text = "\n".join([self._key, *sorted(low), str(batch)])
        return hashlib.sha256(text.encode()).hexdigest()
