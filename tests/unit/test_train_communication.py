"""P16: a DeepSpeed that the package was not made for is refused at start-up; so is one that moved what we replace."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vit_tp.train import communication, engine


@pytest.mark.parametrize("other", ["0.19.7", "0.20.0", "1.0"])
def test_a_version_outside_the_range_of_setup_py_is_refused(monkeypatch, other):
    communication._require_supported()
    monkeypatch.setattr(communication, "version", lambda name: other)
    with pytest.raises(RuntimeError, match=f"DeepSpeed {other} is installed; vit_tp works with"):
        communication._require_supported()


def test_a_release_that_renames_what_the_norm_reads_is_refused():
    with pytest.raises(RuntimeError, match="no scaled_global_norm, averaged_gradients"):
        engine._require_upstream_norm(
            SimpleNamespace(
                bit16_groups=[],
                params_in_partition=[],
                model_parallel_rank=0,
                model_parallel_group=None,
                dp_process_group=None,
            )
        )
