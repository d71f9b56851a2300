"""Which room may import which: the table of docs/architecture.md, held against every import of the checkout."""

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]

CONFIG = {"fairseq", "numpy", "omegaconf", "torch"}
PEOPLE = CONFIG | {"fairseq_cli", "matplotlib", "onnxruntime", "sacrebleu", "safetensors", "tqdm", "yaml"}


def ours(*rooms: str) -> set[str]:
    return {f"fairseq_fwp.{room}" for room in rooms}


# What each room may import besides itself and the standard library, storey by storey from the ground. A room within
# another has its own row where it may import less, or more. Imports never point to a storey above.
ROOMS_OF_STOREYS = {
    "torch only": {
        "outputs": set(),
        "ops": {"torch"},
        "ops.checks": set(),
        "ops.kernels": {"torch"} | ours("outputs"),
        "modules": {"torch"} | ours("ops"),
        "interop": {"torch", "transformers"} | ours("ops"),
        # Of a model it only uses what `decoding` names, as tasks do.
        "evaluation": {"torch"} | ours("modules.decoding", "modules.onednn"),
        "testing": {"torch"} | ours("ops"),
        "kernel_checks": {"torch"} | ours("modules", "ops"),
    },
    "fairseq repaired": {
        "patches": CONFIG | {"bitarray", "fairseq_cli", "subword_nmt"} | ours("outputs"),
        "patches.options": {"omegaconf"},
    },
    "models and tools": {
        "models": CONFIG | ours("modules", "ops", "patches.options"),
        "tasks": CONFIG | ours("modules.decoding", "ops.checks", "patches"),
        "tasks.synthetic": CONFIG | ours("models", "modules", "ops", "patches.options"),
        "checkpoints": PEOPLE | ours("evaluation", "models", "modules", "ops", "outputs", "patches", "tasks"),
        "checkpoints.pretrained": CONFIG | {"safetensors"} | ours("models", "modules", "ops", "patches"),
        "checkpoints.export": CONFIG | ours("models", "modules", "ops", "patches.options"),
        "checkpoints.former_states": {"torch"} | ours("models", "modules"),
        "distillation": CONFIG | ours("checkpoints.pretrained", "evaluation", "modules", "ops", "patches.options"),
        "cli": PEOPLE | {"fairseq_fwp", "lm_eval", "tokenizers"},
        "registration": {"fairseq_fwp"},
        "__init__": {"fairseq_fwp"},
    },
}
STOREYS = list(ROOMS_OF_STOREYS)
ROOMS = {room: allowed for rooms in ROOMS_OF_STOREYS.values() for room, allowed in rooms.items()}

# Recipes are numbers and shell: their scripts call the commands. Benchmarks time what lies below them,
# and a plug-in adds to its tables.
RECIPES = ours("cli", "interop")
PLUGIN = ours("ops", "modules", "checkpoints.linearize")
BENCHMARKS = RECIPES | ours("ops", "modules", "models", "evaluation")


def imports(file: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that a file imports; `from a import b` imports a.b."""
    package = file.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{name.name}") for name in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def lies_in(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def room_of(name: str) -> str | None:
    """The innermost room of a module, which is named without the package's name."""
    return max((room for room in ROOMS if lies_in(name, {room})), key=len, default=None)


def faults(root: Path) -> list[str]:
    """Every import under root that the tables above forbid."""
    found = []

    def check(file: Path, forbidden) -> None:
        for line, name in imports(file, root):
            if name.split(".")[0] not in sys.stdlib_module_names and forbidden(name):
                found.append(f"{file.relative_to(root)}:{line} imports {name}")

    for file in sorted(root.glob("fairseq_fwp/**/*.py")):
        room = room_of(".".join(file.relative_to(root).with_suffix("").parts[1:]))
        if room is None:
            found.append(f"{file.relative_to(root)} lies in no room of the table")
            continue
        allowed = ROOMS[room] | {f"fairseq_fwp.{room}"}
        check(file, lambda name, allowed=allowed: not lies_in(name, allowed))
    for file in sorted(root.glob("recipes/**/*.py")):
        allowed = BENCHMARKS if "benchmarks" in file.parts else PLUGIN if file.name == "__init__.py" else RECIPES
        check(file, lambda name, allowed=allowed: lies_in(name, {"fairseq_fwp"}) and not lies_in(name, allowed))
    check(root / "setup.py", lambda name: not lies_in(name, {"setuptools"}))
    return found


def test_every_import_keeps_to_its_room():
    assert (ROOT / "fairseq_fwp" / "modules").is_dir() and faults(ROOT) == []


def test_no_circle_of_imports():
    """Also in functions: an import that waits hides a circle, and does not make it simpler."""
    files = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.glob("fairseq_fwp/**/*.py")}
    modules = {path: name.removesuffix(".__init__") for path, name in files.items()}
    known, graph = set(modules.values()), {}
    for path, module in modules.items():
        names = [name for _, name in imports(path, ROOT)]
        parents = [next((x for x in (name, name.rpartition(".")[0]) if x in known), module) for name in names]
        graph[module] = {parent for parent in parents if parent != module}
    TopologicalSorter(graph).prepare()  # raises an error with the circle


def test_storeys_import_downwards():
    storey = {room: STOREYS.index(name) for name, rooms in ROOMS_OF_STOREYS.items() for room in rooms}
    for room, allowed in ROOMS.items():
        below = [room_of(name.removeprefix("fairseq_fwp.")) for name in allowed if name.startswith("fairseq_fwp.")]
        assert all(storey[each] <= storey[room] for each in below), room


def test_the_page_names_every_room():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page.split("## A layer")[0], re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([\w.]+)`", row)} == ROOMS.keys() - {"__init__"}


def test_kernels_are_free_of_torch():
    """Headers have the kernels, which the tests also build without PyTorch; only the bindings use ATen."""
    pattern = re.compile(r'^\s*#\s*include\s*[<"](torch|ATen|c10)/', re.MULTILINE)
    headers = [file for suffix in ("h", "cuh", "cu") for file in ROOT.glob(f"cuda_ext/**/*.{suffix}")]
    headers = [path for path in headers if "bindings" not in path.parts]
    assert headers
    assert [path.name for path in headers if pattern.search(path.read_text(encoding="utf-8"))] == []


# Imports that the tables forbid; those that they allow are in the checkout.
WRONG = [
    ("fairseq_fwp/ops/sum.py", "def f():\n    import numpy.linalg", "numpy.linalg"),
    ("fairseq_fwp/modules/attention/linear.py", "from ...models import x", "fairseq_fwp.models.x"),
    ("fairseq_fwp/ops/sum.py", "import importlib\nimportlib.import_module('fairseq.utils')", "fairseq.utils"),
    ("fairseq_fwp/utils.py", "", "utils.py lies in no room of the table"),
    ("recipes/peps/text.py", "from fairseq_fwp import ops", "fairseq_fwp.ops"),
    ("recipes/benchmarks/time.py", "import fairseq_fwp.tasks", "fairseq_fwp.tasks"),
]


def test_wrong_imports_are_found(tmp_path):
    (tmp_path / "setup.py").touch()
    for path, source, named in WRONG:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
        assert [fault.endswith(named) for fault in faults(tmp_path)] == [True]
        file.unlink()
