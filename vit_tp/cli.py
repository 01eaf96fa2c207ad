"""The command line: clean argv, find out whether this process launches or is a rank, hand over.

Help and refusals import neither torch nor Hydra's composition where they can do without. Does not know: what a verb
does (verbs/).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from vit_tp.config.types import close_names
from vit_tp.errors import ConfigError, VitTpError
from vit_tp.help import USAGE, VERBS, general_help, verb_help
from vit_tp.launch.env import rank_env, strip_local_rank
from vit_tp.verbs import bench, doctor, evaluate, train
from vit_tp.verbs.job import Request

LAUNCH = {"train": train.launch, "eval": evaluate.launch, "bench": bench.launch}
BE_RANK = {"train": train.be_rank, "eval": evaluate.be_rank, "bench": bench.be_rank}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit code."""
    env = None
    try:
        words, environ = strip_local_rank(sys.argv[1:] if argv is None else argv, os.environ)
        answer = _answer(words)
        if answer is not None:
            print(answer, flush=True)
            return 0
        if words[0] == "doctor":
            return doctor.run(words[1:])
        env = rank_env(environ)
        request = _parse(words)
        if env is None:
            return LAUNCH[request.verb](request)
        return BE_RANK[request.verb](request, env)
    except VitTpError as error:
        if env is None or env.rank == 0:  # the others would say the same
            print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `vit-tp train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE


def _answer(words: Sequence[str]) -> str | None:
    """Return what --help and --version print, None where something is to be done."""
    if "--version" in words[:1]:
        from importlib.metadata import version

        return f"vit-tp {version('vit-tp')}"
    if not words or words[0] in ("--help", "-h", "help"):
        return general_help()
    if words[0] in VERBS and ("--help" in words or "-h" in words):
        from vit_tp.compose import list_choices

        return verb_help(words[0], list_choices())
    return None


def _parse(words: Sequence[str]) -> Request:
    verb, *rest = words
    if verb not in VERBS:
        close = close_names(verb, VERBS)
        advice = f"Did you mean vit-tp {close[0]}?" if close else f"Use vit-tp {' or vit-tp '.join(VERBS)}."
        raise ConfigError(f"{verb} is not a verb; vit-tp knows {', '.join(VERBS)}. {advice}")
    overrides, config_file, subject, complaints = [], None, None, []
    remaining = iter(rest)
    for word in remaining:
        flag, equals, value = word.partition("=")
        if flag == "--config-file":
            config_file = value if equals else next(remaining, "")
            if not config_file:
                complaints.append("--config-file has no file after it; it names a config.yaml. Use --config-file FILE.")
        elif word.startswith("-"):
            complaints.append(f"{word} is not an option; knobs are set without dashes. Use <knob>=<value>, or --help.")
        elif verb == "bench" and not equals and subject is None:
            subject = word
        elif not equals and not word.startswith("~"):
            advice = f"run={word}" if verb == "eval" else f"{word}=<value>, or --help"
            complaints.append(f"{word} sets nothing; knobs are set by <knob>=<value>. Use {advice}.")
        else:
            overrides.append(word)
    if complaints:
        raise ConfigError([*complaints, f"usage: {USAGE[verb]}"])
    return Request(verb, overrides, Path(config_file) if config_file else None, subject)
