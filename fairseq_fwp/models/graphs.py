"""CUDA graphs of a decoder: its layers in training, and steps of decoding. A GPU then does not wait for Python.

A graph has the shapes of one call, reads and writes the same memory in each replay, and must not wait for the GPU.
Here what it is given is copied into that memory, and what it returns out of it, where anyone might still need it.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fairseq_fwp.modules.attention.base import StateTree, detach

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE as Pool

logger = logging.getLogger(__name__)

# Graphs keep their memory, so this many shapes have one.
MOST_SHAPES = 8
# Calls of a shape before its capture: until then kernels are built and checked, and shapes that do not come again are
# not captured.
EAGER_CALLS = 3
OF_THREAD = "thread_local"  # what other threads do then does not end a capture

Graph = TypeVar("Graph")
Layers = Callable[[Tensor, StateTree], tuple[Tensor, StateTree]]


class Shapes(Generic[Graph]):
    """The graphs of the shapes that came often. what: their name in the log."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.graphs: dict[Hashable, Graph] = {}
        self.calls: Counter[Hashable] = Counter()
        self.is_full = False
        self._pool: Pool | None = None

    def find(self, shape: Hashable, capture: Callable[[], Graph]) -> Graph | None:
        """Return the graph of a shape, which `capture` makes after some calls; None: this call has none."""
        if shape in self.graphs:
            return self.graphs[shape]
        if len(self.graphs) == MOST_SHAPES:
            if not self.is_full:
                logger.info(f"{MOST_SHAPES} shapes of {self.what} have CUDA graphs: all others run without")
            self.is_full = True
            return None
        self.calls[shape] += 1
        if self.calls[shape] <= EAGER_CALLS:
            return None
        self.graphs[shape] = capture()
        return self.graphs[shape]

    @property
    def pool(self) -> "Pool":
        """The memory that the graphs share, because no two of them run at the same time."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return self._pool

    def __reduce__(self) -> tuple[type["Shapes[Graph]"], tuple[str]]:
        """Copy and pickle it without graphs, which belong to one model in one process."""
        return type(self), (self.what,)


def split(state: StateTree) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], StateTree]]:
    """Return the tensors of a state, and a function that returns such a state of other tensors."""
    leaves, spec = tree_flatten(state)
    are_tensors = [isinstance(leaf, Tensor) for leaf in leaves]  # else None

    def join(given: Sequence[Tensor]) -> StateTree:
        rest = iter(given)
        return tree_unflatten([next(rest) if is_tensor else None for is_tensor in are_tensors], spec)

    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], join


def copy_all(to: Iterable[Tensor], given: Iterable[Tensor]) -> None:
    """Copy tensors into others of their shapes, by one launch for each dtype."""
    pairs: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for pair in zip(to, given, strict=True):
        pairs.setdefault(pair[0].dtype, []).append(pair)
    for same in pairs.values():
        torch._foreach_copy_([x for x, _ in same], [x for _, x in same])


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors."""
    copies = [torch.empty_like(x, requires_grad=False) for x in tensors]
    copy_all(copies, tensors)
    return copies


class Trunk(nn.Module):
    """Layers as a function of tensors only, of x and those of a state. after: the new state, detached.

    A graph has it in memory that each replay writes again. As a result it would get a gradient.
    """

    def __init__(self, layers: nn.ModuleList, run: Layers, join: Callable[[Sequence[Tensor]], StateTree]) -> None:
        super().__init__()
        self.layers = layers  # whose parameters get gradients
        self.run = run
        self.join = join
        self.after: StateTree = None

    def forward(self, x: Tensor, *tensors: Tensor) -> Tensor:
        y, after = self.run(x, self.join(tensors))
        self.after = detach(after)
        return y


class Pass:
    """A forward pass of a graph, which lives as long as the graph of autograd that it is a part of."""

    ended = False

    def end(self, grad: Tensor) -> None:
        """Note that the backward pass has come."""
        self.ended = True


class TrunkGraphs:
    """A decoder's layers in training: for each shape a graph of the forward pass, and one of the backward pass.

    Gradients do not flow into another segment, as the states that it returns are detached.
    """

    def __init__(self) -> None:
        self.shapes: Shapes[Trunk] = Shapes("training")
        self.last: Callable[[], Pass | None] = lambda: None

    def __reduce__(self) -> tuple[type["TrunkGraphs"], tuple[()]]:
        """Copy and pickle it without graphs."""
        return type(self), ()

    def __call__(
        self, layers: nn.ModuleList, run: Layers, x: Tensor, state: StateTree
    ) -> tuple[Tensor, StateTree] | None:
        """Return run(x, state) by a graph of the layers; None: this call must do without.

        That is so for each shape at first. It is so, too, while the backward pass of the last call is still to come,
        which needs that call's memory. Hooks see no replay, and autocast keeps weights that a replay does not cast.
        """
        tensors, join = split(state)
        if not (x.is_cuda and torch.is_grad_enabled()) or torch.is_autocast_enabled("cuda"):
            return None
        if any(part.requires_grad for part in tensors) or self._is_passing() or has_hooks(layers):
            return None
        trained = tuple(p.requires_grad for p in layers.parameters())
        shape = (x.shape, x.dtype, x.requires_grad, tuple((part.shape, part.dtype) for part in tensors), trained)
        trunk = self.shapes.find(shape, lambda: self._capture(Trunk(layers, run, join), x, tensors))
        if trunk is None:
            return None
        own_gradients(layers.parameters())
        y = trunk(x, *tensors)
        if y.requires_grad:
            self._watch(y)
        after, join = split(trunk.after)
        return y, join(copies_of(after))

    def _capture(self, trunk: Trunk, x: Tensor, tensors: Sequence[Tensor]) -> Trunk:
        inputs = tuple(part.detach().clone().requires_grad_(part.requires_grad) for part in (x, *tensors))
        # So that the dropout of this update is the same as without a graph.
        with torch.random.fork_rng([x.device]), other_threads_free():
            torch.cuda.make_graphed_callables(trunk, inputs, allow_unused_input=True, pool=self.shapes.pool)
        return trunk

    def _is_passing(self) -> bool:
        last = self.last()
        return last is not None and not last.ended

    def _watch(self, y: Tensor) -> None:
        """Keep in mind that the pass of y has begun; autograd's graph keeps its hook, and with it the pass."""
        started = Pass()
        y.register_hook(started.end)
        self.last = weakref.ref(started)


@contextmanager
def other_threads_free() -> Iterator[None]:
    """Let other threads call CUDA during a capture, as that of fairseq's iterators does, which pins batches."""
    usual = torch.cuda.graph
    torch.cuda.graph = partial(usual, capture_error_mode=OF_THREAD)  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.cuda.graph = usual  # type: ignore[misc]


def has_hooks(layers: nn.ModuleList) -> bool:
    """Return whether anyone looks into the layers, as fairseq's search for numbers that are not finite does."""
    return any(x._forward_hooks or x._forward_pre_hooks or x._backward_hooks for x in layers.modules())


def own_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters gradients of their own: those of the last replay lie where the next one writes.

    So an update may add the gradients of several batches.
    """
    held = [(p, p.grad) for p in parameters if p.grad is not None]
    for (p, _), gradient in zip(held, copies_of([gradient for _, gradient in held]), strict=True):
        p.grad = gradient


class StepGraph:
    """A function of tensors as a graph: `read(*tensors)`, of which results are copies."""

    def __init__(self, read: Callable[..., list[Tensor]], tensors: Sequence[Tensor], pool: "Pool") -> None:
        self.inputs = [x.clone() for x in tensors]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what libraries prepare at their first call on a stream is not for a capture
            read(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode=OF_THREAD):
            self.outputs = read(*self.inputs)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        copy_all(self.inputs, tensors)
        self.graph.replay()
        return copies_of(self.outputs)


class StepGraphs:
    """Steps of decoding: for each shape a graph of one token after a state."""

    def __init__(self) -> None:
        self.shapes: Shapes[StepGraph] = Shapes("decoding")

    def __call__(
        self, step: Layers, token: Tensor, state: StateTree, rows: Tensor | None
    ) -> tuple[Tensor, StateTree] | None:
        """Return step(token, state), after the state's rows (B,) if given, by a graph; None: this call has none."""
        before, join = split(state)
        inputs = [token, *before] if rows is None else [token, *before, rows]

        def read(token: Tensor, *given: Tensor) -> list[Tensor]:
            state = join(given[: len(before)])
            result, state = step(token, state if rows is None else state.reorder(given[-1]))
            return [result, *split(state)[0]]

        shape = tuple((x.shape, x.dtype) for x in inputs)
        graph = self.shapes.find(shape, lambda: StepGraph(read, inputs, self.shapes.pool))
        if graph is None:
            return None
        result, *after = graph(inputs)
        return result, join(after)
