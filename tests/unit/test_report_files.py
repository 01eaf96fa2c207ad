"""Metrics and results: valid JSON whatever the numbers, and nothing heavy imported to read them."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vit_tp.config import RunFolder
from vit_tp.errors import DataError
from vit_tp.report.metrics import MetricsWriter, read_metrics
from vit_tp.report.result import read_result, run_summary, summary_lines, write_result


def strict_json(text):
    def refuse(constant):
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def test_what_is_written_is_read(tmp_path):
    with MetricsWriter(tmp_path / "run", tensorboard=False) as writer:
        writer.write(10, 0.5, loss=torch.tensor(2.5), lr=np.float64(1e-3), grad_norm=1)
        writer.write(20, 1.0, **{"eval/top1": 0.25, "eval/count": 360})
    assert read_metrics(tmp_path / "run") == [
        {"step": 10, "epoch": 0.5, "loss": 2.5, "lr": 1e-3, "grad_norm": 1},
        {"step": 20, "epoch": 1.0, "eval/top1": 0.25, "eval/count": 360},
    ]
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_line_can_be_read_before_the_writer_is_closed(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(1, 0.1, loss=1.0)
    assert len(read_metrics(tmp_path)) == 1
    writer.close()


def test_a_diverged_run_writes_valid_json(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write(1, 0.0, loss=math.nan, grad_norm=torch.tensor(math.inf), lr=-math.inf)
    line = strict_json((tmp_path / "metrics.jsonl").read_text())
    assert line == {"step": 1, "epoch": 0.0, "loss": "nan", "grad_norm": "inf", "lr": "-inf"}
    (read,) = read_metrics(tmp_path)
    assert math.isnan(read["loss"]) and read["grad_norm"] == math.inf and read["lr"] == -math.inf


def test_a_torn_line_is_passed_over_and_not_continued(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "epoch": 0.1, "loss": 1.0}\n{"step": 2, "ep')
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(3, 0.3, loss=0.5)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]


def test_a_run_without_metrics_has_none(tmp_path):
    assert read_metrics(tmp_path) == []


def test_tensorboard_reads_the_scalars(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        for step in (10, 20):
            writer.write(step, step / 20, loss=1 / step, **{"eval/top1": step / 100})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "eval/top1"}
    points = [(event.step, event.value) for event in events.Scalars("eval/top1")]
    assert points == [(10, pytest.approx(0.1)), (20, pytest.approx(0.2))]


RESULT = {
    "loss": 0.0312,
    "eval/top1": 0.9694,
    "eval/top5": 0.9972,
    "eval/loss": 0.1234,
    "eval/count": 360,
    "samples_per_s": 1512.4,
    "wall_s": 83.2,
    "steps": 550,
    "world_size": 4,
    "versions": {"torch": "2.14.1"},
}


def test_a_result_is_read_as_written_and_replaced_whole(tmp_path):
    path = tmp_path / "deep" / "result.json"
    write_result(path, {"loss": 1.0})
    write_result(path, RESULT | {"loss": math.nan})
    assert list(path.parent.iterdir()) == [path]
    assert strict_json(path.read_text())["loss"] == "nan"
    read = read_result(path)
    assert math.isnan(read.pop("loss")) and read == {key: value for key, value in RESULT.items() if key != "loss"}


def test_a_result_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "result.json"
    write_result(path, RESULT)
    with pytest.raises(TypeError):
        write_result(path, {"loss": object()})
    assert read_result(path) == RESULT


def test_a_run_without_a_result_says_so(tmp_path):
    with pytest.raises(DataError, match=r"result\.json does not exist"):
        read_result(tmp_path / "result.json")
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        read_result(tmp_path / "result.json")


def test_the_closing_lines(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "digits"
    (run / "plots").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl", "plots/training.png", "result.json"):
        (run / name).touch()
    monkeypatch.chdir(tmp_path)
    assert run_summary(RunFolder(run), RESULT) == [
        "accuracy    top-1 0.9694, top-5 0.9972 on 360 validation samples",
        "loss        train 0.0312, validation 0.1234",
        "throughput  1,512 samples/s",
        "time        1 min 23 s, 550 steps, 4 ranks",
        "config      runs/digits/config.yaml",
        "metrics     runs/digits/metrics.jsonl",
        "plot        runs/digits/plots/training.png",
        "result      runs/digits/result.json",
    ]


def test_the_closing_lines_leave_out_what_is_not_there(tmp_path):
    assert run_summary(RunFolder(tmp_path), {}) == []
    assert summary_lines({"loss": math.nan, "wall_s": 59.96}, {}) == ["loss  train nan", "time  60.0 s"]


def test_results_are_read_in_a_light_process():
    code = (
        "import sys, vit_tp.report.result, vit_tp.report.metrics;"
        "print(sorted({'torch', 'numpy', 'matplotlib', 'timm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
