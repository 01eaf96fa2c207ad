"""The experiment that shows video: real MP4s made on the spot, tp=2 x pp=2, and an evaluation on more views."""

import json
import time

import pytest

from tests.cli.test_train_and_eval import BIN, call, result_of


@pytest.mark.slow
def test_moving_digits_are_learnt_in_minutes(tmp_path):
    began = time.monotonic()
    ended = call(BIN / "vit-tp", "train", "experiment=moving_digits_smoke", cwd=tmp_path)
    took_s = time.monotonic() - began
    assert ended.returncode == 0, ended.stderr
    run = tmp_path / "runs" / "moving_digits_smoke"
    result = result_of(run)
    assert result["eval/top1"] >= 0.9 and result["eval/count"] == 360 and result["unreadable"] == 0
    assert result["grid"] == {"pp": 2, "dp": 1, "tp": 2} and result["versions"]["decoder"]
    assert len(list((tmp_path / "data" / "moving_digits").glob("*/*/*.mp4"))) == 1797
    assert took_s < 300

    words = [f"run={run}", "parallel=single", "data.eval_clips=2", "compute.eval_micro_batch_size=60"]
    ended = call(BIN / "vit-tp", "eval", *words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((run / "eval" / "pp1_dp1_tp1_fp32_2x1_crop1.json").read_text())
    assert found["eval/count"] == 360 and found["eval/top1"] >= result["eval/top1"] - 0.02
