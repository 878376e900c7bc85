"""The head that never holds its logits: the same losses and gradients as the plain composition, on every path."""

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from retrain.models import fused_cross_entropy
from retrain.models.fused_cross_entropy import Tiles, linear_cross_entropy


def problem(tokens: int, vocabulary: int, width: int, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(device, dtype)
    weight = (0.3 * torch.randn(vocabulary, width, generator=generator)).to(device, dtype)
    targets = torch.randint(vocabulary, (tokens,), generator=generator).to(device)
    return hidden, weight, targets, torch.rand(tokens, generator=generator).to(device)


def expected(hidden, weight, targets, upstream):
    """Losses and gradients in float64, by the definition."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    losses = F.cross_entropy(hidden @ weight.T, targets, reduction="none")
    return losses.detach(), *torch.autograd.grad((losses * upstream).sum(), [hidden, weight])


def found(hidden, weight, targets, upstream):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    losses = linear_cross_entropy(hidden, weight, targets)
    assert losses.dtype == torch.float32
    return losses.detach(), *torch.autograd.grad((losses * upstream).sum(), [hidden, weight])


def check(given, tolerance: float) -> None:
    for mine, right in zip(found(*given), expected(*given), strict=True):
        assert (mine.double() - right).norm() <= tolerance * right.norm()


@pytest.mark.parametrize("chunk", [2**30, 16 * 300 * 16])
def test_chunks_give_the_plain_numbers(monkeypatch, chunk) -> None:
    given = problem(70, 300, 24)
    check(given, 1e-6)  # the plain composition
    monkeypatch.setattr(fused_cross_entropy, "PLAIN_LOGITS", 0)
    monkeypatch.setattr(fused_cross_entropy, "CHUNK_LOGITS", chunk)
    check(given, 1e-6)
    half = problem(70, 300, 24, torch.bfloat16)
    check(half, 4e-3)  # gradients are rounded to bf16, losses are not
    torch.testing.assert_close(found(*half)[0].double(), expected(*half)[0], rtol=1e-5, atol=1e-5)


def test_only_the_wanted_gradient_is_computed(monkeypatch) -> None:
    monkeypatch.setattr(fused_cross_entropy, "PLAIN_LOGITS", 0)
    hidden, weight, targets, _ = problem(9, 30, 8)
    losses = linear_cross_entropy(hidden.requires_grad_(), weight, targets)
    losses.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, targets).requires_grad


def test_autocast_does_not_round_the_logits_and_shapes_that_do_not_fit_are_named() -> None:
    given = problem(20, 50, 8)
    with torch.autocast("cpu", torch.bfloat16):
        losses = linear_cross_entropy(*given[:3])
    torch.testing.assert_close(losses.double(), expected(*given)[0], rtol=1e-5, atol=1e-5)
    hidden, weight, targets, _ = problem(9, 30, 8)
    with pytest.raises(ValueError, match=r"hidden \(9, 8\), weight \(30, 7\)"):
        linear_cross_entropy(hidden, weight[:, :7], targets)


# ---- Triton: interpreted on the CPU where it is installed, for real on a GPU ----


# Triton reads this when it is first imported, hence a process of its own.
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs within the next test")


def interpret_kernels(number_of_tests: int, *files: str) -> None:
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs triton, and a process that does not interpret it yet")
    command = [sys.executable, "-m", "pytest", "-q", *files, "-k", "kernels_of"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.startswith("." * number_of_tests)


def test_the_kernels_in_tritons_interpreter() -> None:
    interpret_kernels(9, __file__)


# Half precision stands for bf16, which the interpreter multiplies wrongly.
SHAPES = [(70, 300, 128, torch.float16), (33, 128, 20, torch.float32), (40, 130, 80, torch.float32)]


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("width", [32, 128])
def test_kernels_of_any_width(shape, width) -> None:
    hidden, weight, targets, upstream = problem(*shape)
    tiles = Tiles(16, 32, width)
    logsumexp, chosen = fused_cross_entropy._triton_forward(hidden, weight, targets, tiles)
    right, _, _ = expected(hidden, weight, targets, upstream)
    torch.testing.assert_close((logsumexp - chosen).double(), right, rtol=1e-4, atol=1e-4)
    slope = fused_cross_entropy._triton_logits_gradient(hidden, weight, targets, logsumexp, upstream, tiles)
    by_torch = fused_cross_entropy._torch_logits_gradient(hidden, weight, targets, logsumexp, upstream)
    torch.testing.assert_close(slope.float(), by_torch.float(), rtol=1e-3, atol=1e-4)


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_of_a_narrow_model(shape) -> None:
    given = hidden, weight, targets, upstream = problem(*shape)
    logsumexp, chosen, slope = fused_cross_entropy._triton_slope(hidden, weight, targets, Tiles(16, 32))
    found = fused_cross_entropy._triton_weight_gradient(hidden, weight, targets, logsumexp, upstream, Tiles(16, 32))
    losses, hidden_gradient, weight_gradient = expected(*given)
    torch.testing.assert_close((logsumexp - chosen).double(), losses, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(slope.double() * upstream[:, None], hidden_gradient, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(found.double(), weight_gradient, rtol=2e-3, atol=3e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(20_000, 50_304, 128), (513, 5_001, 128), (300, 1_000, 2_560), (20_000, 257, 100)])
@pytest.mark.parametrize("narrow", [128, 0])
def test_a_real_gpu_gives_the_plain_numbers(monkeypatch, shape, narrow) -> None:
    monkeypatch.setattr(fused_cross_entropy, "NARROW", narrow)
    given = problem(*shape, torch.bfloat16, "cuda")
    assert fused_cross_entropy.uses_triton(given[0])
    losses = linear_cross_entropy(*given[:3])
    logits = torch.cat([part.float() @ given[1].float().T for part in given[0].split(4096)])
    right = F.cross_entropy(logits, given[2], reduction="none")
    torch.testing.assert_close(losses, right, rtol=1e-4, atol=1e-3)
    mine = found(*given)[1:]
    slope = ((logits.softmax(1) - F.one_hot(given[2], shape[1])) * given[3][:, None]).float()
    for gradient, exact in zip(mine, (slope @ given[1].float(), slope.T @ given[0].float()), strict=True):
        assert (gradient.float() - exact).norm() <= 6e-3 * exact.norm()


@pytest.mark.cuda
def test_it_can_be_captured_in_a_cuda_graph() -> None:
    hidden, weight, targets, _ = problem(20_000, 5_000, 128, torch.bfloat16, "cuda")
    hidden.requires_grad_()
    weight.requires_grad_()

    def step() -> SimpleNamespace:
        losses = linear_cross_entropy(hidden, weight, targets)
        return SimpleNamespace(losses=losses, gradients=torch.autograd.grad(losses.mean(), [hidden, weight]))

    # Warmed up beside the default stream: what autograd ties to that one could not be captured.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        once = step()
        once.losses = once.losses.detach()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.testing.assert_close(captured.losses, once.losses)
    torch.testing.assert_close(captured.gradients, once.gradients)
