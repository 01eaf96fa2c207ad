"""The progress bar and the plot, looked at from outside."""

import io
import math
import warnings

import numpy as np
import pytest
from PIL import Image

from vit_tp.errors import DataError
from vit_tp.report.metrics import MetricsWriter
from vit_tp.report.plot import plot_run
from vit_tp.report.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def advance(stream, enabled=True, steps=100, **kwargs):
    bar = Progress(steps, stream, enabled, **kwargs)
    for step in range(kwargs.get("first_step", 0) + 1, steps + 1):
        bar.update(step, loss=1.0 / step, lr=1e-3, samples_per_s=512.3, **({"eval/top1": 0.97} if step == 50 else {}))
    bar.close()
    return stream.getvalue()


def test_the_bar_shows_the_figures_and_ends_at_the_last_step():
    last = advance(Terminal()).rstrip().rsplit("\r", 1)[-1]
    assert "100/100" in last and "loss=0.010" in last and "samples/s=512" in last and "eval/top1=0.970" in last


def test_a_log_file_is_not_flooded():
    assert len(advance(io.StringIO(), steps=5000).split("\r")) <= 4


def test_nothing_is_drawn_when_it_is_off():
    assert advance(Terminal(), enabled=False) == ""


def test_a_continued_run_begins_where_it_was():
    bar = Progress(100, stream := Terminal(), enabled=True, first_step=40)
    bar.close()
    assert "40/100" in stream.getvalue()


def write_run(run_dir, **changes):
    with MetricsWriter(run_dir, tensorboard=False) as writer:
        for step in range(1, 51):
            numbers = {"loss": 2.3 / step, "lr": 1e-3, "grad_norm": 1 / step} | changes
            writer.write(step, step / 10, **numbers)
            if step % 10 == 0:
                writer.write(step, step / 10, **{"eval/loss": 2.5 / step, "eval/top1": 1 - 1 / step})


def test_the_plot_is_a_picture_with_every_figure_in_it(tmp_path):
    write_run(tmp_path / "digits")
    path = plot_run(tmp_path / "digits")
    assert path == tmp_path / "digits" / "plots" / "training.png"
    assert [entry.name for entry in path.parent.iterdir()] == ["training.png"]
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    height, width = pixels.shape[:2]
    assert width >= 1000 and height >= 700
    half_y, half_x = height // 2, width // 2
    blue, red = (np.abs(pixels - colour).sum(-1) < 30 for colour in ([0x44, 0x77, 0xAA], [0xCC, 0x33, 0x11]))
    quarters = {"loss": (slice(0, half_y), slice(0, half_x)), "top1": (slice(0, half_y), slice(half_x, width))}
    quarters |= {"lr": (slice(half_y, height), slice(0, half_x)), "norm": (slice(half_y, height), slice(half_x, width))}
    assert {name: (blue[area].any(), red[area].any()) for name, area in quarters.items()} == {
        "loss": (True, True),
        "top1": (False, True),
        "lr": (True, False),
        "norm": (True, False),
    }


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_run_can_be_drawn(tmp_path, value):
    write_run(tmp_path, loss=value, grad_norm=value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plot_run(tmp_path).exists()


def test_a_run_that_never_evaluated_can_be_drawn(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, 0.1, loss=1.0, lr=1e-3, grad_norm=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plot_run(tmp_path).exists()


def test_nothing_to_draw(tmp_path):
    with pytest.raises(DataError, match=r"metrics\.jsonl holds no line"):
        plot_run(tmp_path)
