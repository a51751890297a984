"""The library is light: `import hf_ga` imports nothing, and the engine, ExactTrainer and the checker
need no package of the extra `finetune`.
"""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from not_installed import FINETUNE

import hf_ga
from hf_ga.finetuning.run import PACKAGES
from hf_ga.model.loaded import loaded_class

ROOT = Path(__file__).parents[1]
HEAVY = {*FINETUNE, "pandas"}
SUBMODULES = {"datasets", "pyarrow", "sklearn", "evaluate"}
# transformers.Trainer imports datasets and peft by itself where they are installed.
LIGHT = (
    "Accelerator",
    "InfoNCE",
    "StreamLoader",
    "WindowLoader",
    "backward",
    "check_equivalence",
    "compile_layers",
    "plan_batch",
    "prepare",
    "train_step",
)


def run(code: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code, *arguments]
    paths = [str(ROOT), str(ROOT / "tests/support")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def imported() -> list[set[str]]:
    """Modules in a new process after `import hf_ga`, after the names of the library are touched, and
    after the command is.
    """
    code = (
        "import json, sys, hf_ga\n"
        "for names in json.loads(sys.argv[1]):\n"
        "    for name in names: getattr(hf_ga, name)\n"
        "    print(json.dumps(sorted(sys.modules)))"
    )
    done = run(code, json.dumps([[], LIGHT, ["finetune"]]))
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stdout.splitlines()[-3:]]


@pytest.mark.slow("imports everything anew")
def test_the_import_alone_loads_nothing(imported):
    loaded = imported[0]
    assert "hf_ga" in loaded
    assert {name for name in loaded if name.startswith("hf_ga.")} == {"hf_ga.errors"}
    assert loaded & {*HEAVY, "torch", "transformers", "transformers.trainer"} == set()


@pytest.mark.slow("imports everything anew")
def test_the_library_loads_no_package_of_the_command(imported):
    loaded = imported[1]
    assert {"hf_ga.training", "hf_ga.check.check", "accelerate"} <= loaded
    assert loaded & {*HEAVY, "transformers.trainer"} == set()
    assert {name for name in loaded if name.startswith("hf_ga.finetuning")} == set()


@pytest.mark.slow("imports everything anew")
def test_the_library_waits_for_no_model_of_transformers(imported):
    """They take three of five seconds. A script that has one imports them itself."""
    assert imported[1] & {"transformers", "transformers.modeling_utils", "torch._dynamo"} == set()
    assert "transformers.modeling_utils" in imported[2], "what the command imports"


def test_classes_are_where_the_library_looks_for_them():
    """In another place their objects would silently count as those of unknown classes."""
    call = re.compile(r'loaded_class\(\s*"([\w.]+)",\s*"(\w+)"')
    texts = [path.read_text() for path in sorted((ROOT / "hf_ga").rglob("*.py"))]
    found = {place for text in texts for place in call.findall(text)}
    assert {name for _, name in found} >= {"PreTrainedModel", "ModelOutput"}
    for module, name in found:
        expected = getattr(importlib.import_module(module), name)
        assert loaded_class(module, name) == (expected,)
        assert expected.__module__ == module, name
    assert loaded_class("transformers.not_imported", "PreTrainedModel") == ()


def test_a_module_that_another_thread_is_importing_has_no_class_yet(monkeypatch):
    """It is among the modules before its classes are; None blocks its import."""
    for module in (ModuleType("begun"), None):
        monkeypatch.setitem(sys.modules, "begun", module)
        assert loaded_class("begun", "PreTrainedModel") == ()


@pytest.mark.slow("imports everything anew")
def test_the_command_does_load_them(imported):
    """Otherwise the tests above would pass whatever happens."""
    assert {*PACKAGES} - {"jinja2", "matplotlib", "yaml"} <= imported[2]


@pytest.mark.slow("starts a process")
def test_the_library_works_without_them():
    done = run(
        "import not_installed; not_installed.hide(); import runpy; runpy.run_module('light_smoke', run_name='__main__')"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("train_step", "ExactTrainer", "check_equivalence: passed", "no plot in report"):
        assert name in done.stdout, done.stdout


@pytest.mark.parametrize("hidden", [("datasets",), ("sklearn", "rouge_score")])
def test_the_command_says_what_to_install(hidden):
    code = (
        f"import not_installed, runpy; not_installed.hide({hidden})\n"
        "runpy.run_path('scripts/finetune.py', run_name='__main__')"
    )
    done = run(code)
    packages = ", ".join(sorted(PACKAGES[name] for name in hidden))
    assert done.returncode == 2
    assert done.stderr == (
        f"error: fine-tuning needs packages that are not installed ({packages}): "
        'pip install "hf_ga[finetune]".\n'
    )


def test_every_public_name_is_in_both_lists_and_loads():
    """A name that is missing in one of them works in Python, but not in an editor, or vice versa."""
    tree = ast.parse((ROOT / "hf_ga/__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    for_editors = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert for_editors == hf_ga._MODULES
    assert {*hf_ga.__all__} == {*for_editors} <= {*dir(hf_ga)}
    for name, module in hf_ga._MODULES.items():
        assert getattr(hf_ga, name) is getattr(importlib.import_module(module), name)
    assert hf_ga.ConfigError is hf_ga.errors.ConfigError
    with pytest.raises(AttributeError, match="module 'hf_ga' has no attribute 'train'"):
        hf_ga.train  # noqa: B018


def test_the_extra_has_what_the_command_imports():
    """And the library's own requirements have none of it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {re.match(r"[\w-]+", line)[0] for line in project["optional-dependencies"]["finetune"]}
    needed = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    assert extra == {*PACKAGES.values(), "peft", "submitit"}
    assert needed & extra == set()
    assert any("finetune" in line for line in project["optional-dependencies"]["test"])


def test_the_library_imports_only_what_it_requires():
    """Also where an import is inside a function, which no other test may reach."""
    allowed = {*sys.stdlib_module_names, "accelerate", "filelock", "hf_ga", "numpy", "safetensors"}
    allowed |= {"psutil", "torch", "tqdm", "transformers"}
    optional = {  # where they are used, the user has imported the package, or gets MissingPackage
        "hf_ga/check/verdict/report.py": {"matplotlib"},
        "hf_ga/loading/lengths.py": {"datasets", "pyarrow"},
        "hf_ga/draws/dropout/mask_kernel.py": {"triton"},
        "hf_ga/rows/attention_kernel.py": {"triton"},
    }
    for path in sorted((ROOT / "hf_ga").rglob("*.py")):
        room = path.relative_to(ROOT).as_posix()
        if room.startswith("hf_ga/finetuning/"):
            continue
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module.partition(".")[0])
        assert found - allowed == optional.get(room, set()), room
