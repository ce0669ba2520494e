"""The Python files of real engines, imported without the rest of the engines: stand-ins replace their other imports.

`make engines` runs this file: it downloads the wheels once and keeps their Python files in `.engines/`, with the
baseline's indexer.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from zipfile import ZipFile

FOLDER = Path(__file__).resolve().parent.parent / ".engines"
WHEELS = {"vllm": "0.33.0", "sglang": "0.5.23", "ai-dynamo-runtime": "1.6.1"}
"""What is fetched. Of the engines their Python files alone are kept; the baseline's wheel is kept whole."""
MISSING = "no engines' files: run `make engines` once (460 MB are fetched, 360 MB kept in .engines/)"


def versions() -> dict[str, str]:
    """Return which versions are there, by distribution; none if `make engines` was not run."""
    found = distributions(path=[str(FOLDER)]) if (FOLDER / ".made").exists() else ()
    return {each.name: each.version for each in found}


class _StandInType(type):
    """Whatever is asked of a stand-in, in a signature, a base class or a decorator, it has."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn

    def __or__(cls, _other: object) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, _item: object) -> Any:
        return cls


class StandIn(metaclass=_StandInType):
    """A class of nobody's: can be inherited, called, used as a decorator, and does nothing."""

    def __init__(self, *_args: object, **_options: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> Any:  # a field of it takes anything
        return {"type": "any"}

    def __call__(self, *args: Any, **options: object) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not options else self


class _StandInModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn


class _Finder(MetaPathFinder, Loader):
    """Finds one package's chosen modules in the folder; the rest of it, and what is `outside`, are stand-ins."""

    def __init__(self, package: str, real: Collection[str], outside: Collection[str]) -> None:
        self._package, self._real, self.outside = package, frozenset(real), frozenset(outside)

    def find_spec(self, fullname: str, _path: Sequence[str] | None, _target: object = None) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top == self._package and fullname in self._real:
            source = FOLDER.joinpath(*fullname.split("."))
            if source.is_dir():
                locations = [str(source)]
                return importlib.util.spec_from_file_location(
                    fullname, source / "__init__.py", submodule_search_locations=locations
                )
            return importlib.util.spec_from_file_location(fullname, source.with_suffix(".py"))
        if top == self._package or top in self.outside:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _StandInModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def engine_files(
    package: str, real: Collection[str], outside: Collection[str], played: dict[str, dict[str, Any]]
) -> Iterator[None]:
    """Within it, `real` modules of a package are those of its wheel; afterwards what is `outside` is as it was.

    `played` says what some modules that are not real have, where nothing would not do.
    """
    if not (FOLDER / ".made").exists():
        raise FileNotFoundError(MISSING)
    finder = _Finder(package, real, outside)
    kept = _pop_modules(outside)
    sys.meta_path.insert(0, finder)
    try:
        for name, attributes in played.items():
            vars(importlib.import_module(name)).update(attributes)
        yield
    finally:
        _pop_modules(outside)
        sys.modules.update(kept)
        finder.outside = frozenset()  # it stays, for what the package imports when it runs


def _pop_modules(tops: Collection[str]) -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in tops}


def quiet_logger(name: str) -> logging.Logger:
    """Return a logger as engines make them, that says nothing below an error."""
    logger = logging.getLogger(name)
    logger.setLevel(logging.ERROR)
    vars(logger).update(debug_once=logger.debug, info_once=logger.info, warning_once=logger.warning)
    return logger


def main() -> None:
    """Fetch what is missing."""
    if versions() == WHEELS:
        return
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / ".made").unlink(missing_ok=True)
    for name, number in WHEELS.items():
        print(f"fetching {name} {number}", flush=True)
        with TemporaryDirectory(dir=FOLDER) as folder:
            wanted = ["--no-deps", "--only-binary", ":all:", "--dest", folder, f"{name}=={number}"]
            subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *wanted], check=True)
            (wheel,) = Path(folder).glob("*.whl")
            with ZipFile(wheel) as files:
                is_whole = name == "ai-dynamo-runtime"
                for each in files.namelist():
                    if is_whole or each.endswith((".py", ".dist-info/METADATA")):
                        files.extract(each, FOLDER)
    (FOLDER / ".made").touch()


if __name__ == "__main__":
    main()
