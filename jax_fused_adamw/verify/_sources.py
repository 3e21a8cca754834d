"""Which source is verified: where it is, what it holds, and whether it is installed."""

import hashlib
import pathlib
import subprocess
from collections.abc import Iterable
from typing import Any

import jax_fused_adamw as jfa
from jax_fused_adamw.verify import VerifyError

_FOLDERS = ("cc", "cmake", "jax_fused_adamw", "tests")
_BUILD_FILES = ("CMakeLists.txt", "pyproject.toml")
_MADE = (".pyc", ".so")  # by a build or a run


def find_source(given: pathlib.Path | None) -> pathlib.Path | None:
    """The source checkout: the one given, else the package's, else this folder.

    Raises:
      VerifyError: what was given is none.
    """
    if given is not None:
        if not _is_source(given):
            raise VerifyError(
                f"--source {str(given)!r}: expected a checkout of jax_fused_adamw, "
                "with pyproject.toml, cc and tests"
            )
        return given.resolve()
    package = pathlib.Path(jfa.__file__).resolve().parent
    places = (package.parent, pathlib.Path.cwd())
    return next((place for place in places if _is_source(place)), None)


def _is_source(folder: pathlib.Path) -> bool:
    wanted = ("pyproject.toml", "cc/core/adamw.h", "tests/oracle.py")
    return all((folder / name).is_file() for name in wanted)


def describe_source(source: pathlib.Path) -> dict[str, Any]:
    """SHA-256 of each folder and of all together, and the commit.

    A folder's is that of its manifest: a line ``<sha256 of the file>  <path>`` for
    every file but those that a build or a run makes.
    """
    hashes = {}
    for name in _FOLDERS:
        hashes[name] = _manifest_hash(source / name, _files(source / name))
    for name in _BUILD_FILES:
        hashes[name] = _sha256((source / name).read_bytes())
    everything = "".join(f"{value}  {name}\n" for name, value in hashes.items())
    return {
        "folder": str(source),
        "sha256": {"all": _sha256(everything.encode()), **hashes},
        "git": _describe_git(source),
    }


def same_python(source: pathlib.Path, package: pathlib.Path) -> bool:
    """Whether the installed package's Python files are those of the source."""
    ours, theirs = (
        _manifest_hash(folder, folder.rglob("*.py"))
        for folder in (source / "jax_fused_adamw", package)
    )
    return ours == theirs


def newer_than(source: pathlib.Path, module: pathlib.Path) -> str | None:
    """The newest file of the native source, if it is newer than the module."""
    newest = max(_files(source / "cc"), key=lambda path: path.stat().st_mtime)
    if newest.stat().st_mtime <= module.stat().st_mtime:
        return None
    return str(newest.relative_to(source))


def _files(folder: pathlib.Path) -> Iterable[pathlib.Path]:
    for path in folder.rglob("*"):
        hidden = any(part[0] == "." for part in path.relative_to(folder).parts)
        if path.is_file() and path.suffix not in _MADE and not hidden:
            yield path


def _manifest_hash(folder: pathlib.Path, paths: Iterable[pathlib.Path]) -> str:
    named = sorted((path.relative_to(folder).as_posix(), path) for path in paths)
    lines = (f"{_sha256(path.read_bytes())}  {name}\n" for name, path in named)
    return _sha256("".join(lines).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _describe_git(source: pathlib.Path) -> dict[str, Any] | None:
    """Commit and whether files differ from it; None outside of a repository."""
    try:
        top, commit = _git(source, "rev-parse", "--show-toplevel", "HEAD").splitlines()
        if pathlib.Path(top).resolve() != source:
            return None  # a copy inside of another repository
        return {"commit": commit, "dirty": bool(_git(source, "status", "--porcelain"))}
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _git(source: pathlib.Path, *arguments: str) -> str:
    command = ["git", "-C", str(source), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=True
    ).stdout
