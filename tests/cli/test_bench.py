"""`vit-tp bench data` as typed."""

import re

from tests.cli.test_train_and_eval import BIN, call


def test_bench_data_tells_the_bottleneck_and_leaves_nothing_behind(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    words = ["experiment=digits_smoke", "parallel=tp2", "recipe.max_steps=3", "data.num_workers=1"]
    ended = call(BIN / "vit-tp", "bench", "data", *words, cwd=tmp_path, TMPDIR=str(scratch))
    assert ended.returncode == 0, ended.stderr
    rates = [float(rate) for rate in re.findall(r"^(?:data|model|together) +([\d.]+) samples/s", ended.stdout, re.M)]
    assert len(rates) == 3 and all(rate > 0 for rate in rates)
    data, model, _ = rates
    assert ("bottleneck  the data" if data < model else "bottleneck  the model") in ended.stdout
    assert "1 reader with 1 worker processes" in ended.stdout
    assert not list(scratch.glob("vit_tp*")) and not (tmp_path / "runs").exists()


def test_bench_wants_to_know_of_what(tmp_path):
    for words in ([], ["model"]):
        ended = call(BIN / "vit-tp", "bench", *words, cwd=tmp_path)
        assert ended.returncode == 2 and "Use vit-tp bench data" in ended.stderr
