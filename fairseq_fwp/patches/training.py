"""Averages of weights, losses with smoothed labels, and the progress that a resumed training counts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Original = Callable[..., Any]


def average_each_tensor_once(step: Original) -> Any:
    """fairseq's --store-ema averages a tensor once for each of its names, tied weights twice. Whole numbers fail."""

    def average(self: Any, new_model: Any, updates: int | None = None) -> None:
        known, found, averaged = self.fp32_params if self.config.ema_fp32 else self.model.state_dict(), {}, set()
        for name, x in new_model.state_dict().items():
            if not isinstance(x, Tensor) or "version" in name:
                continue
            mean = found[name] = known[name] if name in known else known.setdefault(name, x.clone())
            place = mean.data_ptr(), mean.shape, mean.stride()
            if place in averaged:
                continue
            averaged.add(place)
            # A decay of zero is a copy: in biases, 0 times minus infinity is not a number.
            if name in self.skip_keys or not mean.is_floating_point() or self.decay == 0:
                mean.copy_(x)
            else:
                mean.mul_(self.decay).add_(x.to(mean.dtype), alpha=1 - self.decay)
        self.restore(found)

    return average


def average_from_loaded_weights(load: Original) -> Any:
    """fairseq deletes the weights of a checkpoint without an average before --store-ema starts one from them."""

    def load_and_average(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = self.cfg.ema
        wanted, settings.store_ema = settings.store_ema, False
        try:
            extra_state = load(self, *args, **kwargs)
        finally:
            settings.store_ema = wanted
        if wanted and extra_state is not None:
            saved = extra_state.get("ema") or self.get_model().state_dict()
            self.ema.restore(saved)
            if settings.ema_fp32:
                self.ema.build_fp32_params(extra_state.get("ema_fp32_params", saved))
        return extra_state

    return load_and_average


def smooth_over_possible_words(loss_of: Original) -> Any:
    """fairseq smooths labels over all words. The loss is infinite if a model gives some words no probability.

    Over the other words it is the loss of the same model with a vocabulary that lacks these words.
    """

    def smoothed(
        lprobs: Tensor, target: Tensor, epsilon: float, ignore_index: int | None = None, reduce: bool = True
    ) -> tuple[Tensor, Tensor]:
        loss, nll_loss = loss_of(lprobs, target, epsilon, ignore_index, reduce)
        if loss.isfinite().all():
            return loss, nll_loss
        _, nll_loss = loss_of(lprobs, target, 0, ignore_index, reduce=False)
        possible = lprobs.isneginf().logical_not()
        share = epsilon / (possible.sum(-1) - 1).clamp(min=1).view_as(nll_loss)
        others = -torch.where(possible, lprobs, 0).sum(-1).view_as(nll_loss)
        if ignore_index is not None:
            others = others.masked_fill(target.view_as(nll_loss) == ignore_index, 0)
        loss = (1 - epsilon - share) * nll_loss + share * others
        return (loss.sum(), nll_loss.sum()) if reduce else (loss, nll_loss)

    return smoothed


def save_bad_epochs(state_dict: Original) -> Any:
    """fairseq does not save the epochs without progress, which --lr-patience of reduce_lr_on_plateau counts."""
    return lambda self: {**state_dict(self), "num_bad_epochs": self.lr_scheduler.num_bad_epochs}


def load_bad_epochs(load_state_dict: Original) -> Any:
    """fairseq does not save the epochs without progress, which --lr-patience of reduce_lr_on_plateau counts."""

    def load(self: Any, saved: dict[str, Any]) -> None:
        load_state_dict(self, saved)
        self.lr_scheduler.num_bad_epochs = saved.get("num_bad_epochs", 0)

    return load


def save_patience(save: Original) -> Any:
    """fairseq does not save the validations without progress, which --patience counts."""

    def save_with_patience(self: Any, filename: str, extra_state: dict[str, Any]) -> Any:
        from fairseq_cli.train import should_stop_early  # which keeps its counts as attributes

        return save(self, filename, {**extra_state, "patience": dict(vars(should_stop_early))})

    return save_with_patience


def load_patience(load: Original) -> Any:
    """fairseq does not save the validations without progress, which --patience counts."""

    def load_with_patience(cfg: Any, trainer: Any, **kwargs: Any) -> Any:
        from fairseq_cli.train import should_stop_early

        extra_state, batches = load(cfg, trainer, **kwargs)
        counts = vars(should_stop_early)
        counts.clear()  # of another training of this process
        if trainer.get_num_updates() and not (cfg.reset_optimizer or cfg.reset_meters):
            counts.update(extra_state.get("patience", {}))
        return extra_state, batches

    return load_with_patience
