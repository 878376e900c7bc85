"""Every method's score matrix for an experiment's question: what questions beside LDS begin with.

Scores are made, claimed and kept like those of `bench.lds`, and are the same entries of the store: whoever has run one
of the commands does not score again for another.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from baselines.method import Attribution
from bench.ensembles import Ensemble
from bench.experiment import Execution, Experiment, Session
from bench.ground_truth import make_units, obtain
from bench.variants import Variant
from retrain.errors import UsageError

ScoreKind = Literal["raw", "normalised"]
SCORE_CHOICES = {"raw": ("raw",), "normalised": ("normalised",), "both": ("raw", "normalised")}


@dataclass(frozen=True, eq=False)
class Answered:
    """A variant with its scores for one seed and share."""

    variant: Variant
    attribution: Attribution
    record: dict[str, Any]  # seconds, memory, diagnostics

    def scores(self, kind: ScoreKind) -> np.ndarray | None:
        """(queries, n): the predicted change of the query's loss when the example is included."""
        if self.variant.rows not in ("both", kind):
            return None
        found = self.attribution.normalised() if kind == "normalised" else self.attribution.scores
        return None if found is None else found.numpy()

    def self_influence(self) -> np.ndarray | None:
        """(n,): how much each attributed example bears on its own loss; None where the method has no such thing.

        A method declares it by the scale of its examples: `Attribution.train_scale` is its square root (GradSim: the
        gradient's norm; EK-FAC and kfac: the norm in the inverse curvature; TRAK: in its kernel; BIF: the standard
        deviation of the example's own loss). A scale that is the same for all, or none, declares none.
        """
        scale = self.attribution.train_scale
        if scale is None or len(torch.unique(scale)) < 2:
            return None
        return scale.double().square().numpy()

    def told(self) -> dict[str, Any]:
        """What stands in every row of it."""
        names = ("fit_seconds", "score_seconds", "peak_memory_bytes", "device")
        return {
            "method": self.variant.method.name,
            "label": self.variant.label,
            "settings": self.variant.settings,
            "origin": self.variant.origin,
            **{name: self.record[name] for name in names},
        }


SeedAndShare = tuple[int, float]  # seed, share


def answering_session(experiment: Experiment, execution: Execution, has_alpha: bool = False) -> Session:
    """A session that keeps score matrices whatever their size; `has_alpha`: the question names the share kept."""
    session = Session(experiment, replace(execution, keep_scores="always"))
    for variant in session.active:
        count, kept = variant.method.further_subsets()
        if count and not kept and not has_alpha:
            raise UsageError(
                f"{variant.label} retrains by itself, and nothing here says which share of the examples its subsets "
                f"keep; say it as {variant.method.name}@alpha=0.9"
            )
    session.say_who_is_missing()
    return session


def attributions(session: Session) -> dict[SeedAndShare, list[Answered]]:
    """Every block's variants with their scores; one that fails is among the session's problems."""
    jobs = {"name": f"{session.task.name} base models", **session.execution.jobs}
    obtain(session.base_units(session.experiment.seeds), session.store, force=session.execution.force, **jobs)
    if further := session.further(session.active):
        make_units(further, session.store, progress=True, **{**jobs, "name": f"{session.task.name} further retrains"})
    for seed, share in session.blocks:
        for variant in session.active:
            for scorer, plans in session.scorers(variant, seed, share):
                own = Ensemble.first(scorer)  # these questions are about the base model alone
                entry = session.store.read("scores", own.config)
                if entry is not None and "scores" not in entry.arrays:  # a run that did not keep the matrix
                    own.forget(plans, fits=False)
    found: dict[SeedAndShare, list[Answered]] = {}
    for block, made in session.score().items():
        found[block] = []
        for variant, _ in made:
            entry = session.store.read("scores", session.scorer(variant, *block).config)
            attribution = session.scorer(variant, *block).stored_scores()
            if entry is None or attribution is None:
                session.out.problems.append(f"{variant.label} left no score matrix in the cache")
            else:
                found[block].append(Answered(variant, attribution, entry.record))
    return found
