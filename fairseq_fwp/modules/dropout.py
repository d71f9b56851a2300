"""Dropout that fairseq's --retain-dropout can leave on in generation."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """torch's layer; `retained` leaves it on in evaluation too, as fairseq's own layer can be.

    owner: the module that has it, by whose class --retain-dropout-modules names it.
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
        """fairseq's word before it generates: whether dropout stays on, in the modules named or in all."""
        self.retained = retain_dropout and (retain_dropout_modules is None or self.owner_name in retain_dropout_modules)
