"""BIF's measured peak memory against what its chain cannot do without: three times the weights, and the activations.

    python -m bench.scaling.memory                                    # the rows that ship with the package
    python -m bench.scaling.memory --from FILE.csv

Weights count three times: the model, the checkpoint it started from, and the displacement. Activations are what
autograd keeps of one minibatch until the backward pass. They are counted, not measured: the row's architecture on
torch's meta device, every storage once, without parameters and attention matrices, which no fused attention keeps.
"""

import re
import sys
from collections.abc import Sequence
from typing import Any

import torch

from bench.scaling.estimate import RATES, read_rows
from bench.scaling.problem import TRAINABLE
from bench.scaling.row_values import configuration_of
from bench.tables import table
from retrain.command import Parser
from retrain.errors import UsageError
from retrain.models.pythia_suite import Configuration, build_random


def activation_bytes(configuration: Configuration, sequences: int, tokens: int, dtype: torch.dtype) -> int:
    """What a forward pass over so many sequences keeps for its backward pass, up to the last hidden states."""
    meta = torch.device("meta")
    model: Any = build_random(configuration, dtype=dtype, device=meta)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(TRAINABLE, name) is not None)
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}  # the storages themselves, so that none is freed and its place taken by another

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and tuple(tensor.shape[-2:]) != (tokens, tokens):
            kept[storage._cdata] = storage
        return tensor

    inputs = torch.zeros(sequences, tokens, dtype=torch.long, device=meta)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        keep(model.transformer.gpt_neox(inputs).last_hidden_state)
    return sum(storage.nbytes() for storage in kept.values())


def memory_of(row: dict[str, Any]) -> dict[str, Any]:
    """A measured row of BIF beside three times its weights plus activations, in bytes."""
    configuration = configuration_of(row)
    assert configuration is not None
    activations = activation_bytes(
        configuration, int(row["minibatch"]), int(row["tokens"]), getattr(torch, str(row["dtype"]))
    )
    limit = 3 * int(row["weight_bytes"]) + activations
    return {
        "model": row["model"],
        "queries": int(row["queries"]),
        "weights": int(row["weight_bytes"]),
        "activations": activations,
        "limit": limit,
        "peak": int(row["peak_memory_bytes"]),
        "share": row["peak_memory_bytes"] / limit,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m bench.scaling.memory", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--from", dest="source", default=str(RATES), help="a scaling.csv (default: the package's own)")
    arguments = parser.parse_args(argv)
    try:
        rows = [row for row in read_rows(arguments.source) if row["method"] == "bif" and not row.get("error")]
        rows = [row for row in rows if configuration_of(row) is not None]
        if not rows:
            raise UsageError(f"{arguments.source} has no measured row of BIF on a model of the Pythia suite")
    except UsageError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    header = ["model", "queries", "weights", "activations", "3 x weights + activations", "measured peak", "share"]
    lines = []
    for found in map(memory_of, rows):
        sizes = [f"{found[name] / 2**30:.2f} GiB" for name in ("weights", "activations", "limit", "peak")]
        lines.append([found["model"], f"{found['queries']:,}", *sizes, f"{100 * found['share']:.0f} %"])
    print(table(header, lines, left=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
