"""Leaf shapes: of models that are well known, and of the user's own."""

import importlib
import json
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jax_fused_adamw.bench import BenchError

Shape = tuple[int, ...]
Leaves = list[Shape]


def _mlp() -> Iterator[Shape]:
    for _ in range(8):
        yield from [(64, 64), (64,)]


def _conv_norm(size: int, n_in: int, n_out: int) -> Iterator[Shape]:
    yield from [(size, size, n_in, n_out), (n_out,), (n_out,)]


def _resnet50() -> Iterator[Shape]:
    yield from _conv_norm(7, 3, 64)
    n_in = 64
    for width, num_blocks in [(64, 3), (128, 4), (256, 6), (512, 3)]:
        for block in range(num_blocks):
            yield from _conv_norm(1, n_in, width)
            yield from _conv_norm(3, width, width)
            yield from _conv_norm(1, width, 4 * width)
            if block == 0:
                yield from _conv_norm(1, n_in, 4 * width)
            n_in = 4 * width
    yield from [(2048, 1000), (1000,)]


def _transformer(num_blocks: int, d: int) -> Iterator[Shape]:
    """Blocks with one matrix for query, key and value; then the last norm."""
    for _ in range(num_blocks):
        yield from [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,)]
        yield from [(d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    yield from [(d,), (d,)]


def _gpt2() -> Iterator[Shape]:
    yield from [(50257, 768), (1024, 768), *_transformer(12, 768)]


def _vit_b16() -> Iterator[Shape]:
    yield from [(1, 1, 768), (1, 197, 768), (16, 16, 3, 768), (768,)]
    yield from [*_transformer(12, 768), (768, 1000), (1000,)]


def _llama_1b() -> Iterator[Shape]:
    """TinyLlama: grouped-query attention with 4 heads for key and value."""
    d, kv, hidden = 2048, 256, 5632
    yield (32000, d)
    for _ in range(22):
        yield from [(d, d), (d, kv), (d, kv), (d, d)]
        yield from [(d, hidden), (d, hidden), (hidden, d), (d,), (d,)]
    yield from [(d,), (d, 32000)]


def _small1000() -> Iterator[Shape]:
    for _ in range(500):
        yield from [(128, 128), (128,)]


def _one_leaf() -> Iterator[Shape]:
    yield (16384, 16384)


SHAPES: dict[str, Callable[[], Iterator[Shape]]] = {
    "mlp": _mlp,
    "resnet50": _resnet50,
    "gpt2": _gpt2,
    "vit_b16": _vit_b16,
    "llama_1b": _llama_1b,
    "small1000": _small1000,
    "one_leaf": _one_leaf,
}


def named(name: str) -> Leaves:
    """The leaves of one of ``SHAPES``."""
    return list(SHAPES[name]())


def num_parameters(leaves: Leaves) -> int:
    """How many parameters the leaves hold."""
    return sum(map(math.prod, leaves))


def read_shapes(path: pathlib.Path) -> dict[str, Leaves]:
    """Reads ``{"name": [[2, 3], [3]], ...}``.

    Args:
      path: a JSON file.

    Raises:
      BenchError: no such file, or something else in it.
    """
    wanted = '{"name": [[2, 3], [3]], ...}: the shape of every leaf of every model'
    try:
        models = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--shapes {str(path)!r}: cannot read it: {error}") from error
    except json.JSONDecodeError as error:
        raise BenchError(
            f"--shapes {str(path)!r} is not JSON ({error}); expected {wanted}"
        ) from error
    if not isinstance(models, dict) or not models:
        raise BenchError(
            f"--shapes {str(path)!r}: expected {wanted}; got {_short(models)}"
        )
    source = f"--shapes {str(path)!r}"
    return {name: _checked(models[name], source, name, wanted) for name in models}


def import_shapes(name: str) -> dict[str, Leaves]:
    """Calls ``pkg.module:function``, which returns parameters or their shapes.

    Args:
      name: where the function is. It takes no argument and returns a tree of arrays
        (or of ``jax.ShapeDtypeStruct``), or a list of shapes.

    Raises:
      BenchError: no such function, it failed, or it returned something else.
    """
    source = f"--module {name!r}"
    module, _, function = name.partition(":")
    if not module or not function:
        raise BenchError(f"{source}: expected pkg.module:function")
    try:
        tree = getattr(importlib.import_module(module), function)()
    except Exception as error:  # any code of the user's may run here
        raise BenchError(f"{source}: {type(error).__name__}: {error}") from error
    leaves = jax.tree.leaves(tree)
    if leaves and all(hasattr(leaf, "shape") for leaf in leaves):
        for leaf in leaves:
            if leaf.dtype != "float32":
                raise BenchError(
                    f"{source}: a parameter of dtype {leaf.dtype}; the bench measures "
                    "float32 parameters, so return the float32 ones (or their shapes)"
                )
        tree = [leaf.shape for leaf in leaves]
    wanted = "a tree of arrays or a list of shapes such as [(2, 3), (3,)]"
    return {function: _checked(tree, source, function, wanted)}


def _checked(shapes: Any, source: str, name: str, wanted: str) -> Leaves:
    def is_size(n: Any) -> bool:
        return isinstance(n, int) and not isinstance(n, bool) and n > 0

    if not isinstance(shapes, list | tuple) or not shapes:
        raise BenchError(f"{source}: expected {wanted}; {name!r} is {_short(shapes)}")
    for shape in shapes:
        if not isinstance(shape, list | tuple) or not all(map(is_size, shape)):
            raise BenchError(
                f"{source}: expected {wanted}; {name!r} holds {_short(shape)}, and a "
                "shape is a list of positive whole numbers"
            )
    return [tuple(shape) for shape in shapes]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
