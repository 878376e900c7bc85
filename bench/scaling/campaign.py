"""The measurements behind results/scaling, in parts that each fit one command on one GPU, ordered by what they decide.

    python -m bench.scaling --campaign                                          # the plan, with predicted seconds
    python -m bench.scaling --campaign ekfac-large bif --text FILE --tokenizer FOLDER --cache CACHE --out OUT
    python -m bench.scaling --merge OUT/*/scaling.json --out results/scaling --rates bench/scaling/rates.csv

Every part resumes: finished points are kept in the cache, and EK-FAC's finished parts too. EK-FAC writes its factors
below the cache: in memory (/dev/shm) a disk's own speed is no part of its seconds. Weights are random, since
cost does not depend on them; EK-FAC's fitting sets beyond what is measured are projected to the paper's 1,000,000.
"""

from dataclasses import dataclass, replace
from typing import Any

from bench.scaling.specifications import SweepRequest
from retrain.errors import UsageError

PAPER_SETS = (400, 10_000, 1_000_000)  # rows that every model has, measured or projected
THREE_SIZES = ("14m", "410m", "2.8b")  # the smallest, one between, and the paper's largest
NEEDS = ("the verdict", "every claim")  # what a part is for; each includes those before


@dataclass(frozen=True)
class CampaignPart:
    name: str
    decides: str
    needed_for: str  # one of NEEDS
    budget_seconds: float  # of one point
    requests: tuple[dict[str, Any], ...]


def _ekfac(
    model: str,
    layers: tuple[int, ...],
    fit_examples: tuple[int, ...],
    besides: tuple[int, ...] = PAPER_SETS,
    **more: Any,
) -> dict[str, Any]:
    fits = tuple(sorted({*fit_examples, *besides}))
    return {"models": (model,), "methods": ("ekfac",), "layers": layers, "fit_examples": fits, **more}


def _bif(*models: str, **more: Any) -> dict[str, Any]:
    return {"models": models, "methods": ("bif",), **more}


PARTS = (
    CampaignPart(
        "ekfac-large", "seconds a fitting sequence at 2.8b, 8 of 32 layers, apart from what is fixed", "the verdict",
        330.0, (_ekfac("2.8b", (2, 8), (100, 200, 400), score_parts=False),),
    ),
    CampaignPart(
        "ekfac-small", "whole runs at full depth; a third fitting set predicted from two; queries", "the verdict",
        120.0, (
            _ekfac("14m", (6,), (400, 2000), queries=(18, 180, 1800)),
            _ekfac("70m", (6,), (200, 400, 2000)),
            _ekfac("160m", (12,), (200, 400, 2000)),
        ),
    ),
    CampaignPart(
        "bif", "100 timed draws from 14m to 410m", "the verdict", 40.0, (_bif("14m", "70m", "160m", "410m"),)
    ),
    CampaignPart("bif-large", "100 timed draws from 1b to 2.8b", "the verdict", 130.0, (_bif("1b", "1.4b", "2.8b"),)),
    CampaignPart(
        "ekfac-410m", "a whole run at full depth, fitted on 2,000 too", "every claim", 330.0,
        (_ekfac("410m", (24,), (100, 400, 2000)),),
    ),
    CampaignPart(
        "ekfac-1b", "a whole run at full depth", "every claim", 400.0,
        (_ekfac("1b", (16,), (100, 200, 400), score_parts=False),),
    ),
    CampaignPart(
        "ekfac-1.4b", "a whole run at full depth", "every claim", 480.0,
        (_ekfac("1.4b", (24,), (100, 200, 400), score_parts=False),),
    ),
    CampaignPart(
        "queries", "BIF at 180 and 1,800 queries, and every token's loss", "every claim", 60.0,
        (
            _bif(*THREE_SIZES, queries=(180, 1800), timed_draws=8),
            {"models": THREE_SIZES, "methods": ("bif_tokens",), "timed_draws": 16},
        ),
    ),
    CampaignPart(
        "ekfac-queries", "EK-FAC at 180 and 1,800 queries, and a few blocks against the whole", "every claim", 360.0,
        (
            _ekfac("14m", (6,), (400,), (), queries=(18, 180, 1800)),
            _ekfac("410m", (2, 4), (100, 400), (), queries=(18, 180, 1800)),
            _ekfac("2.8b", (1, 2), (400,), (), queries=(18, 180, 1800)),
        ),
    ),
    CampaignPart("bif-6.9b", "100 timed draws at 6.9b", "every claim", 360.0, (_bif("6.9b"),)),
    CampaignPart("bif-12b", "100 timed draws at 12b", "every claim", 600.0, (_bif("12b"),)),
    CampaignPart(
        "ekfac-refused", "what EK-FAC would take at 6.9b and 12b, where it does not fit", "every claim", 20.0,
        ({"models": ("6.9b", "12b"), "methods": ("ekfac",), "fit_examples": (400,)},),
    ),
    CampaignPart(
        "ekfac-10000", "whole runs fitted on 10,000; that set from 400 and 2,000", "every claim", 330.0,
        (_ekfac("70m", (6,), (400, 2000)), _ekfac("160m", (12,), (400, 2000))),
    ),
    CampaignPart(
        "31m", "a size that no estimate has seen", "every claim", 150.0,
        (_bif("31m"), _ekfac("31m", (6,), (400, 2000))),
    ),
    CampaignPart(
        "gradsim", "GradSim beside them", "every claim", 60.0, ({"models": THREE_SIZES, "methods": ("gradsim",)},)
    ),
    CampaignPart("trak", "TRAK beside them", "every claim", 60.0, ({"models": THREE_SIZES, "methods": ("trak",)},)),
    CampaignPart(
        "kfac", "our own Kronecker-factored influence beside them", "every claim", 150.0,
        (
            {"models": ("14m", "160m"), "methods": ("kfac",), "fit_examples": (400, 2000)},
            {"models": ("410m",), "methods": ("kfac",), "fit_examples": (400,)},
        ),
    ),
)  # fmt: skip


def find_part(name: str) -> CampaignPart:
    for part in PARTS:
        if part.name == name:
            return part
    raise UsageError(f'unknown part "{name}" of the campaign; expected one of {", ".join(part.name for part in PARTS)}')


def requests_of(part: CampaignPart, base: SweepRequest) -> list[SweepRequest]:
    """What the part measures, with the device, text and seed of `base`."""
    return [replace(base, random_weights=True, **changes) for changes in part.requests]
