"""BIF's settings from elsewhere: the paper's, and what tuning may try."""

from collections.abc import Mapping, Sequence
from typing import Any

from baselines.bif.pilot import MOST_DRAWS

# tab:bif_hyperparam_summary, "Retraining ResNet" and "Retraining LLM" (where attention weights alone are sampled), and
# "Vision" for the task of that name.
PAPER_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "images": {
        "sampler": "sgld", "gradient": "minibatch", "chains": 4, "draws": 100, "burn_in": 0, "thinning": 1,
        "minibatch": 1024, "step_size": 1e-5, "n_beta": 200.0, "gamma": 1e4,
    },
    "sequences": {
        "sampler": "sgld", "gradient": "minibatch", "chains": 4, "draws": 300, "burn_in": 150, "thinning": 1,
        "minibatch": 128, "step_size": 2e-6, "n_beta": 800.0, "gamma": 5e4, "parameters": "attention",
    },
    "googlenet": {
        "sampler": "sgld", "gradient": "minibatch", "chains": 15, "draws": 1000, "burn_in": 10, "thinning": 1,
        "minibatch": 256, "step_size": 1e-4, "n_beta": 10.0, "gamma": 1000.0,
    },
}  # fmt: skip

# The pilot's choice and its neighbours at steps of 1 / gamma; more draws; the paper's own; and RMSprop-SGLD after a
# burn-in at small n_beta, as devinterp's authors run it (its steps are short, so a draw is five of them).
GRID: Sequence[Mapping[str, tuple[Any, ...]]] = [
    {"gamma": (0.0, 1e3, 1e4, 1e5, 1e6)},
    {"gamma": (1e4, 1e5), "n_beta": (1000.0,)},
    {"draws": (MOST_DRAWS,)},
    {"gamma": (1e4,), "n_beta": (200.0,), "step_size": (1e-5,), "draws": (100,)},
    {"sampler": ("rmsprop_sgld",), "burn_in": (20,), "thinning": (5,), "n_beta": (1.0, 10.0, 100.0)},
]
