"""The house itself: folders, links, packaging."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest

import kvist

ROOT = Path(__file__).parent.parent
PACKAGE = Path(kvist.__file__).parent


@pytest.mark.parametrize("name", ["publisher", "router", "radix", "kernels"])
def test_the_top_level_folder_is_a_link_into_the_package(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == PACKAGE / name


def test_a_base_install_pulls_four_packages() -> None:
    base = [requirement for requirement in requires("kvist") or [] if "extra ==" not in requirement]
    assert {re.split(r"[^A-Za-z0-9_-]", requirement)[0] for requirement in base} == {
        "msgspec",
        "numpy",
        "pyzmq",
        "xxhash",
    }


def test_every_package_says_what_it_is_for() -> None:
    for init in PACKAGE.rglob("__init__.py"):
        docstring = re.match(r'"""(.*?)"""', init.read_text(), re.S)
        assert docstring, f"{init} has no docstring"
        assert docstring[1].strip().count("\n") < 10, f"{init}: a folder's idea takes at most 10 lines"


def test_what_ci_installs_is_pinned() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*extras["dependencies"], *(one for extra in extras["optional-dependencies"].values() for one in extra)]
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    for requirement in named:
        name = re.split(r"[^A-Za-z0-9_-]", requirement)[0]
        assert name in pinned or name == "kvist", f"{name} is not in constraints.txt"


@pytest.mark.xdist_group("whole system")
def test_groups_of_tests_are_heeded(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("loadgroup", default=False):  # which else would run fleets side by side without a word
        assert request.node.nodeid.endswith("@whole system")
