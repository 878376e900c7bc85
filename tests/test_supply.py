"""What the project takes from elsewhere: pinned actions, exact versions, licences beside the text of others."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_workflow_actions_are_pinned_by_commit_and_may_only_read() -> None:
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        used = re.findall(r"uses:\s*(\S+)", text)
        assert used
        assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name) for name in used), used
        assert re.search(r"^permissions:\n  contents: read$", text, re.MULTILINE)


def test_constraints_are_exact_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.partition(";")[0].strip() for line in lines if line and not line.startswith("#")]
    assert pins
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*", pin) for pin in pins)
    assert "torch==2.13.0" in pins  # without +cpu: it also matches a wheel that has it


def test_the_text_of_others_has_its_licence_beside_it() -> None:
    assert "CC BY-SA" in (ROOT / "results" / "pythia14m" / "examples" / "LICENSE.md").read_text()
