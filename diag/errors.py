"""Errors that a user can act on: what is wrong, where, and what to do. Caught once, in the command line."""

from __future__ import annotations


class TrtdiagError(Exception):
    """Base of all errors with a remedy. `exit_code` follows docs/reference.md: 2 input, 3 tool or engine."""

    exit_code = 2

    def __init__(self, problem: str, hint: str = "") -> None:
        """`problem` says in one sentence what is wrong and where; `hint` says what to do."""
        self.problem = problem.rstrip(".")
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        return f"{self.problem}. {self.hint}".strip() if self.hint else f"{self.problem}."


class UsageError(TrtdiagError):
    """An option, or a combination of options, that cannot work."""


class ModelError(TrtdiagError):
    """The ONNX model is missing, broken, or holds something that cannot be handled."""


class DataError(TrtdiagError):
    """Input data is missing, or does not fit the model."""


class PlanError(TrtdiagError):
    """A precision plan that is malformed, matches nothing, or contradicts itself."""


class TableError(TrtdiagError):
    """A calibration table that is malformed or belongs to another model."""


class StatsError(TrtdiagError):
    """Activation statistics that are malformed, or of another model, table or tensors."""


class ReportError(TrtdiagError):
    """A report that is malformed or of a version that this release cannot read."""


class OutputError(TrtdiagError):
    """Results cannot be written where they were asked for."""

    exit_code = 3


class EngineError(TrtdiagError):
    """An inference engine is missing, refuses the model, or fails while it runs it."""

    exit_code = 3


class NotEnoughEvidenceError(TrtdiagError):
    """The data are too few to decide."""

    exit_code = 4
