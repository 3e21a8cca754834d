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
and that equation's operands. These attributes are not JAX's public interface; where
they are missing (outside of a trace, inside a ``vmap``), all leaves form one bucket,
which is always right and costs only memory.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend import core

# Kernel time of a GPT-2 train step of 4 x 1024 tokens, 498 MB of gradients: one call
# 15,057 us, 256 MiB 15,082, 64 MiB 15,108, 16 MiB 15,191 (H200, 2026-11-29).
DEFAULT_BUCKET_BYTES = 256 * 2**20

# Equations that XLA dissolves: what is in them may run before or after the rest of it.
_CALLS = (
    "jit",
    "pjit",
    "checkpoint",
    "remat",
    "remat2",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
)


class Bucket(NamedTuple):
    """Leaves of one call, by index.

    Attributes:
      leaves: the leaves that it updates.
      after: leaves of later buckets whose gradients it waits for.
    """

    leaves: list[int]
    after: list[int]


def make_buckets(
    params: Sequence[Any],
    grads: Sequence[Any],
    bucket_bytes: float,
    copies: Sequence[Any] = (),
) -> list[Bucket]:
    """Cuts leaves into buckets of about ``bucket_bytes`` of gradients, first to last.

    Args:
      params: parameter leaves, as the loss was given them.
      grads: their gradients.
      bucket_bytes: a bucket is closed once it holds this much.
      copies: what the loss may have been given in the place of a parameter and the
        update writes over too; None for a leaf without.
    """
    read = list(zip(params, copies or [None] * len(params), strict=True))
    everything = [Bucket(list(range(len(grads))), [])]
    if sum(map(_nbytes, grads)) <= bucket_bytes:
        return everything
    flow = _Dataflow(grads)
    if not flow.equations:
        return everything
    order = sorted(range(len(grads)), key=lambda i: flow.depth_of(grads[i]))
    needed = flow.first_gradients([grads[i] for i in order])
    buckets: list[Bucket] = []
    done = 0
    for leaves in _split_by_size(order, grads, bucket_bytes):
        after = {
            position
            for i in leaves
            for array in read[i]
            if array is not None
            for reader in flow.readers_of(array)
            for position in needed[reader]
            if position >= done + len(leaves)  # the others are there already
        }
        if len(order) - 1 in after:  # for the last gradient: then all are in memory
            buckets.append(Bucket(sorted(order[done:]), []))
            break
        done += len(leaves)
        buckets.append(Bucket(sorted(leaves), sorted(order[i] for i in after)))
    return buckets


def _nbytes(x: Any) -> int:
    return x.size * x.dtype.itemsize


def _split_by_size(
    order: Sequence[int], grads: Sequence[Any], bucket_bytes: float
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


class _Equation(NamedTuple):
    """An operation of the program, its values by number."""

    operands: list[int]
    results: list[int]


class _Dataflow:
    """The program that given tracers come from, its calls dissolved.

    Attributes:
      equations: each after those that make its operands.
    """

    def __init__(self, tracers: Sequence[Any]):
        self.equations: list[_Equation] = []
        self._numbers: dict[int, int] = {}  # by id of a variable
        self._fresh = itertools.count()
        self._depth: dict[int, int] = defaultdict(int)
        self._is_array: dict[int, bool] = {}
        self._readers: dict[int, list[int]] = defaultdict(list)
        seen: set[int] = set()
        # A stack, since a model may be deeper than Python's recursion limit. An
        # equation lies on it below its operands and is done when it comes up again.
        stack = list(tracers)
        while stack:
            item = stack.pop()
            if isinstance(item, _Done):
                self._add_traced(item.equation)
                continue
            equation = getattr(item, "parent", None)
            operands = getattr(equation, "in_tracers", None)
            if operands is not None and id(equation) not in seen:
                seen.add(id(equation))
                stack.append(_Done(equation))
                stack.extend(operands)

    def _add_traced(self, equation: Any) -> None:
        operands = [self._number(_variable(tracer)) for tracer in equation.in_tracers]
        self._add(equation, operands, self._numbers)

    def _add(self, equation: Any, operands: list[int], numbers: dict[int, int]) -> None:
        body = _body(equation)
        if body is not None and len(body.invars) == len(operands):
            results = self._inline(body, operands)
            numbers |= zip(map(id, equation.outvars), results, strict=True)
            return
        results = [self._number(variable, numbers) for variable in equation.outvars]
        if equation.primitive.name == "optimization_barrier":
            # Each result is one of the operands, under another name.
            for operand, result in zip(operands, results, strict=True):
                self._append(_Equation([operand], [result]))
        else:
            self._append(_Equation(operands, results))

    def _append(self, equation: _Equation) -> None:
        depth = 1 + max((self._depth[x] for x in equation.operands), default=0)
        for result in equation.results:
            self._depth[result] = depth
        for operand in equation.operands:
            self._readers[operand].append(len(self.equations))
        self.equations.append(equation)

    def _inline(self, body: core.Jaxpr, operands: list[int]) -> list[int]:
        numbers = dict(zip(map(id, body.invars), operands, strict=True))
        for equation in body.eqns:
            inner = [self._number(variable, numbers) for variable in equation.invars]
            self._add(equation, inner, numbers)
        return [self._number(variable, numbers) for variable in body.outvars]

    def _number(self, variable: Any, numbers: dict[int, int] | None = None) -> int:
        numbers = self._numbers if numbers is None else numbers
        if id(variable) not in numbers:
            number = numbers[id(variable)] = next(self._fresh)
            self._is_array[number] = getattr(variable.aval, "ndim", 0) > 0
        return numbers[id(variable)]

    def depth_of(self, tracer: Any) -> int:
        """Equations on the longest way to a tracer; 0 for an argument."""
        return self._depth[self._numbers.get(id(_variable(tracer)), -1)]

    def readers_of(self, tracer: Any) -> set[int]:
        """Equations that read a tracer or a view of it, by index.

        A view is what one array alone determines: a transpose, a cast, a constraint.
        XLA may share its memory, or make it again where it is read.
        """
        found: set[int] = set()
        values = [self._numbers.get(id(_variable(tracer)), -1)]
        while values:
            for index in self._readers[values.pop()]:
                operands, results = self.equations[index]
                arrays = [x for x in operands if self._is_array[x]]
                if index not in found and len(arrays) == len(results) == 1:
                    values += [x for x in results if self._is_array[x]]
                found.add(index)
        return found

    def first_gradients(self, ordered_grads: Sequence[Any]) -> list[set[int]]:
        """By equation, gradients that are there only after it has run.

        Of those gradients that need a result of the equation, by position in
        ``ordered_grads``, the first; for each of its results.
        """
        first: dict[int, float] = defaultdict(lambda: math.inf)  # by value
        for position, grad in enumerate(ordered_grads):
            number = self._numbers.get(id(_variable(grad)), -1)
            first[number] = min(first[number], position)
        gradients: list[set[int]] = [set() for _ in self.equations]
        for index in reversed(range(len(self.equations))):
            operands, results = self.equations[index]
            gradients[index] = {int(first[x]) for x in results if first[x] < math.inf}
            if gradients[index]:
                latest = max(gradients[index])
                for operand in operands:
                    first[operand] = min(first[operand], latest)
        return gradients


class _Done(NamedTuple):
    equation: Any


def _variable(tracer: Any) -> Any:
    """What stands for a tracer in the equations; several tracers may share one."""
    variable = getattr(tracer, "val", None)
    return tracer if variable is None else variable


def _body(equation: Any) -> core.Jaxpr | None:
    """The equations inside of a call."""
    if equation.primitive.name not in _CALLS:
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = equation.params.get(name)
        body = getattr(body, "jaxpr", body)
        if isinstance(body, core.Jaxpr):
            return body
    return None
