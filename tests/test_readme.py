"""README and docs are a promise: what they show runs."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [README, *(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))]


def blocks(language: str, *pages: str) -> list[str]:
    """Return the code blocks of these pages in a language."""
    return [block for page in pages for block in re.findall(rf"```{language}\n(.*?)```", page, re.S)]


def commands() -> list[str]:
    """Return the kvist commands shown anywhere, with their continuation lines joined."""
    text = "\n".join(blocks("sh", *PAGES)).replace("\\\n", " ")
    shown = [re.sub(r"^docker run .* (?=kvist )", "", line) for line in text.splitlines()]
    return [line.partition("  #")[0].partition(" > ")[0].rstrip(" &") for line in shown if line.startswith("kvist ")]


def test_the_example_runs() -> None:
    (example,) = blocks("python", README)
    assert len(example.splitlines()) <= 20
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "PublisherStatistics(" in done.stdout


@pytest.mark.parametrize("command", commands())
def test_the_command_has_only_flags_that_exist(command: str) -> None:
    _, name, *arguments = shlex.split(command)
    module = importlib.import_module(f"kvist.cli.{name}")
    parser = argparse.ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    parser.parse_args(arguments)


def test_every_make_target_shown_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z][a-z-]*)", "\n".join([README, *blocks("sh", *PAGES)])):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_every_file_named_exists() -> None:
    for page in PAGES:
        for path in re.findall(r"`((?:docs|examples|benchmarks|tests|deploy)/[\w./]+)`", page):
            assert (ROOT / path).exists(), path


def test_what_is_said_of_kvist_beside_others_is_shown_by_tests() -> None:
    section = README.partition("## Beside other routers\n")[2].partition("\n## ")[0]
    (_, *head), _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\|.*", section, re.M)
    )
    assert [head[0], head[-1]] == ["Kvist", "shown by"]
    for capability, ours, *others, shown in rows:
        assert len([other for other in others if other]) == len(head) - 2, capability
        paths = re.findall(r"\]\((.*?)\)", shown)
        assert bool(paths) == (ours != "no"), capability
        for path in paths:
            assert re.search(r"^(async )?def test_", (ROOT / path).read_text(), re.M), path
