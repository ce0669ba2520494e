from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest

from kvist.transfer import commands, heads, memory, messages

MODULES = (commands, heads, memory, messages)


def public_parts(module: ModuleType) -> Iterator[tuple[str, object]]:
    for name, part in vars(module).items():
        if name.startswith("_") or getattr(part, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(part) or inspect.isclass(part):
            yield name, part
        if inspect.isclass(part):
            for method_name, method in vars(part).items():
                if not method_name.startswith("_") and (inspect.isfunction(method) or isinstance(method, property)):
                    yield f"{name}.{method_name}", method


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_part_says_what_it_guarantees(module: ModuleType) -> None:
    parts = dict(public_parts(module))
    assert parts
    assert [name for name, part in parts.items() if not inspect.getdoc(part)] == []
