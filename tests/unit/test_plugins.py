"""Modules of the user: docs/rules.md shows one, and it is built, cut, trained and compared as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tolerances import BLOCK_FLOAT64
from tests.unit.test_config import complaints_of, config_with
from tests.worlds import run_world
from vit_tp.config import fingerprint, list_knobs
from vit_tp.errors import ConfigError
from vit_tp.sharding.plugins import load_plugins

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
RULES = (ROOT / "docs" / "rules.md").read_text()
EXAMPLE = re.search(r"```python\n# my_blocks.py\n(.*?)```", RULES, re.DOTALL).group(1)
ON_CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Where the user types: my_blocks.py lies there, and Python does not look there by itself."""
    (tmp_path / "my_blocks.py").write_text(EXAMPLE)
    return tmp_path


def typed(*words: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [BIN / "vit-tp", *words], cwd=cwd, env=os.environ | ON_CPU, capture_output=True, text=True, timeout=240
    )


@pytest.mark.slow
def test_the_example_of_the_docs_trains_through_the_command(folder):
    words = ["experiment=digits_smoke", "model.timm=vit_gated", "parallel=tp2", "recipe.max_steps=2", "log=quiet"]
    ended = typed("train", *words, "plugins=[my_blocks]", cwd=folder)
    assert ended.returncode == 0 and ended.stderr == "", ended.stderr
    result = json.loads((folder / "runs" / "digits_smoke" / "result.json").read_text())
    assert result["steps"] == 2 and result["grid"]["tp"] == 2
    assert "plugins:\n- my_blocks\n" in (folder / "runs" / "digits_smoke" / "config.yaml").read_text()


def test_the_doctor_lists_models_of_plugins(folder):
    ended = typed("doctor", "--models", "vit_gated", "plugins=[my_blocks]", cwd=folder)
    assert ended.returncode == 0 and ended.stderr == "", ended.stderr
    assert ended.stdout.splitlines()[1].split() == [
        *("vit_gated", "Attention", "+", "ScaledGatedMlp", "115.0", "M", "197", "yes", "1,2,3,4,6,12"),
    ]
    assert "vit_gated fits no model" in typed("doctor", "--models", "vit_gated", cwd=folder).stderr


def compare_example(folder: str) -> dict:
    """Compare the example's model, cut, with itself, whole, on this rank."""
    import timm
    import torch
    import torch.distributed as dist

    import vit_tp
    from tests.distributed.models import SMALL, randomise_
    from tests.distributed.parity import compare

    os.chdir(folder)
    load_plugins(["my_blocks"])
    torch.set_default_dtype(torch.float64)
    whole, cut = (timm.create_model("vit_gated", qk_norm=True, **SMALL).eval() for _ in range(2))
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    found = compare(randomise_(whole), cut, x, lambda model: vit_tp.shard_(model, dist.group.WORLD))
    return {"errors": found.errors, "scale": tuple(cut.blocks[0].mlp.scale.shape)}


def test_the_example_of_the_docs_has_the_numbers_of_its_whole_model(folder):
    for found in run_world(compare_example, 2, str(folder)):
        assert max(found["errors"].values()) <= BLOCK_FLOAT64
        assert found["scale"] == (64,)  # half of 128


def test_every_field_of_a_rule_is_explained():
    from dataclasses import fields

    import vit_tp

    named = re.findall(r"^\| `(\w+)` \|", RULES, re.MULTILINE)
    assert sorted(named) == sorted(field.name for field in fields(vit_tp.ShardRule))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["plugins: broken cannot be imported", "ModuleNotFoundError: No module named 'broken'", "PYTHONPATH"]),
        ("1 +", ["plugins: broken was found, but", "SyntaxError", "broken.py, line 1"]),
        ("\nraise RuntimeError('my own\\n trouble')", ["RuntimeError: my own trouble", "broken.py line 2", "Mend it"]),
        ("import sys; sys.exit()", ["SystemExit", "broken.py line 1"]),
        ("import nonsense_of_mine", ["was found, but", "No module named 'nonsense_of_mine'", "broken.py line 1"]),
    ],
    ids=["missing", "no Python", "raises", "leaves", "needs another"],
)
def test_a_plugin_that_cannot_be_imported_is_one_sentence_with_the_reason(tmp_path, text, words):
    if text is not None:
        (tmp_path / "broken.py").write_text(text)
    ended = typed("train", "plugins=[broken]", cwd=tmp_path)
    assert ended.returncode == 2 and ended.stdout == "" and len(ended.stderr.splitlines()) == 1
    for word in words:
        assert word in ended.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["my_blocks.py", "/a/my_blocks.py", "my-blocks", "", "a b"])
def test_what_is_no_module_name_is_refused_without_importing(name):
    [complaint] = complaints_of(config_with(plugins=[name]))
    assert "is not the name of a module" in complaint and "Use for example plugins=[" in complaint


def test_plugins_are_part_of_what_is_learnt_and_loaded_in_order(tmp_path, monkeypatch):
    assert fingerprint(config_with(plugins=["a"])) != fingerprint(config_with())
    assert "plugins" in {knob.path for knob in list_knobs()}
    for name in ("first_plugin", "second_plugin"):
        (tmp_path / f"{name}.py").write_text(f"import sys; sys.loaded = [*getattr(sys, 'loaded', []), '{name}']")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    load_plugins(["second_plugin", "first_plugin"])
    load_plugins(["second_plugin", "first_plugin"])  # a second call finds them imported
    assert sys.loaded == ["second_plugin", "first_plugin"]
    del sys.loaded
    with pytest.raises(ConfigError, match="plugins: third_plugin cannot be imported"):
        load_plugins(["third_plugin"])
