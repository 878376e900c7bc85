"""The small ResNet-9 of the paper: a frozen whitening convolution, three groups of two convolutions, a scaled head.

    from retrain.models.resnet9 import ResNet9, whitening_weight
    model = ResNet9(generator=torch.Generator().manual_seed(1))       # CIFAR-10 sizes: 1,972,792 parameters
    model.set_whitening(whitening_weight(images))                     # images: (n, 3, 32, 32), normalised

It is the network family of "94% on CIFAR-10 in 3.29 seconds" (Jordan, 2024), which has no skip connections in spite of
its name; the paper's parameter count is the one of this network with every frozen parameter counted. Only plain
`nn.Conv2d`, `nn.BatchNorm2d` and `nn.Linear` are used, because kronfluence looks modules up by their exact class.
"""

import math

import torch
from torch import Tensor, nn

# Jordan's BatchNorm momentum of 0.6 is the share that is kept; torch's momentum is the share that is replaced.
BATCH_NORM_MOMENTUM = 0.4
BATCH_NORM_EPS = 1e-12
# The size below which an image is no longer halved: the head takes the maximum over what is left.
SMALLEST_SIZE = 3
WHITENING_SIZE = 2  # pixels a side of a filter


class ConvGroup(nn.Module):
    """Convolution, optional 2x2 maximum, BatchNorm, GELU, convolution, BatchNorm, GELU."""

    def __init__(self, in_channels: int, out_channels: int, pool: bool):
        super().__init__()
        # skip_init leaves the global random state alone; ResNet9 fills the weights.
        self.conv1 = nn.utils.skip_init(nn.Conv2d, in_channels, out_channels, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()
        self.norm1 = nn.BatchNorm2d(out_channels, BATCH_NORM_EPS, BATCH_NORM_MOMENTUM)
        self.conv2 = nn.utils.skip_init(nn.Conv2d, out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels, BATCH_NORM_EPS, BATCH_NORM_MOMENTUM)
        self.activation1 = nn.GELU()
        self.activation2 = nn.GELU()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.activation1(self.norm1(self.pool(self.conv1(inputs))))
        return self.activation2(self.norm2(self.conv2(hidden)))


class ResNet9(nn.Module):
    """Images (batch, in_channels, image_size, image_size) to logits (batch, num_classes).

    A group halves the image only while at least 3x3 pixels remain, so that 8x8 digits work too (7, 3, 3, 3 pixels after
    the whitening layer and each group; 32x32 gives 31, 15, 7, 3). The whitening layer has each filter and its negation.

    Its weight and bias and the BatchNorm weights do not train: `requires_grad` is False.
    """

    scale = 1 / 9  # of the head's product

    def __init__(
        self,
        *,
        in_channels: int = 3,
        image_size: int = 32,
        num_classes: int = 10,
        widths: tuple[int, ...] = (64, 256, 256),
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        channels, size = 2 * in_channels * WHITENING_SIZE**2, image_size - WHITENING_SIZE + 1
        if size < SMALLEST_SIZE:
            raise ValueError(f"image_size is {image_size}; expected at least {SMALLEST_SIZE + WHITENING_SIZE - 1}")
        self.whiten = nn.utils.skip_init(nn.Conv2d, in_channels, channels, WHITENING_SIZE, bias=True)
        self.whiten.requires_grad_(False)
        self.activation = nn.GELU()
        groups = []
        for width in widths:
            pool = size // 2 >= SMALLEST_SIZE
            groups.append(ConvGroup(channels, width, pool))
            channels, size = width, size // 2 if pool else size
        self.groups = nn.Sequential(*groups)
        self.pool = nn.MaxPool2d(size)
        self.flatten = nn.Flatten()
        self.head = nn.utils.skip_init(nn.Linear, channels, num_classes, bias=False)
        self._draw_parameters(torch.Generator().manual_seed(0) if generator is None else generator)

    @torch.no_grad()
    def _draw_parameters(self, generator: torch.Generator) -> None:
        """Fill every parameter; BatchNorm has its own: weight 1, bias 0, running mean 0, running variance 1.

        Convolutions start as the identity on their first input channels (a Dirac kernel) and as torch's usual uniform
        draw on the others. The whitening filters are drawn too, until `set_whitening` replaces them.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                bound = 1 / math.sqrt(module.weight[0].numel())
                drawn = torch.empty(module.weight.shape, device=generator.device)
                module.weight.copy_(drawn.uniform_(-bound, bound, generator=generator))
                if module.bias is not None:
                    module.bias.zero_()
            if isinstance(module, nn.Conv2d) and module is not self.whiten:
                nn.init.dirac_(module.weight[: module.in_channels])
            if isinstance(module, nn.BatchNorm2d):
                module.weight.requires_grad_(False)

    @torch.no_grad()
    def set_whitening(self, weight: Tensor) -> None:
        """Put the frozen filters in place; `weight` is what `whitening_weight` gave."""
        if weight.shape != self.whiten.weight.shape:
            raise ValueError(
                f"whitening weight has shape {tuple(weight.shape)}; {tuple(self.whiten.weight.shape)} fits"
            )
        self.whiten.weight.copy_(weight)

    def whitened(self, inputs: Tensor) -> Tensor:
        """What the groups read. Nothing in it trains, so it is the same at all weights."""
        return self.activation(self.whiten(inputs))

    def features_of_whitened(self, whitened: Tensor) -> Tensor:
        """What the head reads: (batch, widths[-1])."""
        return self.flatten(self.pool(self.groups(whitened)))

    def features(self, inputs: Tensor) -> Tensor:
        return self.features_of_whitened(self.whitened(inputs))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.features(inputs)) * self.scale


def whitening_weight(images: Tensor, eps: float = 5e-4) -> Tensor:
    """Filters (8 * channels, channels, 2, 2), float32 on the CPU, whose outputs on `images` are uncorrelated.

    `images` is (n, channels, height, width), normalised as the model will see them. The filters are the eigenvectors of
    the patch covariance, largest eigenvalue first, each over sqrt(eigenvalue + eps), followed by their negations.
    All of it is done on the CPU in float64 and signs are fixed, so that every machine gets the same filters.
    """
    images = images.detach().to("cpu", torch.float64)
    channels, size = images.shape[1], WHITENING_SIZE
    dimension = channels * size * size
    covariance = torch.zeros(dimension, dimension, dtype=torch.float64)
    num_patches = 0
    for chunk in images.split(1000):
        patches = chunk.unfold(2, size, 1).unfold(3, size, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, dimension)
        covariance += patches.T @ patches
        num_patches += len(patches)
    if num_patches == 0 or not covariance.isfinite().all():
        raise ValueError("whitening needs at least one image, all of it finite")
    eigenvalues, eigenvectors = torch.linalg.eigh(covariance / num_patches)
    filters = eigenvectors.flip(1).T  # one eigenvector a row, largest eigenvalue first
    # A symmetric filter has entries of equal size, so the sign comes from a direction that no such filter is normal to.
    direction = torch.cos(1 + torch.arange(dimension, dtype=torch.float64))
    filters = filters * torch.where(filters @ direction < 0, -1.0, 1.0)[:, None]
    filters = filters / (eigenvalues.flip(0).clamp(min=0) + eps).sqrt()[:, None]
    filters = filters.reshape(dimension, channels, size, size)
    return torch.cat([filters, -filters]).float()
