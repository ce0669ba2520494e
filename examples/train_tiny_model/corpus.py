"""The training text: every documented name of the running interpreter, and Python's language reference."""

import ast
import importlib
import inspect
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

SKIPPED = {"test", "tests", "site-packages", "ensurepip", "encodings", "lib2to3", "distutils"}
SKIPPED |= {"idlelib", "tkinter", "turtle", "turtledemo"}
PUBLIC_NAMES = {"posixpath": "os.path", "_pydecimal": "decimal", "_pyio": "io", "_collections_abc": "collections.abc"}
BUILTIN_OWNERS = ("builtins", "math", "itertools", "time", "sys", "collections", "functools", "struct", "operator")


@dataclass(frozen=True, slots=True)
class Entry:
    """One documented name, as a question asks for it, and its documentation."""

    name: str
    title: str
    doc: str

    @property
    def text(self) -> str:
        return f"{self.title}.\n\n{self.doc}"

    @property
    def answer(self) -> str:
        paragraphs = [" ".join(p.split()) for p in self.doc.split("\n\n") if p[:1].isalpha() and ">>>" not in p]
        body = " ".join(p if p[-1] in ".:" else p + "." for p in paragraphs[:2]) + " "
        return f"{self.title}. {body[: body.rfind('. ', 0, 300) + 1]}".strip()

    @property
    def is_held_out(self) -> bool:
        return zlib.crc32(self.name.encode()) % 40 == 0


def python_entries(node: ast.AST, module: str, scope: str = "") -> Iterator[Entry]:
    """The documented modules, classes and functions of one Python source file."""
    name = f"{module}.{scope}" if scope else module
    match node:
        case ast.Module():
            title = f"{name} is a module of Python's standard library"
        case ast.ClassDef():
            title = f"{name} is a class of the {module} module"
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            title = f"{name}({ast.unparse(node.args)}) is a function of the {module} module"
        case _:
            return
    if doc := ast.get_docstring(node):
        yield Entry(name, title, doc)
    for child in node.body:
        yield from python_entries(child, module, f"{scope}.{getattr(child, 'name', '')}".lstrip("."))


def builtin_entries(owner: object, prefix: str) -> Iterator[Entry]:
    """The documented names of a module or class that is written in C."""
    for name, value in sorted(vars(owner).items()):
        doc = inspect.getdoc(value) if callable(value) and not name.startswith("_") else None
        if doc and inspect.isclass(value):
            yield Entry(prefix + name, f"{prefix}{name} is a built-in class of Python", doc)
            yield from builtin_entries(value, f"{prefix}{name}.")
        elif doc:
            yield Entry(prefix + name, f"{prefix}{name} is a built-in function of Python", doc)


def read_entries(max_files: int | None = None) -> list[Entry]:
    """Every documented name, once, in an order that depends on the interpreter alone; or of its first files."""
    entries = []
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"))[:max_files]:
        parts = path.relative_to(root).with_suffix("").parts
        if not SKIPPED & set(parts):
            module = ".".join(parts).removesuffix(".__init__")
            entries += python_entries(ast.parse(path.read_bytes()), PUBLIC_NAMES.get(module, module))
    for module in BUILTIN_OWNERS:
        entries += builtin_entries(importlib.import_module(module), "" if module == "builtins" else f"{module}.")
    for text in topics.values():
        title, _, body = text.replace('"', "").partition("\n")
        name = title[0].lower() + title[1:]
        entries.append(Entry(name, f"{title} is a topic of the language", body.lstrip("*=-~\n")))
    return list({entry.text: entry for entry in entries}.values())
