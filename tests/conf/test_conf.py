"""Every YAML in conf/ composes and passes check(); what does not is refused with all complaints at once."""

from pathlib import Path

import pytest

import vit_tp.conf
from vit_tp.compose import compose, list_choices, load_config, override, save_config
from vit_tp.config import EVALUATION, SECOND_HALF, Config, check
from vit_tp.errors import ConfigError

CHOICES = [(group, name) for group, names in list_choices().items() for name in names]


CLIPS = ["vit_base_video", "vit_large_video", "vit_moving_digits"]
# choices that mean clips, and what makes clips of the rest
PARTNERS = {("model", name): ["data=moving_digits"] for name in CLIPS}
PARTNERS |= {("data", name): ["model=vit_base_video"] for name in ("moving_digits", "video_folder", "video_tars")}


@pytest.fixture
def images(tmp_path) -> str:
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
    return f"data.root={tmp_path}"


def complaints_of(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    return caught.value.complaints


def test_every_folder_of_conf_is_a_group():
    folder = Path(vit_tp.conf.__path__[0])
    assert {group for group, _ in CHOICES} == {path.name for path in folder.iterdir() if any(path.glob("*.yaml"))}


@pytest.mark.parametrize(("group", "name"), CHOICES, ids=lambda word: word)
def test_every_choice_composes_and_passes_check(group, name, images):
    words = [f"{group}={name}", *PARTNERS.get((group, name), [])]
    reads_files = group == "data" and name != "digits" or (group, name) == ("experiment", "in1k_vit_b")
    check(compose([*words, *([images] if reads_files else [])]))


@pytest.mark.parametrize("path", sorted(Path(vit_tp.conf.__path__[0]).glob("experiment/*.yaml")), ids=lambda p: p.stem)
def test_every_experiment_is_a_lab_note(path):
    lines = path.read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith(f"# vit-tp train experiment={path.stem}")
    note = "\n".join(lines)
    for word in ("# hardware", "# time", "# expected"):
        assert word in note


def test_a_choice_a_value_and_a_free_argument():
    config = compose(["experiment=digits_smoke", "model.kwargs.depth=6", "model.kwargs.qk_norm=true", "parallel.tp=4"])
    assert config.model.kwargs["depth"] == 6 and config.model.kwargs["qk_norm"] is True
    assert config.model.kwargs["num_heads"] == 4
    assert (config.parallel.tp, config.parallel.pp) == (4, 2)


@pytest.mark.parametrize("text", ["model.kwargs={depth: 3}", "+model.kwargs.depth=3", "++model.kwargs.depth=3"])
def test_free_arguments_in_every_spelling(text):
    assert compose([text]).model.kwargs == {"depth": 3}


def test_lists_nulls_and_quotes():
    config = compose(["parallel.partition=[0,2]", "parallel.pp=2", "recipe.max_steps=null", "run.name='a b'"])
    assert config.parallel.partition == [0, 2] and config.recipe.max_steps is None and config.run.name == "a b"


def test_every_unknown_key_is_reported_at_once_with_close_names():
    first, second, third, fourth, fifth = complaints_of(
        "experiment=digit_smoke", "recipe.lr=3", "recipe.epochs=ten", "+bar=3", "parallel.tp=2,4"
    )
    assert "experiment=digit_smoke is not a choice" in first and "Did you mean experiment=digits_smoke?" in first
    assert second == "There is no knob recipe.lr; nothing would read it. Did you mean recipe.optimizer.lr?"
    assert third.startswith("recipe.epochs=ten is not a whole number")
    assert fourth.startswith("There is no knob bar;")
    assert "has several values" in fifth


@pytest.mark.parametrize("text", ["a b", "=3", "~recipe.epochs", "recipe.epochs=", "hydra.run.dir=x", "recipe=3"])
def test_what_is_no_override(text):
    [complaint] = complaints_of(text)
    assert complaint.endswith(".")


def test_a_file_and_back(tmp_path):
    config = compose(["experiment=digits_smoke", "run.name=1e3x", "parallel.partition=[0,2]"])
    save_config(config, tmp_path / "deep" / "config.yaml")
    assert load_config(tmp_path / "deep" / "config.yaml") == config
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["config.yaml"]


def test_a_file_that_somebody_edited(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("recipe: {optimizer: {lr: 1e-3}}\n")
    assert load_config(path).recipe.optimizer.lr == 1e-3
    path.write_text("recipe: {epoch: 3}\nparalel: {}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert len(caught.value.complaints) == 2
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_config(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")


def test_only_the_second_half_of_a_finished_run_may_change():
    config = Config()
    config.parallel.tp, config.parallel.dp = 2, 3
    changed = override(config, ["parallel.tp=4", "compute=bf16"], SECOND_HALF)
    assert (changed.parallel.tp, changed.parallel.dp, changed.compute.dtype) == (4, 3, "bf16")
    assert override(config, ["parallel=tp2_pp2"], SECOND_HALF).parallel.dp is None  # a choice replaces its group
    with pytest.raises(ConfigError) as caught:
        override(config, ["recipe.epochs=3", "model=vit_base", "parallel.tp=1"], SECOND_HALF)
    assert len(caught.value.complaints) == 2


def test_an_evaluation_may_look_otherwise_but_not_at_other_data():
    config = compose(["model=vit_moving_digits", "data=moving_digits", "data.hflip=0.1"])
    other = override(config, ["data.eval_clips=4", "data.root=elsewhere"], [*SECOND_HALF, *EVALUATION])
    assert (other.data.eval_clips, other.data.root, other.data.hflip) == (4, "elsewhere", 0.1)
    assert config.data.eval_clips == 1
    with pytest.raises(ConfigError, match=r"data\.source=digits cannot be changed here.*data\.eval_clips"):
        override(config, ["data.source=digits"], [*SECOND_HALF, *EVALUATION])


def test_a_range_of_shards_needs_no_quotes_of_hydras_and_an_expanded_one_is_refused():
    for text in ("data.train_shards=train-{00..12}.tar", "data.train_shards='train-{00..12}.tar'"):
        config = compose(["data=image_tars", text])
        assert config.data.train_shards == "train-{00..12}.tar"
    assert complaints_of("data=image_tars", *(f"data.val_shards=val-{n}.tar" for n in (1, 2, 3))) == [
        "data.val_shards is given 3 times (data.val_shards=val-1.tar, data.val_shards=val-2.tar ...); the shell has "
        "expanded its braces, and one shard would be read. Put the word in quotes: "
        "'data.val_shards=train-{000000..000146}.tar'."
    ]
