"""Which leaves share a kernel call, so that gradients can die early.

One call for the whole tree waits for the last gradient, and by then every gradient
is in memory. Calls of a few leaves, in the order in which the backward pass finishes
their gradients, let XLA free each gradient long before. But an update writes over its
parameters, so it must come after everything that reads them: the backward pass of a
layer reads its weights once more after it has their gradient, on its way to the layer
before. Where nothing orders the two, XLA saves the parameters with a copy. So a bucket
also waits for the bucket before it, and for gradients of later ones: those that can
only be computed once its own parameters have been read for the last time.

What reads what is known to the tracers under ``jax.jit``: the equation that made each,
and that equation's operands. These two attributes are not JAX's public interface;
where they are missing, and outside of a trace, all leaves form one bucket, which is
always right and costs only memory.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

# Kernel time of a GPT-2 train step of 4 x 1024 tokens, 498 MB of gradients: one call
# 15,057 us, 256 MiB 15,082, 64 MiB 15,108, 16 MiB 15,191 (H200, 2026-11-29).
DEFAULT_BUCKET_BYTES = 256 * 2**20


class Bucket(NamedTuple):
    """Leaves of one call, by index.

    Attributes:
      leaves: the leaves that it updates.
      after: leaves of later buckets whose gradients it waits for.
    """

    leaves: list[int]
    after: list[int]


def make_buckets(
    params: Sequence[Any], grads: Sequence[Any], bucket_bytes: int
) -> list[Bucket]:
    """Cuts leaves into buckets of about ``bucket_bytes`` of gradients, first to last.

    Args:
      params: parameter leaves, as the loss was given them.
      grads: their gradients.
      bucket_bytes: a bucket is closed once it holds this much.
    """
    everything = [Bucket(list(range(len(grads))), [])]
    if sum(map(_nbytes, grads)) <= bucket_bytes:
        return everything
    flow = _Dataflow(grads)
    if not flow.equations:
        return everything
    order = sorted(range(len(grads)), key=lambda i: flow.depth(grads[i]))
    awaited = flow.first_gradients([grads[i] for i in order])
    buckets = []
    done = 0
    for leaves in _cut(order, grads, bucket_bytes):
        done += len(leaves)
        after = {
            position
            for i in leaves
            for reader in flow.readers[id(params[i])]
            for position in awaited[id(reader)]
            if position >= done  # the others come with this bucket or the one before
        }
        buckets.append(Bucket(sorted(leaves), sorted(order[i] for i in after)))
    return buckets


def _nbytes(x: Any) -> int:
    return x.size * x.dtype.itemsize


def _cut(
    order: Sequence[int], grads: Sequence[Any], bucket_bytes: int
) -> Iterator[list[int]]:
    bucket: list[int] = []
    size = 0
    for i in order:
        bucket.append(i)
        size += _nbytes(grads[i])
        if size >= bucket_bytes:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


class _Dataflow:
    """The equations that the given tracers come from.

    Attributes:
      equations: each after those that make its operands.
      results: by id of an equation, the tracers it makes that are read.
      readers: by id of a tracer, the equations that read it.
    """

    def __init__(self, tracers: Sequence[Any]):
        self.equations: list[Any] = []
        self.results: dict[int, list[Any]] = defaultdict(list)
        self.readers: dict[int, list[Any]] = defaultdict(list)
        self._depths: dict[int, int] = {}
        seen: set[int] = set()
        # A stack, since a model may be deeper than Python's recursion limit. An
        # equation lies on it below its operands and is done when it comes up again.
        stack = list(tracers)
        while stack:
            item = stack.pop()
            if isinstance(item, _Done):
                self._add(item.equation)
                continue
            equation = getattr(item, "parent", None)
            if equation is None or id(item) in seen:
                continue
            seen.add(id(item))
            self.results[id(equation)].append(item)
            if id(equation) not in seen:
                seen.add(id(equation))
                stack.append(_Done(equation))
                stack.extend(_operands(equation))

    def _add(self, equation: Any) -> None:
        operands = _operands(equation)
        for operand in operands:
            self.readers[id(operand)].append(equation)
        self._depths[id(equation)] = 1 + max(map(self.depth, operands), default=0)
        self.equations.append(equation)

    def depth(self, tracer: Any) -> int:
        """Equations on the longest way to a tracer; 0 for an argument."""
        return self._depths.get(id(getattr(tracer, "parent", None)), 0)

    def first_gradients(self, ordered_grads: Sequence[Any]) -> dict[int, set[int]]:
        """By id of an equation, the gradients that are there only after it has run.

        Positions in ``ordered_grads``: of those that need a result of the equation,
        the first, for each of its results. For each, because XLA inlines equations
        that are calls and may then compute their results one by one.
        """
        position: dict[int, int] = {}  # by id of a tracer
        for i, grad in reversed(list(enumerate(ordered_grads))):
            position[id(grad)] = i
        first: dict[int, set[int]] = {}
        for equation in reversed(self.equations):
            for result in self.results[id(equation)]:
                needed_by = [max(first[id(r)]) for r in self.readers[id(result)]]
                needed_by.append(position.get(id(result), len(ordered_grads)))
                position[id(result)] = min(needed_by)
            first[id(equation)] = {position[id(r)] for r in self.results[id(equation)]}
        return first


class _Done(NamedTuple):
    equation: Any


def _operands(equation: Any) -> Sequence[Any]:
    return getattr(equation, "in_tracers", ())
