"""Dropout that fairseq's --retain-dropout can keep on in generation."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """torch's layer; `retained` keeps it on in evaluation too, as in fairseq's own layer.

    owner: the module that has it; --retain-dropout-modules names the class of this module.
    """

    def __init__(self, p: float, owner: nn.Module) -> None:
        super().__init__(p)
        self.owner_name = type(owner).__name__
        self.retained = False

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(input, self.p, self.training or self.retained)

    def make_generation_fast_(
        self, retain_dropout: bool = False, retain_dropout_modules: list[str] | None = None, **kwargs: Any
    ) -> None:
        """Prepare for generation; fairseq says whether dropout stays on, in the named modules or in all."""
        self.retained = retain_dropout and (retain_dropout_modules is None or self.owner_name in retain_dropout_modules)
