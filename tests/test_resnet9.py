"""The network: the paper's parameter count, its start, and the transforms that the methods put it through."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from retrain.models.resnet9 import ResNet9, whitening_weight
from retrain.models.resnet9_training import logits_in, logits_of_whitened


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def digits_model(seed: int = 0) -> ResNet9:
    return ResNet9(in_channels=1, image_size=8, widths=(16, 32, 32), generator=seeded(seed))


def test_parameter_count_is_the_papers():
    model = ResNet9()
    assert sum(p.numel() for p in model.parameters()) == 1_972_792
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    norm_biases = {f"groups.{g}.norm{n}.bias" for g in range(3) for n in (1, 2)}
    convolutions = {f"groups.{g}.conv{n}.weight" for g in range(3) for n in (1, 2)}
    assert trainable == norm_biases | convolutions | {"head.weight"}


def test_only_plain_modules_hold_parameters():
    for module in ResNet9().modules():
        if list(module.parameters(recurse=False)):
            assert type(module) in (nn.Conv2d, nn.BatchNorm2d, nn.Linear)


@pytest.mark.parametrize(("image_size", "channels"), [(32, 3), (8, 1), (4, 1), (16, 3), (28, 1)])
def test_logits_have_one_column_a_class(image_size, channels):
    model = ResNet9(in_channels=channels, image_size=image_size, widths=(8, 8, 8), num_classes=7)
    logits = model(torch.randn(3, channels, image_size, image_size, generator=seeded(0)))
    assert logits.shape == (3, 7)
    assert logits.isfinite().all()


def test_cifar_sizes_after_each_group():
    model = ResNet9(widths=(4, 4, 4)).eval()
    hidden = model.whiten(torch.zeros(1, 3, 32, 32))
    sizes = [hidden.shape[-1]]
    for group in model.groups:
        hidden = group(hidden)
        sizes.append(hidden.shape[-1])
    assert sizes == [31, 15, 7, 3]
    assert model.pool(hidden).shape == (1, 4, 1, 1)


def test_same_generator_same_start_and_the_global_state_is_left_alone():
    before = torch.get_rng_state()
    first, second, other = digits_model(1), digits_model(1), digits_model(2)
    assert torch.equal(torch.get_rng_state(), before)
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(first.head.weight, other.head.weight)


def test_convolutions_start_as_the_identity_on_their_input_channels():
    group = ResNet9(widths=(64, 96, 96)).groups[1]
    inputs = torch.randn(2, 64, 5, 5, generator=seeded(0))
    assert torch.allclose(group.conv1(inputs)[:, :64], inputs, atol=1e-6)


def test_forward_matches_the_formula_written_out():
    model = digits_model().eval()
    inputs = torch.randn(5, 1, 8, 8, generator=seeded(3))
    hidden = nn.functional.gelu(model.whiten(inputs))
    for index, group in enumerate(model.groups):
        hidden = group.conv1(hidden)
        hidden = nn.functional.max_pool2d(hidden, 2) if index == 0 else hidden
        hidden = nn.functional.gelu(group.norm1(hidden))
        hidden = nn.functional.gelu(group.norm2(group.conv2(hidden)))
    expected = hidden.amax((2, 3)) @ model.head.weight.T / 9
    assert torch.allclose(model(inputs), expected, atol=1e-6)


def test_whitened_patches_are_uncorrelated():
    mixing = torch.randn(12, 12, generator=seeded(0), dtype=torch.float64)
    images = (torch.randn(4000, 12, generator=seeded(1), dtype=torch.float64) @ mixing).reshape(-1, 3, 2, 2)
    weight = whitening_weight(images, eps=0.0)
    assert weight.shape == (24, 3, 2, 2)
    assert torch.equal(weight[:12], -weight[12:])
    outputs = images.reshape(-1, 12) @ weight[:12].double().reshape(12, 12).T
    assert torch.allclose(outputs.T @ outputs / 4000, torch.eye(12, dtype=torch.float64), atol=1e-4)


def test_whitening_is_the_same_whatever_the_order_and_dtype():
    images = torch.rand(300, 3, 8, 8, generator=seeded(0))
    expected = whitening_weight(images)
    shuffled = images[torch.randperm(300, generator=seeded(1))].double()
    assert torch.allclose(whitening_weight(shuffled), expected, atol=1e-5)


def test_whitening_of_flat_images_is_finite_and_bad_input_is_refused():
    assert whitening_weight(torch.zeros(4, 1, 8, 8)).isfinite().all()
    with pytest.raises(ValueError, match="finite"):
        whitening_weight(torch.full((2, 1, 4, 4), float("nan")))
    with pytest.raises(ValueError, match="fits"):
        digits_model().set_whitening(torch.zeros(24, 3, 2, 2))
    with pytest.raises(ValueError, match="whitening_channels is 9"):
        ResNet9(in_channels=1, whitening_channels=9)


def test_fewer_whitening_filters():
    model = ResNet9(in_channels=1, image_size=8, widths=(8, 8, 8), whitening_channels=4)
    model.set_whitening(whitening_weight(torch.rand(20, 1, 8, 8, generator=seeded(0)), num_filters=4))
    assert model(torch.rand(2, 1, 8, 8, generator=seeded(1))).shape == (2, 10)


def test_per_example_gradients_under_vmap_equal_a_loop():
    model = digits_model().eval()
    inputs = torch.randn(4, 1, 8, 8, generator=seeded(0))
    labels = torch.tensor([0, 3, 9, 3])
    trainable = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(parameters, image, label):
        logits = functional_call(model, parameters, (image[None],))
        return nn.functional.cross_entropy(logits, label[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(trainable, inputs, labels)
    for i in range(4):
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs[i : i + 1]), labels[i : i + 1]).backward()
        for name, p in model.named_parameters():
            if p.requires_grad:
                assert torch.allclose(gradients[name][i], p.grad, atol=1e-5), name


def test_channels_last_and_bf16_agree_with_plain_float32():
    model = digits_model().eval()
    inputs = torch.randn(6, 1, 8, 8, generator=seeded(0))
    plain = model(inputs)
    last = model.to(memory_format=torch.channels_last)
    assert torch.allclose(last(inputs.to(memory_format=torch.channels_last)), plain, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(model(inputs).float(), plain, atol=0.05)


def test_one_image_alone_trains_without_nan():
    model = digits_model().train()
    nn.functional.cross_entropy(model(torch.rand(1, 1, 8, 8, generator=seeded(0))), torch.tensor([1])).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    assert all(buffer.isfinite().all() for buffer in model.buffers())


def test_the_graph_is_captured_whole():
    model = digits_model()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    inputs = torch.rand(3, 1, 8, 8, generator=seeded(0))
    assert torch.allclose(compiled(inputs), digits_model()(inputs), atol=1e-6)


def test_logits_of_whitened_images_are_the_logits() -> None:
    model = ResNet9(widths=(8, 16, 16)).eval()
    images = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(logits_of_whitened(torch.float32, model, model.whitened(images)), model(images))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("widths", [(64, 256, 256), (24, 40, 16)])
def test_fused_kernels_give_the_plain_logits(widths: tuple[int, ...]) -> None:
    model = ResNet9(widths=widths).cuda().eval()
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):  # as after training: nothing at its starting value
            module.running_mean.normal_().mul_(0.1)
            module.running_var.uniform_(0.5, 2.0)
            module.bias.data.normal_().mul_(0.1)
    images = torch.randn(37, 3, 32, 32, generator=generator).cuda()
    with torch.no_grad():
        exact = model(images)
        half = images.to(torch.bfloat16, memory_format=torch.channels_last)
        plain = logits_in(torch.bfloat16, model, half)
        with torch.autocast("cuda", torch.bfloat16):
            whitened = model.whitened(half)
        fused = logits_of_whitened(torch.bfloat16, model, whitened)
    assert (fused - exact).abs().max() < 2 * (plain - exact).abs().max() + 1e-4
    assert (fused - exact).abs().max() < 0.03 * exact.abs().max()
