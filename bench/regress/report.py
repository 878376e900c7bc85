"""What the user reads of the gate: a table, Markdown for a step summary, JUnit XML for a build server."""

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

from bench.regress.judge import Verdict
from bench.tables import number, table


def verdict_table(verdicts: Sequence[Verdict], wide: bool = False) -> str:
    """A line a check; what is behind the numbers beside them if `wide`, else below, of those that did not pass."""
    header = ["task", "method", "check", "verdict", "value", "limit"]
    rows, notes = [], ["what it is", "----------"]
    for verdict in verdicts:
        if verdict.error:
            rows.append([verdict.task, verdict.method, "run", "FAIL", "-", "-"])
            notes.append(verdict.error)
        for check in verdict.checks:
            limit = f"{check.relation} {number(check.limit)}"
            rows.append([verdict.task, verdict.method, check.name, check.state, number(check.value), limit])
            notes.append(check.note)
    if not rows:
        return "nothing was gated"
    lines = table(header, rows, left=4).splitlines()
    if wide:
        width = max(len(line) for line in lines)
        return "\n".join(f"{line.ljust(width)}  {note}" for line, note in zip(lines, notes, strict=True))
    failed = [
        f"{row[2]} of {row[1]} on {row[0]}: {note}"
        for row, note in zip(rows, notes[2:], strict=True)
        if row[3] == "FAIL"
    ]
    return "\n".join([*lines, *([""] if failed else []), *failed])


def closing_lines(verdicts: Sequence[Verdict]) -> str:
    """The warnings, and the verdict on all."""
    lines = [
        f"warning, {verdict.method} on {verdict.task}: {text}" for verdict in verdicts for text in verdict.warnings
    ]
    failed = [f"{verdict.method} on {verdict.task}" for verdict in verdicts if not verdict.passed]
    seconds = sum(verdict.seconds for verdict in verdicts)
    what = f"FAILED: {', '.join(failed)}" if failed else "passed"
    return "\n".join([*lines, "", f"{what} ({len(verdicts)} methods, {seconds:.0f} s)"])


def markdown(verdicts: Sequence[Verdict]) -> str:
    """For the GitHub step summary: one line a method, and the failed checks under it."""
    lines = [
        "### tda-bench gate",
        "",
        "| task | method | verdict | seconds | checks |",
        "| --- | --- | --- | --- | --- |",
    ]
    marks = {"pass": "", "warn": " (warning)", "FAIL": " **FAIL**"}
    for verdict in verdicts:
        cells = [f"{c.name} {number(c.value)} ({c.relation} {number(c.limit)}){marks[c.state]}" for c in verdict.checks]
        text = verdict.error or "; ".join(cells)
        lines.append(
            f"| {verdict.task} | `{verdict.method}` | {'pass' if verdict.passed else '**FAIL**'} "
            f"| {verdict.seconds:.0f} | {text.replace('|', '/')} |"
        )
    for verdict in verdicts:
        lines += [f"- `{verdict.method}` on {verdict.task}, warning: {text}" for text in verdict.warnings]
        lines += [f"- `{verdict.method}` on {verdict.task}, {c.name}: {c.note}" for c in verdict.checks if not c.passed]
    return "\n".join(lines) + "\n"


def junit(verdicts: Sequence[Verdict]) -> str:
    """One test case a check; the first carries the seconds and the warnings."""
    cases, failures = [], 0
    for verdict in verdicts:
        where = f"classname={quoteattr(f'{verdict.task}.{verdict.method}')}"
        seconds, notes = verdict.seconds, "".join(f"<system-out>{escape(t)}</system-out>" for t in verdict.warnings)
        failed = {
            c.name: f"{number(c.value)}, expected {c.relation} {number(c.limit)}: {c.note}"
            for c in verdict.checks
            if not c.passed
        }
        names = [check.name for check in verdict.checks]
        if verdict.error:
            names, failed = ["run", *names], {"run": verdict.error, **failed}
        for name in names:
            body = f"<failure message={quoteattr(failed[name])}/>" if name in failed else ""
            failures += name in failed
            cases.append(f'  <testcase {where} name="{name}" time="{seconds:.3f}">{body}{notes}</testcase>')
            seconds, notes = 0.0, ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<testsuites><testsuite name="bench.regress" tests="{len(cases)}" failures="{failures}" errors="0">\n'
        + "\n".join(cases)
        + "\n</testsuite></testsuites>\n"
    )
