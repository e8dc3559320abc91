"""Who may import whom: the layers of ``docs/architecture.md``, read from the source with ``ast``."""

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LAYERS = {
    **dict.fromkeys(("hardware", "prices", "cadence", "horizon", "config"), 0),
    **dict.fromkeys(("rng", "paths", "precision", "schedules", "sharding", "losses", "optim", "models"), 1),
    **dict.fromkeys(("state", "records", "recipe", "intake", "checks", "step", "adapters", "async_sgd"), 2),
    **dict.fromkeys(("data", "prefetch", "checkpoint", "distributed", "preemption", "metrics", "progress"), 3),
    **dict.fromkeys(("plot", "goodput", "workdir"), 3),
    **dict.fromkeys(("plan", "cost"), 4),
    **dict.fromkeys(("tasks", "assemble"), 5),
    **dict.fromkeys(("loop", "async_loop", "evaluate", "journal", "report"), 6),
    **dict.fromkeys(("launch", "cli", "checkpoint_commands"), 7),
}
SAME_LAYER = {  # who may import whom inside a layer, as the table of docs/architecture.md says
    "config": {"horizon"}, "assemble": {"tasks"},
    **{key: {"paths"} for key in ("losses", "optim", "precision", "sharding")},
    "recipe": {"records", "state"}, "checks": {"state"}, "adapters": {"state"},
    "step": {"checks", "intake", "recipe", "records", "state"},
    **{key: {"workdir"} for key in ("goodput", "metrics", "plot")}, "progress": {"metrics"},
    "checkpoint": {"distributed", "workdir"},
    "loop": {"evaluate", "journal"}, "report": {"loop"}, "cli": {"checkpoint_commands"},
}  # fmt: skip
FORBIDDEN_FILES = {"utils", "helpers", "common"}
JAX = {"jax", "jaxlib", "flax", "optax"}


def module_name(path: pathlib.PurePath) -> str:
    """``jaxtrain/models/mlp.py`` -> ``jaxtrain.models.mlp``; a package's ``__init__.py`` is the package."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(module: str, tree: ast.Module, modules: set[str]) -> list[tuple[str, ast.stmt]]:
    """``(imported module, statement)`` for every import in the source; ``from a import b`` may mean ``a.b``."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: -node.level]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.append((full if full in modules else base, node))
    return found


def problems(sources: dict[str, str]) -> list[str]:
    """What breaks the rules in ``{"jaxtrain/step.py": source, ...}``, one sentence each."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    modules = {module_name(pathlib.PurePosixPath(path)) for path in sources}
    wrong, edges = [], {}
    for path, tree in trees.items():
        module, lines = module_name(pathlib.PurePosixPath(path)), sources[path].splitlines()
        top = [*module.split("."), ""][1]
        if pathlib.PurePosixPath(path).stem in FORBIDDEN_FILES:
            wrong.append(f"{path}: say in the name what is inside")
        if path.endswith("__init__.py"):
            if not (len(tree.body) == 1 and ast.get_docstring(tree)):
                wrong.append(f"{path}: a package's __init__ holds a docstring and nothing else")
            continue
        if top not in LAYERS:
            wrong.append(f"{path}: {top!r} has no layer; give it one here and in docs/architecture.md")
            continue
        found = imports(module, tree, modules)
        edges[module] = {name for name, _ in found if name.split(".")[0] == "jaxtrain"}
        for name in sorted(edges[module]):
            other = [*name.split("."), ""][1]
            if name not in modules:
                wrong.append(f"{path}: imports {name}, which does not exist")
            elif other != top and LAYERS.get(other) == LAYERS[top] and other not in SAME_LAYER.get(top, ()):
                wrong.append(f"{path}: imports {name} of its own layer {LAYERS[top]}, which its row does not allow")
            elif other and LAYERS.get(other, 99) > LAYERS[top]:
                wrong.append(f"{path}: layer {LAYERS[top]} imports {name} of layer {LAYERS.get(other)}")
        outside = {name.split(".")[0] for name, _ in found} - {"jaxtrain", *sys.stdlib_module_names}
        if outside & JAX and (LAYERS[top] == 0 or top == "data"):
            wrong.append(f"{path}: imports {', '.join(sorted(outside & JAX))}")
        if LAYERS[top] == 3 and len(outside - {"jax", "numpy", "etils", "tensorstore"}) > 1:  # Orbax's paths and stores
            wrong.append(f"{path}: wraps more than one outside library: {', '.join(sorted(outside))}")
        inside = {
            node for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for node in ast.walk(f) if isinstance(node, ast.Import | ast.ImportFrom)
        }  # fmt: skip
        for node in sorted(inside, key=lambda node: node.lineno):
            if not any("#" in line for line in lines[node.lineno - 1 : node.end_lineno]):
                wrong.append(f"{path}:{node.lineno}: an import inside a function needs its reason on the line")
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        wrong.append(f"a cycle: {' -> '.join(error.args[1])}")
    return wrong


def test_the_package_keeps_its_layers():
    paths = sorted((ROOT / "jaxtrain").rglob("*.py"))
    assert len(paths) > 20
    found = problems({str(path.relative_to(ROOT)): path.read_text() for path in paths})
    assert not found, "\n".join(found)


def test_the_checker_accepts_what_is_allowed():
    assert not problems(
        {
            "jaxtrain/__init__.py": '"""Doc."""',
            "jaxtrain/models/__init__.py": '"""Doc."""',
            "jaxtrain/rng.py": "import jax",
            "jaxtrain/models/mlp.py": "import jax\nfrom jaxtrain.models import norms",
            "jaxtrain/models/norms.py": "import jax",
            "jaxtrain/hardware.py": "import math",
            "jaxtrain/step.py": "from jaxtrain.models import mlp\ndef f():\n    import rich  # slow to load",
            "jaxtrain/metrics.py": "import jax\nimport numpy\nimport tensorboardX",
        }
    )


GOOD = {
    "jaxtrain/rng.py": "import jax",
    "jaxtrain/step.py": "from jaxtrain import rng",
    "jaxtrain/cli.py": "import jaxtrain.step",
}
BAD = {
    "upward": ({"jaxtrain/rng.py": "from jaxtrain import step"}, "rng.py: layer 1 imports jaxtrain.step of layer 2"),
    "upward by name": ({"jaxtrain/rng.py": "from jaxtrain.step import f"}, "layer 1 imports jaxtrain.step"),
    "upward relative": ({"jaxtrain/rng.py": "from .step import f"}, "layer 1 imports jaxtrain.step"),
    "upward in a function": ({"jaxtrain/rng.py": "def f():\n    import jaxtrain.cli  # why"}, "imports jaxtrain.cli"),
    "sideways": ({"jaxtrain/rng.py": "from jaxtrain import optim", "jaxtrain/optim.py": ""}, "its own layer 1, which"),
    "cycle": (
        {"jaxtrain/step.py": "import jaxtrain.recipe", "jaxtrain/recipe.py": "from jaxtrain import step"},
        "a cycle",
    ),
    "no reason": ({"jaxtrain/rng.py": "def f():\n    import rich"}, "rng.py:2: .*needs its reason"),
    "no reason in a method": ({"jaxtrain/rng.py": "class A:\n  def f(self):\n    from a import b"}, "rng.py:3"),
    "no layer": ({"jaxtrain/extras.py": ""}, "'extras' has no layer"),
    "utils": ({"jaxtrain/models/utils.py": ""}, "utils.py: say in the name"),
    "eager init": ({"jaxtrain/models/__init__.py": '"""Doc."""\nimport jax'}, "holds a docstring"),
    "empty init": ({"jaxtrain/models/__init__.py": ""}, "holds a docstring"),
    "jax in facts": ({"jaxtrain/hardware.py": "import jax.numpy as jnp"}, "hardware.py: imports jax"),
    "jax in data": ({"jaxtrain/data/text.py": "from flax import nnx"}, "text.py: imports flax"),
    "two libraries": ({"jaxtrain/metrics.py": "import rich\nimport tensorboardX"}, "more than one outside library"),
    "ghost": ({"jaxtrain/loop.py": "from jaxtrain.ghost import f"}, "jaxtrain.ghost, which does not exist"),
}


@pytest.mark.parametrize(("sources", "text"), BAD.values(), ids=BAD)
def test_the_checker_can_fail(sources, text):
    package = {"jaxtrain/__init__.py": '"""Doc."""'}
    assert not problems(package | GOOD)
    found = problems(package | GOOD | sources)
    with pytest.raises(ValueError, match=text):
        raise ValueError("\n".join(found))


def loaded_by(*modules: str) -> set[str]:
    """The modules that a fresh process holds after importing these."""
    code = "import sys\n" + "".join(f"import {m}\n" for m in modules) + "print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=120
    )
    return set(run.stdout.split())


def test_the_step_loads_no_checkpoint_data_config_or_cloud_library():
    loaded = loaded_by("jaxtrain.step")
    assert {"jax", "optax", "jaxtrain.recipe"} <= loaded
    heavy = (
        "orbax", "tensorstore", "grain", "ml_collections", "tensorboardX", "tensorboard", "ray", "google.cloud", "flax",
        "matplotlib", "rich", "google_crc32c",
    )  # fmt: skip
    assert not {name for name in loaded for h in heavy if name == h or name.startswith(f"{h}.")}
    assert {name for name in loaded if name.startswith("jaxtrain.")} == {
        f"jaxtrain.{m}"
        for m in (
            "step",
            "intake",
            "checks",
            "records",
            "recipe",
            "state",
            "losses",
            "optim",
            "paths",
            "precision",
            "rng",
            "sharding",
        )
    }


def test_facts_costs_and_launchers_load_no_jax():
    paths = [path.relative_to(ROOT) for path in (ROOT / "jaxtrain").rglob("*.py")]
    light = [p for p in paths if p.parts[1] in {"cost", "launch"} or LAYERS.get(p.with_suffix("").parts[1]) == 0]
    loaded = loaded_by(*sorted(module_name(path) for path in light))
    assert "jaxtrain.hardware" in loaded
    assert not {name for name in loaded if name.split(".")[0] in JAX | {"tensorflow", "orbax"}}
