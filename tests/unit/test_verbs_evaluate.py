"""Where the figures of an evaluation go."""

import copy

from vit_tp.config import Config
from vit_tp.verbs.evaluate import _otherwise


def test_figures_of_other_data_have_files_of_their_own():
    trained = Config()
    trained.data.root = "/data/in1k"
    assert _otherwise(trained, copy.deepcopy(trained)) == ""
    names = set()
    for root in ("/data/v2", "/other/v2", "/data/in1k real/"):
        other = copy.deepcopy(trained)
        other.data.root = root
        names.add(_otherwise(trained, other))
    assert len(names) == 3 and all("/" not in name and " " not in name for name in names)
    other = copy.deepcopy(trained)
    other.data.decoder = "torchcodec"
    assert _otherwise(trained, other) == "_torchcodec"
