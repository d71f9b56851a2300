"""Adaptive softmaxes, and word embeddings whose size falls with the word's frequency.

The softmaxes are tied to the embeddings and have biases, as in Transformer-XL and Schlag et al. 2021, or are like
fairseq's and GPT-2's.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp.modules.dropout import Dropout
from fairseq_fwp.modules.onednn import faster_linear
from fairseq_fwp.ops.arguments import at_least_float32
from fairseq_fwp.ops.checks import check

# The paper does not give initial values; this is from its public code.
PROJECTION_STD = 0.01


class AdaptiveInput(nn.Module):
    """Embeddings in clusters of falling word frequency (Baevski & Auli 2019, arXiv 1809.10853, Sec. 3).

    Words of cluster c, between two cutoffs, have D / div_val^c dimensions and a projection to D without bias, even in
    the first cluster. fairseq's module of this name treats the padding index as a word of every cluster, and then does
    not train that word.

    vocab_size: V; embed_dim: D; cutoffs: ascending ranks below V, or empty; div_val: at least 1;
    padding_idx: its embedding is always zero. Raises ValueError for invalid sizes.
    """

    def __init__(
        self, vocab_size: int, embed_dim: int, cutoffs: list[int], div_val: int, padding_idx: int | None = None
    ) -> None:
        super().__init__()
        check_cutoffs(cutoffs, vocab_size, padding_idx)
        check(div_val >= 1, f"`div_val` must be at least 1, got {div_val}")
        least = div_val ** len(cutoffs)
        which = "`div_val` to the power of the number of cutoffs"
        check(embed_dim >= least, f"`embed_dim` must be at least {least}, which is {which}, got {embed_dim}")
        self.embedding_dim = embed_dim
        self.num_embeddings = vocab_size
        self.padding_idx = padding_idx
        self.bounds = [0, *cutoffs, vocab_size]
        sizes = [embed_dim // div_val**index for index in range(len(cutoffs) + 1)]
        self.tables: Any = nn.ModuleList(
            nn.Embedding(high - low, size, padding_idx if low == 0 else None)
            for (low, high), size in zip(pairwise(self.bounds), sizes, strict=True)
        )
        self.projections: Any = nn.ModuleList(nn.Linear(size, embed_dim, bias=False) for size in sizes)
        self.initialize()

    def initialize(self) -> None:
        """Draw the projections as the paper's public code does."""
        for projection in self.projections:
            nn.init.normal_(projection.weight, std=PROJECTION_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return embeddings (B, L, D) of tokens (B, L)."""
        flat = tokens.flatten()
        x = self.projections[0].weight.new_zeros(flat.shape[0], self.embedding_dim)
        clusters = zip(pairwise(self.bounds), self.tables, self.projections, strict=True)
        for (low, high), table, projection in clusters:
            rows = ((flat >= low) & (flat < high)).nonzero().squeeze(1)
            x = x.index_copy(0, rows, projection(table(flat[rows] - low)).to(x.dtype))
        return x.unflatten(0, tokens.shape)


def check_cutoffs(cutoffs: Sequence[int], vocab_size: int, padding_idx: int | None) -> None:
    """Check that the cutoffs divide the vocabulary, with padding in the first cluster; raise ValueError otherwise."""
    bounds, least = [0, *cutoffs, vocab_size], 0 if padding_idx is None else padding_idx + 1
    check(
        all(low < high for low, high in pairwise(bounds)) and bounds[1] >= least,
        f"`cutoffs` must be ascending, from {max(least, 1)} to below the vocabulary's {vocab_size} words, got "
        f"{','.join(map(str, cutoffs))}",
    )


# Rows whose logits are computed at once if only gradients are needed: 20 MB for 20,000 words.
BLOCK = 256


class Cluster(NamedTuple):
    """The embeddings (words, D) and the biases (words,) of a cluster's words."""

    weight: Tensor
    bias: Tensor


class AdaptiveSoftmax(nn.Module):
    """A softmax in clusters of falling word frequency (Grave et al. 2017, arXiv 1609.04309).

    The head has the words up to the first cutoff and one entry for each further cluster. A word of cluster c has
    probability head(c) * tail_c(word). The interface is that of fairseq's AdaptiveSoftmax, which lacks biases and so
    does not reach the published parameter counts. fairseq's criterion `adaptive_loss` and its scorers work with both.

    embedding: of V words in D dimensions. Words share its weights. Of an `AdaptiveInput`, tables and projections are
        shared, but the head has a separate projection, as in Transformer-XL's public code. Without biases it has none,
        as in fairseq (Baevski & Auli 2019).
    cutoffs: ascending ranks below V; empty for a plain softmax. An `AdaptiveInput` has its own.
    biased: words and clusters have a learned bias; otherwise each word has a fixed bias of 0;
    tied: False: words have a separate weight (V, D), as in fairseq unless it is shared;
    shifted: features (..., D + shift_entries) end with shifts of all biases at a position, of V words and the clusters;
    dropout: of the features, and of a tail's projections.

    Logits and log-probabilities are float32 (float64 for float64 weights): sums of losses overflow in fp16.

    A word whose bias in a state dict is minus infinity is absent: its probability is always 0. Converted checkpoints
    have such words. In memory a mask marks them, which optimizers do not see, and their biases are finite.
    """

    def __init__(
        self,
        embedding: nn.Embedding | AdaptiveInput,
        cutoffs: Sequence[int] = (),
        *,
        biased: bool = True,
        tied: bool = True,
        shifted: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        words, dim = embedding.num_embeddings, embedding.embedding_dim
        cutoffs = embedding.bounds[1:-1] if isinstance(embedding, AdaptiveInput) else cutoffs
        check_cutoffs(cutoffs, words, embedding.padding_idx)
        self.bounds = [0, *cutoffs, words]
        # fairseq's adaptive_loss ignores the index of padding in every cluster, where it may be a word (in the head,
        # a cluster). So tail targets start after it, behind columns of probability zero.
        self.tail_offset = 0 if embedding.padding_idx is None else embedding.padding_idx + 1
        self.shift_entries = words + len(cutoffs) if shifted else 0
        self.bias: Tensor
        self.absent: Tensor | None  # (V,) bool; None if all words are present, to save time
        self.register_buffer("absent", None, persistent=False)
        if biased:
            self.bias = nn.Parameter(torch.zeros(words))
        else:
            self.register_buffer("bias", torch.zeros(words))
        self.clusters = nn.Linear(dim, len(cutoffs), bias=biased) if cutoffs else None
        self.dropout = Dropout(dropout, self)
        self.tables: Any = None
        self.projections: Any = None
        self.words: Any = None
        if isinstance(embedding, AdaptiveInput):
            self.tables = embedding.tables
            head = nn.Linear(dim, dim, bias=False) if biased else nn.Identity()
            self.projections = nn.ModuleList([head, *list(embedding.projections)[1:]])
            self.initialize()
        elif tied:
            self.weight = embedding.weight
        else:
            self.words = nn.Linear(dim, words, bias=False)

    def initialize(self) -> None:
        """Draw the projections, the shared ones too, as the paper's public code does."""
        for projection in self.projections or ():
            if isinstance(projection, nn.Linear):
                nn.init.normal_(projection.weight, std=PROJECTION_STD)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        bias = state_dict.get(f"{prefix}bias")
        if bias is not None:
            absent = bias.isneginf()
            self.absent = absent.to(self.bias.device) if absent.any() else None
            state_dict[f"{prefix}bias"] = bias.masked_fill(absent, 0)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}bias"] = self._masked(destination[f"{prefix}bias"])

    def forward(self, features: Tensor, target: Tensor) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return logits and targets of the tokens in each cluster; features (B, L, D), target (B, L) or (B L).

        The first entry is the head, for all B L tokens. A cluster without tokens is None in both lists. Logits of other
        clusters begin with `tail_offset` columns of minus infinity.
        """
        features, target = self.dropout(features.flatten(0, -2)), target.flatten()
        head_target, clusters = target.clone(), self._split()
        logits: list[Tensor | None] = [self._head(features, clusters)]
        targets: list[Tensor | None] = [head_target]
        for index, rows in self._rows_of_clusters(target):
            head_target[rows] = self.bounds[1] + index
            if len(rows) == 0:
                logits.append(None)
                targets.append(None)
                continue
            # Not features[rows]: on a GPU its gradient sorts the rows, of which each is only once here.
            tail = self._words(index + 1, features.index_select(0, rows), clusters)
            logits.append(F.pad(tail, (self.tail_offset, 0), value=-torch.inf))
            targets.append(target[rows] - self.bounds[index + 1] + self.tail_offset)
        return logits, targets

    def get_log_prob(self, features: Tensor, target: Tensor | None) -> Tensor:
        """Return log-probabilities (B, L, V) of features (B, L, D).

        With a target (B, L), words of a cluster are computed only for tokens whose target is in that cluster.
        """
        flat, clusters = features.flatten(0, -2), self._split()
        head = F.log_softmax(self._head(flat, clusters), dim=-1)
        if self.clusters is None:
            return head.unflatten(0, features.shape[:-1])
        log_probs = head.new_zeros(flat.shape[0], self.bounds[-1])
        log_probs[:, : self.bounds[1]] = head[:, : self.bounds[1]]
        for index, rows in self._rows_of_clusters(None if target is None else target.flatten(), flat.shape[0]):
            tail = F.log_softmax(self._words(index + 1, flat[rows], clusters), dim=-1)
            prior = head[rows, self.bounds[1] + index].unsqueeze(1)
            log_probs[rows, self.bounds[index + 1] : self.bounds[index + 2]] = tail + prior
        return log_probs.unflatten(0, features.shape[:-1])

    def target_log_prob(self, features: Tensor, target: Tensor) -> Tensor:
        """Return the log-probabilities (B, L) of targets (B, L); features (B, L, D).

        There is no tensor as wide as the vocabulary, and clusters without targets are skipped.
        """
        logits, targets = self(features, target)
        log_prob = -F.cross_entropy(logits[0], targets[0], reduction="none")
        for index, rows in self._rows_of_clusters(target.flatten()):
            if len(rows):
                log_prob[rows] -= F.cross_entropy(logits[index + 1], targets[index + 1], reduction="none")
        return log_prob.view_as(target)

    def loss_gradient(self, features: Tensor, target: Tensor) -> Tensor:
        """Return the gradient (B, L, D) of minus `target_log_prob` by the features (B, L, D), without a graph.

        It is computed in blocks of rows, whose logits fit into a processor's cache.
        """
        flat, head_target = features.flatten(0, -2), target.flatten().clone()
        tails, clusters = [], self._split()
        for index, rows in self._rows_of_clusters(target.flatten()):
            if len(rows):
                own = head_target[rows] - self.bounds[index + 1]
                tails.append((rows, self._loss_gradient(index + 1, flat[rows], own, clusters)))
                head_target[rows] = self.bounds[1] + index
        gradient = self._loss_gradient(0, flat, head_target, clusters)
        for rows, more in tails:
            gradient.index_add_(0, rows, more)
        return gradient.view_as(features)

    def _loss_gradient(self, index: int, flat: Tensor, target: Tensor, clusters: list[Cluster]) -> Tensor:
        """Return the gradient (N, D) of the loss of a cluster, 0 = the head, by flat (N, D)."""
        gradients = []
        for x, wanted in zip(flat.split(BLOCK), target.split(BLOCK), strict=True):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                logits = self._words(index, x, clusters) if index else self._head(x, clusters)
            errors = logits.detach().softmax(-1)
            errors[torch.arange(len(x), device=x.device), wanted] -= 1
            gradients += torch.autograd.grad(logits, x, errors)
        return torch.cat(gradients) if gradients else torch.zeros_like(flat)

    def _split(self) -> list[Cluster]:
        """Return all clusters, the head first. Of slices of a weight, each gradient would be as large as all words."""
        bias = self._masked(self.bias)
        if self.tables is None:
            weight = self.weight if self.words is None else self.words.weight
            if self.clusters is None:
                return [Cluster(weight, bias)]
        sizes = [high - low for low, high in pairwise(self.bounds)]
        weights = weight.split(sizes) if self.tables is None else [table.weight for table in self.tables]
        return list(map(Cluster, weights, bias.split(sizes)))

    def _head(self, flat: Tensor, clusters: list[Cluster]) -> Tensor:
        words = self._words(0, flat, clusters)
        if self.clusters is None:
            return words
        others = at_least_float32(self.clusters(self._project(0, flat, clusters[0].weight.dtype)))
        head = torch.cat([words, others], dim=-1)
        if self.shift_entries:
            head[:, self.bounds[1] :] += flat[:, flat.shape[1] - (len(self.bounds) - 2) :]
        return head

    def _words(self, index: int, flat: Tensor, clusters: list[Cluster]) -> Tensor:
        """The logits of the words of a cluster, 0 = the head."""
        weight, bias = clusters[index]
        with faster_linear(flat.shape[0], flat.device):
            logits = at_least_float32(F.linear(self._project(index, flat, weight.dtype), weight, bias))
        if self.shift_entries:
            shifts = flat[:, flat.shape[1] - self.shift_entries :]
            logits = logits + shifts[:, self.bounds[index] : self.bounds[index + 1]]
        return logits

    def _masked(self, bias: Tensor) -> Tensor:
        """The biases, minus infinity for words that are absent."""
        return bias if self.absent is None else bias.masked_fill(self.absent, -torch.inf)

    def _project(self, index: int, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """The features in the space of a cluster's embeddings, in their dtype."""
        if self.shift_entries:
            flat = flat[:, : flat.shape[1] - self.shift_entries]
        if self.projections is None or isinstance(self.projections[index], nn.Identity):
            return flat.to(dtype)
        weight = self.projections[index].weight
        projected = F.linear(flat.to(weight.dtype), weight.T)
        return self.dropout(projected) if index else projected

    def _rows_of_clusters(self, target: Tensor | None, count: int = 0) -> list[tuple[int, Tensor]]:
        """Return for each tail cluster the rows whose target is in it, or all `count` rows without a target."""
        if target is None:
            rows = torch.arange(count, device=self.bias.device)
            return [(index, rows) for index in range(len(self.bounds) - 2)]
        return [
            (index, ((target >= low) & (target < high)).nonzero().squeeze(1))
            for index, (low, high) in enumerate(pairwise(self.bounds[1:]))
        ]
