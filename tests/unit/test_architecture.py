"""What may stand where: rules of the house that no import contract can say. The storeys are in test_imports.py."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vit_tp"
FILES = sorted(path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py"))
LIGHT = ("vit_tp/config/", "vit_tp/launch/", "vit_tp/verbs/", "vit_tp/cli.py", "vit_tp/help.py", "vit_tp/compose.py")
MAX_LINES = 300


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def imported(file: str) -> set[str]:
    """Top-level names of the packages that a file imports anywhere, inside functions too."""
    names = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} imports relatively"
            names.add(node.module.partition(".")[0])
    return names


def called(file: str) -> Iterator[str]:
    """Last names of everything that a file calls."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Call):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def files_that_call(*names: str) -> set[str]:
    return {file for file in FILES if not set(names).isdisjoint(called(file))}


def test_deepspeed_has_four_doors():
    doors = {f"vit_tp/train/{name}.py" for name in ("pipeline", "schedules", "engine", "communication")}
    assert {file for file in FILES if "deepspeed" in imported(file)} == doors


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith(LIGHT)])
def test_what_runs_on_a_login_node_imports_neither_torch_nor_timm_nor_deepspeed(file):
    assert imported(file).isdisjoint({"torch", "torchvision", "timm", "deepspeed", "numpy"})


def test_seeds_are_set_in_two_places():
    setters = ("manual_seed", "manual_seed_all", "set_rng_state", "set_state", "setstate", "seed")
    allowed = {"vit_tp/parallel/rng.py", "vit_tp/data/sampling.py"}
    assert files_that_call("manual_seed", "manual_seed_all") == allowed
    assert files_that_call(*setters) == allowed | {"vit_tp/recipe/mixing.py"}  # timm mixes by numpy's generator


def test_groups_are_made_in_one_place():
    assert files_that_call("new_group", "new_subgroups", "init_device_mesh") == {"vit_tp/parallel/groups.py"}


@pytest.mark.parametrize("file", FILES)
def test_no_file_is_longer_than_a_person_reads_at_once(file):
    assert len((ROOT / file).read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("file", FILES)
def test_every_module_says_what_it_is(file):
    assert ast.get_docstring(tree(file)) or file == "vit_tp/__main__.py"


def test_folders_are_two_deep():
    assert all(len(Path(file).parts) <= 3 for file in FILES)


def test_every_part_of_the_package_has_a_storey():
    """A part that the contract does not list would be checked by nobody."""
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    listed = set(re.findall(r"vit_tp\.(\w+)", " ".join(contract["layers"])))
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__"} <= listed
    assert contract["type"] == "layers"
