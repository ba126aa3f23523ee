"""The data that a model is fed, whatever they come from: one batch in memory, as often as needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from diag.errors import DataError, UsageError
from diag.feeds.archives import Archives
from diag.feeds.check import checked
from diag.feeds.noise import parse_noise
from diag.feeds.saved_json import SavedJson
from diag.feeds.script import Script
from diag.feeds.source import Batch, RawBatch, Source, natural_key, unreadable
from diag.model.graph import TensorInfo

_KINDS = "DATA is an .npz file or a folder of them, saved inputs (.json), a script (.py) or random:SEED."


class Feeds:
    """Batches for a model: a mapping of input name to array each, checked against the model's inputs.

    Every iteration reads the data again, so nothing but the current batch is in memory, and raises
    DataError at the first batch that does not fit.
    """

    def __init__(
        self,
        source: Source,
        inputs: Mapping[str, TensorInfo],
        limit: int | None = None,
        finite: bool = True,
        labelled: bool = False,
    ) -> None:
        """`limit`: take only the first so many batches; `finite`: refuse NaN and infinity; `labelled`: allow
        arrays that are no inputs.

        Use `open_feeds` to make one from a path. Raises UsageError on a limit below 1.
        """
        if limit is not None and limit < 1:
            raise UsageError(f"a limit of {limit} batches leaves nothing to run", "Give 1 or more.")
        self._source = source
        self._inputs = inputs
        self._limit = limit
        self._finite = finite
        self._labelled = labelled

    def __iter__(self) -> Iterator[Batch]:
        for _, batch in self.with_origins():
            yield batch

    def with_origins(self) -> Iterator[tuple[str, Batch]]:
        """Every batch, and where it comes from, as an error names it."""
        for raw in islice(self._source.batches(), self._limit):
            yield raw.origin, self._checked(raw)

    def with_labels(self) -> Iterator[tuple[Batch, Batch]]:
        """Every batch, and the arrays beside it that are no inputs of the model (labels)."""
        for raw in islice(self._source.batches(), self._limit):
            batch = self._checked(raw)
            yield batch, {n: np.asarray(v) for n, v in raw.values.items() if n not in self._inputs}

    def _checked(self, raw: RawBatch) -> Batch:
        return checked(raw, self._inputs, self._finite, self._labelled)

    def __len__(self) -> int:
        return self._source.count(self._limit)

    def first(self) -> Batch:
        """The first batch. Raises DataError when there is none or it does not fit the model."""
        for batch in self:
            return batch
        raise DataError(f"there is no batch in the {self.label}", "Give at least one batch.")

    @cached_property
    def label(self) -> str:
        """What is fed, in words for a report."""
        return self._source.label(self._limit)

    @property
    def random(self) -> bool:
        """Whether the values are random numbers instead of real inputs."""
        return self._source.seed is not None

    @property
    def seed(self) -> int | None:
        """Seed of random data, None for real ones."""
        return self._source.seed

    @cached_property
    def sha256(self) -> str:
        """Identity of the batches taken: names, sizes and contents of their files (or the seed's)."""
        return self._source.digest(self._limit)

    @cached_property
    def _first_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(array.shape) for name, array in self.first().items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each input in the first batch; later batches may differ in dynamic dimensions."""
        return dict(self._first_shapes)

    def check_all(self) -> int:
        """Read and check every batch now; the number of batches. Raises DataError at the first bad one."""
        return sum(1 for _ in self)


def open_feeds(
    spec: str,
    inputs: Mapping[str, TensorInfo],
    limit: int | None = None,
    finite: bool = True,
    labelled: bool = False,
) -> Feeds:
    """Open the data that `spec` names and check the first batch against the model's `inputs`.

    `spec` is an .npz file or a folder of them (natural order), Polygraphy's JSON of saved inputs (file or
    folder), a Python file with `load_data()` (or `FILE.py:FUNCTION`), or `random:SEED[:OPTIONS]`.
    `limit` takes the first so many batches; with `finite` false, NaN and infinity may be among the values;
    `labelled` allows arrays beside the inputs (labels).

    Raises DataError when the data are missing, unreadable or do not fit; UsageError on a limit below 1.
    """
    feeds = Feeds(open_source(spec, inputs), inputs, limit, finite, labelled)
    feeds.shapes()
    return feeds


def open_source(spec: str, inputs: Mapping[str, TensorInfo]) -> Source:
    """Where the batches that `spec` names come from, unread. Raises DataError when there is none."""
    path = Path(spec)
    if path.is_dir():
        return _folder(spec, path)
    if path.is_file():
        return _file(spec, path)
    if spec == "random" or spec.startswith("random:"):
        return parse_noise(spec, inputs)
    name, colon, function = spec.rpartition(":")
    if colon and name.endswith(".py") and Path(name).is_file():
        return Script(Path(name), function)
    raise DataError(f"data {spec!r} do not exist", _KINDS)


def _file(spec: str, path: Path) -> Source:
    kind = path.suffix.lower()
    if kind == ".npz":
        return Archives(spec, (path,))
    if kind == ".json":
        return SavedJson(spec, (path,))
    if kind == ".py":
        return Script(path)
    raise DataError(f"{spec!r} is of no kind of data that can be read ({kind or 'no extension'})", _KINDS)


def _folder(spec: str, path: Path) -> Source:
    try:
        files = sorted((f for f in path.iterdir() if not f.name.startswith(".")), key=natural_key)
    except OSError as error:
        raise unreadable(path, error) from error
    archives = tuple(f for f in files if f.suffix.lower() == ".npz")
    saved = tuple(f for f in files if f.suffix.lower() == ".json")
    if archives:
        return Archives(spec, archives)
    if saved:
        return SavedJson(spec, saved)
    held = f"only {files[0].name!r} and the like" if files else "nothing"
    raise DataError(f"data folder {spec!r} holds no .npz files ({held})", _KINDS)
