"""The numbers of a chain: what the engine and the pilot need to know, and what of it is left to the pilot.

`gamma`, `step_size`, `n_beta` and `draws` may be 0: `baselines/bif/pilot.py` then chooses them at the checkpoint.
"""

from dataclasses import dataclass

import torch

from baselines.bif.sampler import SAMPLERS
from baselines.method import batch_size_option

GRADIENTS = ("minibatch", "difference")
DISPLACEMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FROM_PILOT = ("gamma", "step_size", "n_beta", "draws")  # 0 leaves them to the pilot


@dataclass(frozen=True, kw_only=True)
class ChainSettings:
    sampler: str = "sgld"
    chains: int = 4
    draws: int = 0  # per chain, after burn-in; without one the first is the checkpoint itself
    burn_in: int = 0  # draws discarded at the start of each chain
    thinning: int = 1  # sampler steps between draws
    step_size: float = 0.0
    n_beta: float = 0.0  # effective number of samples: the weight of the mean loss
    gamma: float = 0.0  # localisation: precision of the Gaussian around the checkpoint
    minibatch: int = 1024
    gradient: str = "minibatch"  # or "difference": less the same minibatch's at the checkpoint (passes.Gradient)
    parameters: str = ""  # regular expression: only parameters whose name it finds are sampled; empty: all trainable
    control_variate: bool = False  # sample only what differs from the prior's own, exactly known covariance
    train_covariance: bool = False  # also how the training examples' losses vary together, from the same draws
    displacement: str = "float32"  # what a chain keeps of w - w*; bfloat16 halves it, for models of billions
    batch_size: int = batch_size_option(5000)  # examples measured at once

    def __post_init__(self) -> None:
        for name, choices in (
            ("sampler", tuple(SAMPLERS)),
            ("gradient", GRADIENTS),
            ("displacement", tuple(DISPLACEMENTS)),
        ):
            check_choice(name, getattr(self, name), choices)
        for name in ("chains", "thinning", "minibatch"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a positive number")
        for name in (*FROM_PILOT, "burn_in"):
            if getattr(self, name) < 0:
                what = "or 0, which leaves it to the pilot" if name in FROM_PILOT else "or 0"
                raise ValueError(f"{name} is {getattr(self, name)}; expected a positive number, {what}")
        if self.draws and (self.chains * self.draws < 2 or (self.draws < 2 and not self.burn_in)):
            raise ValueError(
                f"{self.chains} chains of {self.draws} draws; a covariance needs at least 2 draws, and without burn_in "
                "the first of every chain is the checkpoint itself"
            )

    @property
    def left_to_the_pilot(self) -> tuple[str, ...]:
        return tuple(name for name in FROM_PILOT if not getattr(self, name))


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f'{name} is "{value}"; available: {", ".join(choices)}')
