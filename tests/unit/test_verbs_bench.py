"""What `vit-tp bench data` says about its figures."""

from vit_tp.verbs.bench import verdict

FIGURES = {
    "first_batches_s": 0.5, "data_samples_per_s": 100.0, "together_samples_per_s": 90.0, "model_samples_per_s": 400.0,
    "data_wait": 0.7, "readers": 2, "num_workers": 4, "unreadable": 0,
}  # fmt: skip


def test_slow_data_is_named_with_what_to_do():
    lines = verdict(FIGURES)
    assert "100.0 samples/s by 2 readers with 4 worker processes each" in lines[0]
    assert "70% of the time is waiting" in lines[2]
    assert lines[-1].startswith("bottleneck  the data") and "4.00 times" in lines[-1]
    assert "Use data.num_workers=8" in lines[-1]


def test_a_slow_model_is_named_and_unreadable_samples_are_told():
    lines = verdict({**FIGURES, "model_samples_per_s": 50.0, "readers": 1, "unreadable": 3})
    assert "by 1 reader with 4 worker processes;" in lines[0]
    assert lines[-2] == "unreadable  3 samples were replaced"
    assert lines[-1] == "bottleneck  the model: samples come 2.00 times as fast as it takes them"
