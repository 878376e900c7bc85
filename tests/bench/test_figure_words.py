"""The words of figures: settings said once, and headings of one size."""

import json
from pathlib import Path
from typing import Any

import pandas as pd

from bench.figures.words import settings_text
from bench.records import load_results
from tests.bench.test_figures import draw
from tests.helpers.synthetic_results import write_examples, write_run


def test_settings_that_a_name_has_are_not_said_twice(tmp_path: Path) -> None:
    options = {"ekfac@damping=0.3": {"damping": 0.3}}
    write_run(tmp_path, methods=("ekfac@damping=0.3",), options=options, shares=(0.1,), seeds=(1,), alphas=(0.1,))
    rows = load_results(tmp_path).rows
    assert set(rows["series"]) == {"EK-FAC, damping=0.3"}
    assert settings_text(rows) == ""
    assert settings_text(rows, ["prior BIF: draws=100"]) == "Settings. prior BIF: draws=100."


def test_a_prior_s_settings_are_said_once_however_many_rows_learn_from_it(tmp_path: Path) -> None:
    learnt = [
        f"datamodel@prior=bif+gamma:100.0+step_size:1e+4,retrains={count}{more}"
        for count in (100, 300)
        for more in ("", ",covariance=queries")
    ]
    known = {label: {"retrains": 100 * (1 + k // 2)} for k, label in enumerate(learnt)}
    write_run(tmp_path, methods=("bif", *learnt), options=known, shares=(1.0,), seeds=(1,), alphas=(0.1,))
    (drawing,) = draw("retraining", tmp_path)
    assert drawing.figure is not None
    words = " ".join(" ".join(text.get_text().split()) for text in drawing.figure.texts)
    for text in (words, drawing.caption):
        assert text.count("prior BIF: gamma=100, step_size=1e+4") == 1
        assert "retrains=100" not in text


def test_headings_of_examples_have_letters_of_one_size(tmp_path: Path) -> None:
    write_examples(tmp_path)
    (drawing,) = draw("examples", tmp_path)
    assert drawing.figure is not None
    headings = [t for t in drawing.figure.texts if t.get_text().endswith(("loss most", "raise it most", "query"))]
    headings = [text for text in headings if text.get_va() == "bottom"]
    assert len(headings) > 3
    assert len({text.get_fontsize() for text in headings}) == 1


def test_a_linear_ceiling_of_one_seed_alone_is_in_no_table_and_no_caption_over_seeds(tmp_path: Path) -> None:
    place = write_run(tmp_path, shares=(0.1,), seeds=(1, 2), alphas=(0.5,), linear_ceiling=True)
    (table,) = draw("table", tmp_path)
    assert table.table is not None
    assert "linear ceiling" in table.table
    record = json.loads((place / "run.json").read_text())
    for ceiling in record["ceilings"]:
        if ceiling["seed"] == 2:
            ceiling["linear_high"] = 1.0
    (place / "run.json").write_text(json.dumps(record))
    (table,), (lds,), seeds = (draw(name, tmp_path) for name in ("table", "lds", "seeds"))
    assert table.table is not None
    assert "linear ceiling" not in table.table
    assert "Linear ceiling" not in table.caption + lds.caption
    for drawing in seeds:
        assert "Linear ceiling" in drawing.caption
        assert "mean reliability" not in drawing.caption  # every seed has its own there


def test_captions_speak_of_a_linear_ceiling_where_it_is_drawn(tmp_path: Path) -> None:
    """In a panel that is where the record of its first rows knows it, not one of some of its methods."""
    known: dict[str, Any] = {"task": "digits", "shares": (1.0,), "seeds": (1,), "alphas": (0.5,)}
    write_run(tmp_path, methods=("bif", "ekfac"), **known)
    write_run(tmp_path, methods=("trak",), run_id="later0000000", linear_ceiling=True, **known)
    (lds,), (table,) = (draw(name, tmp_path) for name in ("lds", "table"))
    assert lds.figure is not None
    drawn = "linear ceiling" in [text.get_text() for text in lds.figure.legends[0].texts]
    assert ("Linear ceiling" in lds.caption) is drawn is False
    assert "Linear ceiling" in table.caption


def test_scores_that_were_handed_in_say_so() -> None:
    given = {"method": "mine", "series": "mine", "settings": "scores_are=loss-change, scores_sha256=b3bc01683bc3"}
    assert settings_text(pd.DataFrame([given])) == "Settings. mine: scores from a file."
