"""What `vit-tp --help` and `vit-tp <verb> --help` print, from the schema's own text.

Does not know: torch, timm, DeepSpeed, Hydra; it answers on a login node at once.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from vit_tp.config import EVALUATION, FIRST_HALF, SECOND_HALF, list_knobs
from vit_tp.config.types import show

WIDTH = 120
VERBS = {
    "train": "train a model; starts the ranks itself, or is one of them inside a job",
    "eval": "evaluate a finished run, on any grid",
    "bench": "say whether the data or the model is the bottleneck",
    "doctor": "say what is installed here, or which models can be cut",
}
USAGE = {
    "train": "vit-tp train [OVERRIDE ...]\n       vit-tp train --config-file FILE [OVERRIDE ...]",
    "eval": f"vit-tp eval run=FOLDER [OVERRIDE of {', '.join(SECOND_HALF)}, or of how data are read ...]",
    "bench": "vit-tp bench data [OVERRIDE ...]",
    "doctor": "vit-tp doctor\n       vit-tp doctor --models [PATTERN ...] [plugins=[MODULE,...]]",
}
EXAMPLES = {
    "train": [
        "vit-tp train experiment=digits_smoke",
        "vit-tp train model=vit_base data=image_folder data.root=/data/in1k parallel=tp2_pp2 run.name=first",
        "vit-tp train model.kwargs.drop_path_rate=0.1 recipe.optimizer.lr=5e-4",
    ],
    "eval": [
        "vit-tp eval run=runs/digits_smoke",
        "vit-tp eval run=runs/digits_smoke parallel.tp=1 compute.dtype=bf16",
        "vit-tp eval run=runs/k400 data.eval_clips=10 data.eval_crops=3",
    ],
    "bench": ["vit-tp bench data experiment=digits_smoke", "vit-tp bench data data.num_workers=8 recipe.max_steps=20"],
    "doctor": ["vit-tp doctor", "vit-tp doctor --models 'vit_base*' 'deit3*'"],
}


def general_help() -> str:
    """Return the text of `vit-tp --help`."""
    lines = ["usage: vit-tp VERB [OVERRIDE ...]", ""]
    lines += ["Tensor x pipeline x data parallel training of timm vision transformers.", "", "verbs:"]
    lines += [f"  {verb:<8}{text}" for verb, text in VERBS.items()]
    lines += ["", "  --help after a verb lists its knobs; --version says which version this is.", "", "examples:"]
    lines += [f"  {examples[0]}" for examples in EXAMPLES.values()]
    return "\n".join(lines)


def verb_help(verb: str, choices: Mapping[str, Sequence[str]]) -> str:
    """Return the text of `vit-tp <verb> --help`.

    Args:
        verb: One of VERBS.
        choices: Groups of conf/ and the names in each.
    """
    groups = SECOND_HALF if verb == "eval" else ("run", *FIRST_HALF, *SECOND_HALF)
    lines = [f"usage: {USAGE[verb]}", "", VERBS[verb].capitalize() + ".", "", "examples:"]
    lines += [f"  {example}" for example in EXAMPLES[verb]]
    if verb == "doctor":
        return "\n".join(lines)
    lines += ["", "choices (GROUP=NAME):"]
    shown = groups if verb == "eval" else choices
    lines += [_entry(group, "  ".join(names)) for group, names in choices.items() if group in shown]
    stands = (
        "where none is given, the run's own value holds; here: the schema's" if verb == "eval" else "before any choice"
    )
    lines += ["", f"knobs (NAME=VALUE) and their defaults ({stands}):"]
    for group in (*groups, *([] if "data" in groups else ["data"])):
        lines.append("")
        for knob in list_knobs():
            if knob.path.split(".")[0] == group and (group in groups or knob.path in EVALUATION):
                lines.append(_entry(f"{knob.path}={show(knob.default)}", knob.text))
    if verb == "train":
        lines += ["", _entry("--config-file FILE", "a config.yaml instead of choices; this is how ranks are started")]
    return "\n".join(lines)


def _entry(name: str, text: str) -> str:
    column = 46
    head = f"  {name}"
    gap = "\n" + " " * column if len(head) >= column - 1 else " " * (column - len(head))
    lines = textwrap.wrap(text, WIDTH - column, break_on_hyphens=False, break_long_words=False)
    return head + gap + ("\n" + " " * column).join(lines)
