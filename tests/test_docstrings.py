"""Every public name says what it is, and shows it in an example that runs."""

import dataclasses
import doctest
import inspect
import re
import types

import pytest

import jax_fused_adamw as jfa

PACKAGE = jfa.__name__


def public_names(module) -> dict[str, object]:
    """What a module offers: neither submodules nor what it imports of others."""
    return {
        name: thing
        for name, thing in vars(module).items()
        if not name.startswith("_") and is_ours(thing)
    }


def is_ours(thing) -> bool:
    """A function, class, method or property of this package."""
    thing = thing.fget if isinstance(thing, property) else thing
    thing = getattr(thing, "__func__", thing)
    kinds = (types.FunctionType, type)
    return isinstance(thing, kinds) and thing.__module__.startswith(PACKAGE)


def our_bases(owner: type) -> list[type]:
    return [kind for kind in owner.__mro__ if is_ours(kind)]


def members(owner: type) -> dict[str, object]:
    """Public methods and properties that the package has given to a class."""
    return {k: x for base in our_bases(owner) for k, x in public_names(base).items()}


def fields(owner: type) -> list[str]:
    """Of a NamedTuple or dataclass, those that the package has given it."""
    annotated = {
        name for base in our_bases(owner) for name in inspect.get_annotations(base)
    }
    if dataclasses.is_dataclass(owner):
        named = [field.name for field in dataclasses.fields(owner)]
    else:
        named = getattr(owner, "_fields", ())
    return [name for name in named if name in annotated]


def examples(name: str, thing: object) -> list[doctest.DocTest]:
    """Those of a docstring, which import what they use."""
    finder = doctest.DocTestFinder(recurse=False)
    return [test for test in finder.find(thing, name, globs={}) if test.examples]


def defects(name: str, thing: object) -> list[str]:
    """What is wrong with a docstring."""
    text = inspect.cleandoc(thing.__doc__ or "")
    # A NamedTuple has its signature in the place of one.
    if not text or text.startswith(f"{name.split('.')[-1]}("):
        return [f"{name}: no docstring"]
    first = text.splitlines()[0]
    found = [] if len(first) <= 88 and first[-1] == "." else [f"{name}: first line"]
    found += [] if examples(name, thing) else [f"{name}: no example that runs"]
    sections, described = ["Examples:"], []
    if inspect.isclass(thing):
        described = fields(thing)
    elif inspect.isfunction(thing):
        described = [x for x in inspect.signature(thing).parameters if x != "self"]
        sections.append("Returns:")
    found += [f"{name}: no {x}" for x in sections if not re.search(f"^{x}", text, re.M)]
    entry = r"^\s+\*{{0,2}}{}: "
    found += [
        f"{name}: nothing about {x}"
        for x in described
        if not re.search(entry.format(x), text, re.M)
    ]
    return found


def with_members(things: dict[str, object]) -> dict[str, object]:
    classes = {name: thing for name, thing in things.items() if inspect.isclass(thing)}
    return things | {
        f"{name}.{member}": x
        for name, owner in classes.items()
        for member, x in members(owner).items()
    }


def flax_names() -> dict[str, object]:
    try:
        import jax_fused_adamw.flax as module
    except ImportError:
        return {}
    own = {k: x for k, x in public_names(module).items() if k not in vars(jfa)}
    return {
        f"flax.{name}": x for name, x in own.items() if x.__module__ == module.__name__
    }


PUBLIC = with_members(public_names(jfa) | flax_names())


@pytest.mark.parametrize("name", PUBLIC)
def test_is_documented(name):
    assert not defects(name, PUBLIC[name])


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(name):
    said = []
    for test in examples(name, PUBLIC[name]):
        doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not said, "".join(said)


class Documented:
    """A class.

    Attributes:
      size: in bytes.

    Examples:
      >>> 1 + 1
      2
    """

    __module__ = PACKAGE
    size: int

    @property
    def shown(self):
        """A property.

        Examples:
          >>> 1 + 1
          3
        """

    def silent(self):
        pass

    def half(self, part):
        """Takes a part."""

    for _function in (shown.fget, silent, half):
        _function.__module__ = PACKAGE


def test_names_what_is_missing():
    """The rules above, on what breaks them."""
    things = with_members({"D": Documented})
    assert list(things) == ["D", "D.shown", "D.silent", "D.half"]
    found = [
        defect for name, thing in things.items() for defect in defects(name, thing)
    ]
    assert found == [
        "D.silent: no docstring",
        "D.half: no example that runs",
        "D.half: no Examples:",
        "D.half: no Returns:",
        "D.half: nothing about part",
    ]
    (test,) = examples("D.shown", Documented.shown)
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None).failed


def test_finds_every_kind_of_name():
    expected = {"fused_adamw", "GradReport", "StatsPlan.levels", "FusedAdamW.step"}
    assert expected <= set(PUBLIC)
    assert fields(jfa.GradReport) == ["norm", "max_abs", "nonfinite"]
    assert "value" in fields(jfa.DynamicLossScale)  # of its private base
    assert "loaded" in fields(jfa.NativeModule)
