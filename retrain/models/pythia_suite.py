"""The Pythia suite's public configurations, what follows from their shapes alone, and models of them without weights.

    suite_configuration("2.8b")                              # hidden 2,560, 32 layers, 2,775,208,960 parameters
    build_random(suite_configuration("12b"), device="cuda")  # bfloat16, made on the GPU: no copy in host memory

Time and memory of a method do not depend on the values of the weights, so a randomly initialised model of the same
shape measures what the real one would cost (bench.scaling); its scores mean nothing.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from retrain.errors import UsageError
from retrain.models.causal_lm import CausalLM
from retrain.safe_files import SafeFileError, read_json

HUB_PREFIX = "EleutherAI/pythia-"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """The shape of a GPT-NeoX: what its cost depends on."""

    name: str
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int = 50304
    positions: int = 2048
    rotary_share: float = 0.25  # of each head's dimensions
    parallel_residual: bool = True

    @cached_property
    def linear_shapes(self) -> list[tuple[int, int]]:
        """(d_in, d_out) of every attention and MLP layer, all blocks; each has a bias. The output head is not in."""
        block = [
            (self.hidden, 3 * self.hidden),
            (self.hidden, self.hidden),
            (self.hidden, self.intermediate),
            (self.intermediate, self.hidden),
        ]
        return block * self.layers

    @cached_property
    def num_parameters(self) -> int:
        """Every parameter: input embedding and output head (not tied), blocks, normalisations."""
        linear = sum(d_in * d_out + d_out for d_in, d_out in self.linear_shapes)
        normalisations = (2 * self.layers + 1) * 2 * self.hidden
        return 2 * self.vocabulary * self.hidden + linear + normalisations

    @cached_property
    def num_token_parameters(self) -> int:
        """Parameters that multiply every token: all but the input embedding, which is a look-up."""
        return self.num_parameters - self.vocabulary * self.hidden

    @cached_property
    def num_tracked_parameters(self) -> int:
        """Attention and MLP weights, without biases: what BIF samples and EK-FAC has factors for."""
        return sum(d_in * d_out for d_in, d_out in self.linear_shapes)

    @cached_property
    def eigen_cost(self) -> float:
        """Sum of d_in^3 + d_out^3 over the tracked layers: what EK-FAC's eigendecompositions grow with."""
        return float(sum(d_in**3 + d_out**3 for d_in, d_out in self.linear_shapes))

    @cached_property
    def num_covariances(self) -> int:
        """Numbers in the covariances of both sides of the tracked layers, or in their eigenvectors.

        kronfluence treats a bias as one more input, so the input side has d_in + 1 rows.
        """
        return sum((d_in + 1) ** 2 + d_out**2 for d_in, d_out in self.linear_shapes)

    @cached_property
    def num_lambdas(self) -> int:
        """EK-FAC's corrected eigenvalues: one a weight and bias of the tracked layers."""
        return sum((d_in + 1) * d_out for d_in, d_out in self.linear_shapes)

    @cached_property
    def rotation_cost(self) -> float:
        """FLOP that turn one sequence's gradients into the eigenbasis: two products a tracked layer."""
        return float(sum(2 * (d_in + 1) * d_out * (d_in + 1 + d_out) for d_in, d_out in self.linear_shapes))

    def factor_bytes(self, bytes_per_number: int = 2) -> int:
        """What EK-FAC's fit writes: covariances and eigenvectors of both sides, and a lambda for every weight."""
        eigenvalues = sum(d_in + 1 + d_out for d_in, d_out in self.linear_shapes)
        return (2 * self.num_covariances + eigenvalues + self.num_lambdas) * bytes_per_number

    def with_layers(self, layers: int) -> "Configuration":
        """As wide, but only so many blocks deep."""
        return replace(self, layers=layers)


SUITE = {
    configuration.name: configuration
    for configuration in (
        Configuration(name="14m", hidden=128, layers=6, heads=4, intermediate=512),
        Configuration(name="31m", hidden=256, layers=6, heads=8, intermediate=1024),
        Configuration(name="70m", hidden=512, layers=6, heads=8, intermediate=2048),
        Configuration(name="160m", hidden=768, layers=12, heads=12, intermediate=3072),
        Configuration(name="410m", hidden=1024, layers=24, heads=16, intermediate=4096),
        Configuration(name="1b", hidden=2048, layers=16, heads=8, intermediate=8192),
        Configuration(name="1.4b", hidden=2048, layers=24, heads=16, intermediate=8192),
        Configuration(name="2.8b", hidden=2560, layers=32, heads=32, intermediate=10240),
        Configuration(name="6.9b", hidden=4096, layers=32, heads=32, intermediate=16384, vocabulary=50432),
        Configuration(name="12b", hidden=5120, layers=36, heads=40, intermediate=20480, vocabulary=50688),
    )
}


def suite_configuration(name: str) -> Configuration:
    """Of a size of the suite, or of a folder with a GPT-NeoX config.json."""
    short = name.removeprefix(HUB_PREFIX).removeprefix("pythia-")
    if short in SUITE:
        return SUITE[short]
    path = Path(name) / "config.json"
    if not path.is_file():
        raise UsageError(
            f'unknown model "{name}"; expected one of {", ".join(SUITE)}, or a folder with a GPT-NeoX config.json'
        )
    try:
        content = read_json(path, follow_links=True)
        if content.get("model_type") != "gpt_neox":
            raise UsageError(f'{path}: model_type is "{content.get("model_type")}"; expected gpt_neox')
        rope = content.get("rope_parameters") or {}
        return Configuration(
            name=Path(name).resolve().name,
            hidden=content["hidden_size"],
            layers=content["num_hidden_layers"],
            heads=content["num_attention_heads"],
            intermediate=content["intermediate_size"],
            vocabulary=content["vocab_size"],
            positions=content["max_position_embeddings"],
            rotary_share=content.get("rotary_pct", rope.get("partial_rotary_factor", 0.25)),
            parallel_residual=content.get("use_parallel_residual", True),
        )
    except SafeFileError as error:
        raise UsageError(str(error)) from None
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: is no GPT-NeoX configuration ({type(error).__name__}: {error})") from None


def transformers_configuration(configuration: Configuration) -> Any:
    from transformers import GPTNeoXConfig

    rotary: Any = {"rotary_pct": configuration.rotary_share}  # transformers 5 turns it into rope_parameters
    made = GPTNeoXConfig(
        vocab_size=configuration.vocabulary,
        hidden_size=configuration.hidden,
        num_hidden_layers=configuration.layers,
        num_attention_heads=configuration.heads,
        intermediate_size=configuration.intermediate,
        max_position_embeddings=configuration.positions,
        use_parallel_residual=configuration.parallel_residual,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
        **rotary,
    )
    made._attn_implementation = "sdpa"
    return made


def build_random(
    configuration: Configuration,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> nn.Module:
    """The architecture with its usual initialisation (normal, 0.02), made on `device` in `dtype`: no detour."""
    from transformers import GPTNeoXForCausalLM

    device = torch.device(device)
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            with device:
                transformer = GPTNeoXForCausalLM(transformers_configuration(configuration))
        finally:
            torch.set_default_dtype(before)
    return CausalLM(transformer).eval()


def keep_layers(model: nn.Module, layers: int) -> nn.Module:
    """The same model with only its first blocks; changed in place."""
    transformer: Any = model.transformer if isinstance(model, CausalLM) else model
    transformer.gpt_neox.layers = transformer.gpt_neox.layers[:layers]
    transformer.config.num_hidden_layers = layers
    return model
