"""Dropout that fairseq can keep on in evaluation."""

import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """torch's layer; `retained` keeps it on in evaluation too, as in fairseq's own layer.

    owner: the module that has it; --retain-dropout-modules names its class, or a class that it extends.
    """

    def __init__(self, p: float, owner: nn.Module) -> None:
        super().__init__(p)
        self.owner_names = {kind.__name__ for kind in type(owner).__mro__}
        self.retained = False

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(input, self.p, self.training or self.retained)

    def make_generation_fast_(
        self, retain_dropout: bool = False, retain_dropout_modules: list[str] | None = None, **kwargs: object
    ) -> None:
        """Prepare for generation; fairseq says whether dropout stays on, in the named modules or in all."""
        named = retain_dropout_modules is None or not self.owner_names.isdisjoint(retain_dropout_modules)
        self.retained = retain_dropout and named
