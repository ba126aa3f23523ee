"""What to do about drift: fix the preprocessing, recalibrate, change the method, pin, or nothing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from diag.drift.compare import Compared
from diag.drift.preprocess import swapped_channels, wrong_scale
from diag.drift.remedy import FP16_SQNR_DB, Remedy, coreset, remedy
from diag.drift.rules import DriftRules
from diag.drift.spread import Double
from diag.drift.stats import Stats
from diag.pipeline.drift.parts import Focus
from diag.pipeline.drift.settings import DriftSettings
from diag.pipeline.drift.sources import Sources
from diag.pipeline.settings import compare_rules
from diag.plan.schema import pin_for, plan_for_format, plan_to_yaml
from diag.report.drift import DriftAdvice


@dataclass(frozen=True)
class Advisor:
    """What advice is made from."""

    sources: Sources
    focus: Focus
    settings: DriftSettings
    rules: DriftRules
    readers: Mapping[str, Sequence[str]]
    """Layers that read each tensor, where the model is at hand."""

    @property
    def compared(self) -> Compared:
        return self.focus.compared

    def advise(self) -> list[DriftAdvice]:
        """Everything worth doing, the most likely cause first."""
        fixes = list(self._preprocessing())
        if any(self.compared.verdict.cause in fix.tensors for fix in fixes):
            return fixes  # what follows from wrong pixels needs no remedy of its own
        names = [name for name in self.compared.drifting if self.compared.pairs[name][1].spread.elements]
        if not names:
            return fixes or [DriftAdvice(action="nothing", text="The calibrated ranges fit production.")]
        remedies = {name: remedy(self.compared.pairs[name]) for name in names}
        return [*fixes, *self._ranges(remedies), *self._pins(remedies)]

    def _preprocessing(self) -> list[DriftAdvice]:
        found = []
        for name in self._inputs():
            text = wrong_scale(*self.compared.pairs[name], self.rules)
            if text is not None:
                gain = self._undone_db(name)
                found.append(self._fix(f"Production's {text} (tensor {name}).", name, gain))
        for name, means in self._channel_means().items():
            if swapped_channels(*means, self.rules):
                text = f"Production's channels look reversed, BGR for RGB: swapped, their means fit ({name})."
                found.append(self._fix(text, name, None))
        return found

    def _fix(self, text: str, name: str, gain_db: float | None) -> DriftAdvice:
        return DriftAdvice(
            action="fix-preprocessing",
            text=text,
            tensors=[name],
            gain_db=gain_db,
            command=shlex.join(
                ["trtdiag", "profile", self._model, "--data", "FIXED", "--out", "fixed.stats"]
            ),
        )

    def _inputs(self) -> list[str]:
        """Float inputs, and the first tensor that drifts if it is the first of all."""
        kinds = {tensor.name: tensor.kind for tensor in self.sources.production.tensors}
        names = [name for name in self.compared.pairs if kinds.get(name) == "input"]
        first = next((name for name in self.compared.pairs if kinds.get(name) != "input"), None)
        return names or ([first] if first is not None and first == self.compared.verdict.cause else [])

    def _undone_db(self, name: str) -> float:
        """The gain when production's values are put back on calibration's scale."""
        calibration, production = self.compared.pairs[name]
        back = production.scaled(calibration.absmax / max(production.absmax, 1e-30))
        return back.noise.sqnr_db - production.noise.sqnr_db

    def _channel_means(self) -> dict[str, tuple[Double, Double]]:
        """Means of the channels at the model's entrance, where both sides hold them."""
        before, now = self.sources.calibration.stats, self.focus.stats
        if before is None:
            return {}
        names = [t.name for t in now.tensors if t.kind == "input"]
        names += [t.name for t in now.tensors if t.kind != "input"][:1]
        found = {}
        for name in names:
            if name in before.channels and name in now.channels:
                means = _means(before, name), _means(now, name)
                if means[0] is not None and means[1] is not None:
                    found[name] = means[0], means[1]
        return found

    def _ranges(self, remedies: Mapping[str, Remedy]) -> list[DriftAdvice]:
        found = []
        gains = [name for name, r in remedies.items() if r.recalibrated_db - r.now_db >= self.rules.worth_db]
        if gains:
            worst = min((remedies[name] for name in gains), key=lambda r: r.now_db)
            found.append(
                DriftAdvice(
                    action="recalibrate",
                    text=f"Recalibrate with production data: it mends {_counted(len(gains), 'tensor')}.",
                    tensors=gains,
                    requests=self._coreset(gains),
                    gain_db=worst.recalibrated_db - worst.now_db,
                    command=self._calibrate(),
                )
            )
        other = [name for name, r in remedies.items() if r.best_db - r.recalibrated_db >= self.rules.worth_db]
        if other:
            named = min((remedies[name] for name in other), key=lambda r: r.now_db)
            found.append(
                DriftAdvice(
                    action="change-method",
                    text=f"Choose the ranges of {_counted(len(other), 'tensor')} by least error (mse): rare "
                    "large values widen them more than they are worth.",
                    tensors=other,
                    gain_db=named.best_db - named.now_db,
                    command=self._calibrate("mse"),
                )
            )
        return found

    def _pins(self, remedies: Mapping[str, Remedy]) -> list[DriftAdvice]:
        bad_db = compare_rules().bad_sqnr_db
        hopeless = [name for name, r in remedies.items() if r.best_db < bad_db]
        if not hopeless:
            return []
        layers = [layer for name in hopeless for layer in self.readers.get(name, ())]
        worst = min((remedies[name] for name in hopeless), key=lambda r: r.now_db)
        readers = _counted(len(layers), "layer") if layers else "the layers that read them"
        return [
            DriftAdvice(
                action="pin",
                text=f"No INT8 range gives {_counted(len(hopeless), 'tensor')} {bad_db:.0f} dB on "
                f"production: keep {readers} in FP16.",
                tensors=hopeless,
                gain_db=FP16_SQNR_DB - worst.now_db,
                command=self._compare(layers),
            )
        ]

    def pinned_plan(self, advice: Sequence[DriftAdvice]) -> str | None:
        """The plan of the pins among `advice`, as YAML; None without any, or without the model."""
        names = [name for one in advice if one.action == "pin" for name in one.tensors]
        layers = dict.fromkeys(layer for name in names for layer in self.readers.get(name, ()))
        if not layers:
            return None
        pins = tuple(pin_for(layer, "fp16", "drift: no INT8 range fits") for layer in layers)
        return plan_to_yaml(plan_for_format("int8").model_copy(update={"pins": pins}))

    def _coreset(self, names: Sequence[str]) -> list[str]:
        stats = self.focus.stats
        reach = stats.sample[[stats.index[name] for name in names], :, 0].astype(np.float64)
        labels = [stats.labels[int(key)] for key in stats.sample_keys]
        return coreset(np.nan_to_num(reach), labels)

    @property
    def _model(self) -> str:
        return self.settings.model or "MODEL"

    def _calibrate(self, method: str | None = None) -> str:
        words = ["trtdiag", "calibrate", self._model, "--data", self.settings.data or "PRODUCTION"]
        words += ["--method", method] if method else []
        return shlex.join([*words, "--out", "recalibrated.json"])

    def _compare(self, layers: Sequence[str]) -> str:
        plan = f"{self.settings.out.rstrip('/')}/pinned.yaml" if layers else "PLAN"
        words = ["trtdiag", "compare", self._model, "--plan", plan]
        words += ["--data", self.settings.data or "PRODUCTION", "--calibration", "recalibrated.json"]
        return shlex.join([*words, "--out", f"{self.settings.out.rstrip('/')}-pinned"])


def _means(stats: Stats, name: str) -> Double | None:
    """Mean of each channel; None where their number varied."""
    channels = stats.channels[name]
    size = channels.absmax.size
    if not size or not channels.elements:
        return None
    return np.asarray(channels.sums.floats()[:size] / channels.elements, np.float64)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
