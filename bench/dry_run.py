"""What a run would compute, without computing it: `python -m bench.lds --dry-run`."""

from bench.experiment import Execution, Experiment, Session, shares_of
from retrain.train import checkpoint_unit, retrain_units


def dry_run(experiment: Experiment, execution: Execution | None = None) -> str:
    """What a run would compute, and with `force` or `rescore` what it would do again."""
    execution = execution or Execution()
    session = Session(experiment, execution)
    store, lines = session.store, []
    again = execution.force or execution.rescore
    for seed in experiment.seeds:
        base = checkpoint_unit(session.task, seed, 0, execution.device)
        trained = store.has(base.kind, base.config)
        lines.append(f"seed {seed}: base model {_state(trained, execution.force, 'to train', 'to train again')}")
        for share in shares_of(experiment, session.task):
            plans = session.plans(seed, share)
            for plan in plans:
                units = retrain_units(session.task, plan, execution.device)
                done = sum(store.has(unit.kind, unit.config) for unit in units)
                redone = f", of which {done} again" if execution.force and done else ""
                todo = len(units) if execution.force else len(units) - done
                lines.append(
                    f"  alpha {plan.alpha:g} of {share:g}: {done} of {len(units)} retrains cached, {todo} to do{redone}"
                )
            for variant in session.active:
                cached = trained and all(scorer.cached(some) for scorer, some in session.scorers(variant, seed, share))
                which = f" ({variant.settings})" if variant.rows != "both" else ""  # raw and normalised have their own
                lines.append(f"  {variant.label}{which}: {_state(cached, again, 'to score', 'to score again')}")
    if further := {store.key(unit.kind, unit.config) for unit in session.further(session.active)}:
        done = len(store.present(("retrain", key) for key in further))
        lines.append(f"further retrains that methods ask for: {done} of {len(further)} cached")
    lines += [f"  {label}: skipped, {reason}" for label, reason in session.skipped.items()]
    return "\n".join([*session.notes, *lines, *(f"  {problem}" for problem in session.out.problems)])


def _state(cached: bool, again: bool, todo: str, redo: str) -> str:
    return todo if not cached else redo if again else "cached"
