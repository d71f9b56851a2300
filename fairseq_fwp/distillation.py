"""The criterion `fwp_distillation`: a model learns from a teacher.

A linearised model (`fwp-linearize`) recovers its quality in three stages, each a separate training:

1. `--distillation attention`: every attention learns the output of the teacher's attention for the same input.
   Nothing else in the model is computed or trained. (Attention transfer: Zhang et al. 2024, "LoLCATs",
   arXiv 2410.10254; Goldstein et al. 2025, "RADLADS", arXiv 2505.03005.)
2. `--distillation distribution`: the model learns the teacher's distribution of the next word.
   The words of the data have the rest of the weight. (Hinton et al. 2015, arXiv 1503.02531, without a temperature.)
3. Any other criterion: plain training.

Shapes: B sequences, L tokens, V words.
"""

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fairseq import metrics, utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import BaseFairseqModel
from fairseq.modules import AdaptiveSoftmax
from fairseq.tasks import FairseqTask
from omegaconf import II
from torch import Tensor, nn

from fairseq_fwp.checkpoints.pretrained.checkpoint import read
from fairseq_fwp.evaluation.scoring import kl_divergence
from fairseq_fwp.modules.decoding import Sample
from fairseq_fwp.modules.feature_maps import resample
from fairseq_fwp.ops.arguments import at_least_float32
from fairseq_fwp.patches.options import Settings, option, setting, word

ATTENTION, DISTRIBUTION = "attention", "distribution"
# fairseq-validate has no --teacher, and looks at its old path.
MOVED = "; if it has moved, fairseq-validate takes --model-overrides \"{'teacher': 'FILE'}\""
# Names of the attention modules in fairseq's and this package's Transformers.
ATTENTIONS = ("self_attn", "encoder_attn")
# Log-probabilities of student and teacher, a row for each token, and the targets.
Part = tuple[Tensor, Tensor, Tensor]


@dataclass
class DistillationConfig(FairseqDataclass):
    """A teacher, and what is learned from it."""

    teacher: str = option("", "checkpoint to learn from: the same kind of model with the same vocabulary")
    distillation: ChoiceEnum([ATTENTION, DISTRIBUTION]) = option(  # type: ignore[valid-type]
        DISTRIBUTION,
        "what is learned: the output of each attention for the teacher's input, or the teacher's distribution",
    )
    teacher_weight: float = option(
        1.0, "weight of the teacher's distribution in the loss, from 0 to 1; the words of the data have the rest"
    )
    ddp_backend: str = II("distributed_training.ddp_backend")


@register_criterion("fwp_distillation", dataclass=DistillationConfig)
class DistillationCriterion(FairseqCriterion):
    """The loss of a token: the squared error of the attentions' outputs, or the divergence from the teacher."""

    def __init__(
        self,
        task: FairseqTask,
        teacher: str,
        distillation: Any = DISTRIBUTION,
        teacher_weight: float = 1.0,
        ddp_backend: str = "legacy_ddp",
    ) -> None:
        super().__init__(task)
        if not 0 <= teacher_weight <= 1:
            raise ValueError(f"--teacher-weight must be in [0, 1], got {teacher_weight}")
        if ddp_backend in ("c10d", "pytorch_ddp"):
            raise ValueError(f"--ddp-backend must be legacy_ddp with fwp_distillation, got {ddp_backend}")
        if setting(setting(task, "args", None), "carry_state", False):
            raise ValueError("--carry-state must be left out with fwp_distillation: the teacher does not carry a state")
        self.of_attention = str(word(distillation)) == ATTENTION
        if self.of_attention and teacher_weight != 1:
            raise ValueError(f"--teacher-weight must be 1 with --distillation attention, got {teacher_weight}")
        self.weight = teacher_weight
        # In a tuple, so that the teacher is not trained, saved or counted.
        self._teacher = (read_teacher(teacher, task),)

    def forward(self, model: BaseFairseqModel, sample: Sample, reduce: bool = True) -> tuple[Tensor, int, Settings]:
        """Return the sum over the tokens, their number, and what is logged."""
        parameter = next(model.parameters())
        (teacher,) = self._teacher
        teacher.to(parameter.device, parameter.dtype)
        log: Settings = {}
        if self.of_attention:
            tokens = int(sample["target"].ne(self.padding_idx).sum())
            loss = tokens * attention_error(model, teacher, sample["net_input"], self.padding_idx)
        else:
            parts = list(self.log_probs(model, teacher, sample))
            divergence = torch.stack([kl_divergence(student, of_teacher) for student, of_teacher, _ in parts]).sum()
            nll = torch.stack([F.nll_loss(student, target, reduction="sum") for student, _, target in parts]).sum()
            # A word of probability 0 has an infinite loss, and 0 times infinity is NaN.
            loss = divergence if self.weight == 1 else self.weight * divergence + (1 - self.weight) * nll
            tokens = len(parts[0][0])  # --half-loss leaves some out
            log = {"divergence": divergence.data, "nll_loss": nll.data}
        counts = {"ntokens": tokens, "nsentences": len(sample["target"]), "sample_size": tokens}
        return loss, tokens, {**counts, **log, "loss": loss.data}

    def log_probs(self, model: BaseFairseqModel, teacher: BaseFairseqModel, sample: Sample) -> Iterator[Part]:
        """Yield what is compared: all words for every token, or the head of the adaptive softmax and then its tails.

        A tail is compared only for tokens whose word lies in it, as in the data loss. All tails for all tokens would be
        267,744 words a token on WikiText-103, more work than the model itself. With `get_normalized_probs` the
        comparison is exact.
        """
        out = model(**sample["net_input"])
        # With a teacher only, the text may have words that neither of the two can predict.
        target = sample["target"] if self.weight == 1 else model.get_targets(sample, out)
        real = target.ne(self.padding_idx)
        target = target[real]
        softmaxes = [getattr(of.decoder, "adaptive_softmax", None) for of in (model, teacher)]
        if isinstance(softmaxes[0], AdaptiveSoftmax) and softmaxes[1] is None:  # of all words it has no gradient
            raise ValueError("--adaptive-softmax-cutoff must be left out, because the teacher has no adaptive softmax")

        def scores(of: BaseFairseqModel, output: Any) -> tuple[list[Tensor | None], list[Tensor | None]]:
            if None in softmaxes:
                return [at_least_float32(of.get_normalized_probs(output, log_probs=True)[real])], [target]
            parts, targets = of.decoder.adaptive_softmax(output[0][real].unsqueeze(0), target)
            return [None if part is None else at_least_float32(part).log_softmax(-1) for part in parts], targets

        ours, targets = scores(model, out)
        with torch.no_grad():
            theirs, _ = scores(teacher, teacher(**sample["net_input"]))
        if len(ours) != len(theirs):
            got = f"{len(ours)}: give the teacher's --adaptive-softmax-cutoff"
            raise ValueError(f"the model must have the teacher's {len(theirs)} clusters of words, got {got}")
        for student, from_teacher, in_part in zip(ours, theirs, targets, strict=True):
            if student is None or from_teacher is None or in_part is None:
                continue
            if student.shape != from_teacher.shape:
                sizes = f"{student.shape[-1]} and {from_teacher.shape[-1]}"
                raise ValueError(
                    f"the model and its teacher must have the same words in each cluster, got {sizes}: give the "
                    "teacher's --adaptive-softmax-cutoff and data"
                )
            yield student, from_teacher, in_part

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[Settings]) -> None:
        """Log the loss: a squared error; or bits a token, also of its parts, and the perplexity of the data."""
        tokens = sum(int(log.get("ntokens", 0)) for log in logging_outputs)
        names = [name for name in ("loss", "divergence", "nll_loss") if any(name in log for log in logging_outputs)]
        for name in names:
            total = utils.item(sum(log.get(name, 0) for log in logging_outputs))
            in_bits = total / tokens / math.log(2)
            metrics.log_scalar(name, in_bits if "nll_loss" in names else total / tokens, tokens, round=5)
        if "nll_loss" in names:
            metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["nll_loss"].avg))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return True: all logged numbers are sums over tokens."""
        return True


def read_teacher(path: str, task: FairseqTask) -> BaseFairseqModel:
    """Return the model of a checkpoint, in evaluation mode and without gradients."""
    if not path:
        raise ValueError("--teacher must be a checkpoint to learn from, got none")
    try:
        checkpoint = read(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"--teacher must be a checkpoint of fairseq, got {path}: {error}{MOVED}") from error
    try:
        # A copy: when a translation task builds a model, it stores that model as its own for translation.
        teacher = checkpoint.build(copy(task))
    except ValueError as error:
        raise ValueError(f"--teacher {path} does not fit this data: {error}") from error
    except RuntimeError as error:
        mismatch = str(error).split("\n")[1 if "\n" in str(error) else 0].strip()
        raise ValueError(f"--teacher {path} does not fit the vocabulary of this data: {mismatch}") from error
    return teacher.eval().requires_grad_(False)


def attentions(model: nn.Module) -> dict[str, nn.Module]:
    """Return the attentions of a model by name, without the wrapper for several processes."""
    modules = ((name.replace("module.", ""), module) for name, module in model.named_modules())
    return {name: module for name, module in modules if name.rpartition(".")[2] in ATTENTIONS}


def attention_error(model: nn.Module, teacher: nn.Module, net_input: Sample, padding_idx: int) -> Tensor:
    """Return the mean squared error of the attentions' outputs for the teacher's inputs, averaged over attentions.

    Padding does not count. In training, random feature maps are drawn again first, as in the forward pass of a model.
    """
    if model.training:
        resample(model)
    ours, theirs = attentions(model), attentions(teacher)
    if ours.keys() != theirs.keys():
        got = f"got {len(ours)} attentions in the model and {len(theirs)} in the teacher"
        same = "attention in the same places as its teacher"
        raise ValueError(f"the model must have {same}, {got}: give a teacher with as many layers")
    calls: list[tuple[str, Any, Any, Tensor]] = []
    hooks = [
        module.register_forward_hook(
            lambda _, words, named, out, name=name: calls.append((name, words, named, out[0])), with_kwargs=True
        )
        for name, module in theirs.items()
    ]
    try:
        with torch.no_grad():
            teacher(**net_input)
    finally:
        for hook in hooks:
            hook.remove()
    errors = []
    for name, words, named, expected in calls:
        try:
            out = ours[name](*words, **named)[0]
        except TypeError as error:
            remedy = f"convert the teacher with fwp-convert too ({error})"
            raise ValueError(f"the teacher's {name} takes other arguments than the model's: {remedy}") from error
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            size = words[0].shape[-1] if words else "unknown"
            remedy = f"give a teacher with as many dimensions ({error})"
            raise ValueError(f"the model's {name} must take the teacher's vectors, of size {size}: {remedy}") from error
        real = real_tokens(name, net_input, padding_idx)
        errors.append(F.mse_loss(at_least_float32(out)[real], at_least_float32(expected)[real]))
    return torch.stack(errors).mean()


def real_tokens(name: str, net_input: Sample, padding_idx: int) -> Tensor:
    """Return a mask of an attention's outputs: True at tokens, False at padding."""
    before = net_input.get("prev_output_tokens")
    if before is None:  # a language model: (B, L)
        return net_input["src_tokens"].ne(padding_idx)
    tokens: Tensor = net_input["src_tokens"] if name.startswith("encoder.") else before
    return tokens.ne(padding_idx).T  # fairseq's layers are time-first
