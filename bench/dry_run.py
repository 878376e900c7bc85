"""What a run would compute, without computing it: `--dry-run` of bench.lds."""

from bench.experiment import Execution, Experiment
from bench.runner import Session
from retrain.units import checkpoint_unit, retrain_units


def dry_run(experiment: Experiment, execution: Execution | None = None) -> str:
    """What a run would compute, and with `force` or `rescore` what it would do again."""
    execution = execution or Execution()
    session = Session(experiment, execution, control=True)
    store, force = session.store, execution.force
    lines = []
    for seed in experiment.seeds:
        base = checkpoint_unit(session.task, seed, 0, execution.device)
        is_trained = store.has(base.kind, base.config)
        lines.append(f"seed {seed}: base model {_state(is_trained, force, 'to train')}")
        for share in experiment.shares(session.task):
            for plan in session.plans(seed, share):
                units = retrain_units(session.task, plan, execution.device)
                done = sum(store.has(unit.kind, unit.config) for unit in units)
                todo = f"{len(units)} to do, of which {done} again" if force and done else f"{len(units) - done} to do"
                lines.append(f"  alpha {plan.alpha:g} of {share:g}: {done} of {len(units)} retrains cached, {todo}")
            for variant in session.active:
                cached = is_trained and all(
                    scorer.is_trained() and scorer.cached(some)
                    for scorer, some in session.scorers(variant, seed, share)
                )
                which = f" ({variant.settings})" if variant.rows != "both" else ""  # raw and normalised have their own
                lines.append(f"  {variant.label}{which}: {_state(cached, force or execution.rescore, 'to score')}")
    if references := session.reference_units(session.blocks):
        done = sum(store.has(unit.kind, unit.config) for unit in references)
        lines.append(f"reference models that methods look at: {done} of {len(references)} trained")
    if further := {store.key(unit.kind, unit.config) for unit in session.further(session.active)}:
        done = len(store.present(("retrain", key) for key in further))
        lines.append(f"further retrains that methods ask for: {done} of {len(further)} cached")
    lines += [f"  {label}: skipped, {reason}" for label, reason in session.skipped.items()]
    return "\n".join([*session.notes, *lines, *(f"  {problem}" for problem in session.out.problems)])


def _state(cached: bool, again: bool, todo: str) -> str:
    return todo if not cached else f"{todo} again" if again else "cached"
