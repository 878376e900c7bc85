"""What a run would compute, without computing it: `--dry-run` of bench.lds and bench.tune."""

from bench.experiment import Execution, Experiment
from bench.runner import Session
from retrain.units import checkpoint_unit, retrain_units


def dry_run(experiment: Experiment, execution: Execution | None = None) -> str:
    """What a run would compute, and with `force` or `rescore` what it would do again."""
    execution = execution or Execution()
    session = Session(experiment, execution, control=True)
    lines = []
    again = execution.force or execution.rescore
    for seed in experiment.seeds:
        lines.append(base_line(session, seed))
        for share in experiment.shares(session.task):
            lines += truth_lines(session, seed, share)
            for variant in session.active:
                cached = is_trained(session, seed) and all(
                    scorer.is_trained() and scorer.cached(some)
                    for scorer, some in session.scorers(variant, seed, share)
                )
                which = f" ({variant.settings})" if variant.rows != "both" else ""  # raw and normalised have their own
                lines.append(f"  {variant.label}{which}: {_state(cached, again, 'to score', 'to score again')}")
    if references := session.reference_units(session.blocks):
        done = sum(session.store.has(unit.kind, unit.config) for unit in references)
        lines.append(f"reference models that methods look at: {done} of {len(references)} trained")
    if further := {session.store.key(unit.kind, unit.config) for unit in session.further(session.active)}:
        done = len(session.store.present(("retrain", key) for key in further))
        lines.append(f"further retrains that methods ask for: {done} of {len(further)} cached")
    lines += [f"  {label}: skipped, {reason}" for label, reason in session.skipped.items()]
    return "\n".join([*session.notes, *lines, *(f"  {problem}" for problem in session.out.problems)])


def is_trained(session: Session, seed: int) -> bool:
    base = checkpoint_unit(session.task, seed, 0, session.execution.device)
    return session.store.has(base.kind, base.config)


def base_line(session: Session, seed: int) -> str:
    state = _state(is_trained(session, seed), session.execution.force, "to train", "to train again")
    return f"seed {seed}: base model {state}"


def truth_lines(session: Session, seed: int, share: float) -> list[str]:
    lines = []
    for plan in session.plans(seed, share):
        units = retrain_units(session.task, plan, session.execution.device)
        done = sum(session.store.has(unit.kind, unit.config) for unit in units)
        redone = f", of which {done} again" if session.execution.force and done else ""
        todo = len(units) if session.execution.force else len(units) - done
        lines.append(
            f"  alpha {plan.alpha:g} of {share:g}: {done} of {len(units)} retrains cached, {todo} to do{redone}"
        )
    return lines


def _state(cached: bool, again: bool, todo: str, redo: str) -> str:
    return todo if not cached else redo if again else "cached"
