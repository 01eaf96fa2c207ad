"""`vit-tp doctor`: what is installed here and on what would ranks compute; `--models`: which models can be cut.

Needs no GPU and no job. Does not know: how a model is cut (sharding/).
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vit_tp.config import check
from vit_tp.errors import ConfigError, VitTpError
from vit_tp.launch import local

SHOWN = ("torch", "torchvision", "timm", "deepspeed", "mpi4py")
EXTRAS = ("video", "torchcodec", "tars", "tiff")
COLUMNS = "{:<{}}  {:<33}  {:>8}  {:>6}  {:<11}  {}"


def run(words: Sequence[str]) -> int:
    """Answer `vit-tp doctor WORDS`; return 0, or 1 where something is missing."""
    patterns = [word for word in words if not word.startswith("-") and "=" not in word]
    overrides = [word for word in words if not word.startswith("-") and "=" in word]
    flags = {word for word in words if word.startswith("-")} - {"--models"}
    complaints = [f"{word} is not an option of vit-tp doctor. Use --models, or --help." for word in flags]
    complaints += [
        f"{word} sets nothing here; the doctor only asks for your modules. Use plugins=[...]."
        for word in overrides
        if not word.startswith("plugins=")
    ]
    if "--models" not in words:
        complaints += [
            f"{word} asks for models. Use vit-tp doctor --models {word}." for word in (*patterns, *overrides)
        ]
    if complaints:
        raise ConfigError(complaints)
    return _models(patterns, overrides) if "--models" in words else _installation()


def _models(patterns: Sequence[str], overrides: Sequence[str]) -> int:
    from vit_tp.compose import compose

    config = compose(overrides)
    check(config)
    from vit_tp.sharding.catalogue import list_cuttable
    from vit_tp.sharding.plugins import load_plugins
    from vit_tp.sharding.survey import survey

    load_plugins(config.plugins)
    names = list_cuttable(patterns)
    width = max(map(len, names))
    print(COLUMNS.format("name", width, "cut", "params", "tokens", "pp", "tp"), flush=True)
    failed = False
    for name in names:
        try:
            found = survey(name)
        except VitTpError as error:  # a model of a plugin, or of a timm newer than the tested one
            failed = True
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        sizes, params = ",".join(map(str, found.tp_sizes)), f"{found.num_params / 1e6:.1f} M"
        row = COLUMNS.format(name, width, found.cut, params, found.num_tokens or "", found.stages, sizes)
        print(row, flush=True)  # building them all takes a minute
    return int(failed)


def _installation() -> int:
    found = _probe()
    failures: dict[str, str] = found["failures"]
    lines: list[tuple[str, str, str]] = []
    is_whole = True
    for name, number, state, is_good in _versions():
        if name in failures:
            state, is_good = f"does not import: {failures[name]}", False
        is_whole &= is_good
        if name in SHOWN or name in ("python", "vit-tp") or state != "tested":
            lines.append((name, number, state))
    lines += [("cores", str(local.num_cores()), ""), *_devices(found)]
    lines.append(("MPI", found["mpi"] or "none found; only starting ranks with mpirun needs one", ""))
    for name, value, state in lines:
        print(f"{name:<16}{value:<10}{state}".rstrip())
    if not is_whole:
        print("Something is missing: pip install -r requirements.txt && pip install -e .", file=sys.stderr)
    return 0 if is_whole else 1


def _versions() -> Iterator[tuple[str, str, str, bool]]:
    """Yield name, version, what is known of that version, and whether it will do."""
    allowed, tested, optional = {}, {}, {}
    for requirement in map(Requirement, requires("vit-tp") or []):
        if requirement.marker is None:
            allowed[requirement.name] = requirement.specifier
        elif requirement.marker.evaluate({"extra": "tested"}):
            tested[requirement.name] = requirement.specifier
        for extra in EXTRAS if requirement.marker is not None else ():
            if requirement.marker.evaluate({"extra": extra}):
                optional[requirement.name] = (extra, requirement.specifier)
    yield _judge("python", platform.python_version(), SpecifierSet(metadata("vit-tp")["Requires-Python"]), None)
    yield "vit-tp", version("vit-tp"), "", True
    for name, wanted in allowed.items():
        try:
            yield _judge(name, version(name), wanted, tested.get(name))
        except PackageNotFoundError:
            yield name, "missing", f"needs {_range(wanted)}", False
    for name, (extra, wanted) in optional.items():
        try:
            yield _judge(name, version(name), wanted, tested.get(name))
        except PackageNotFoundError:
            yield name, "none", f"only data that need it: pip install 'vit-tp[{extra}]'", True


def _judge(name: str, number: str, wanted: SpecifierSet, tested: SpecifierSet | None) -> tuple[str, str, str, bool]:
    if not wanted.contains(number, prereleases=True):
        return name, number, f"not supported; needs {_range(wanted)}", False
    if tested is not None and tested.contains(number, prereleases=True):
        return name, number, "tested", True
    return name, number, f"within {_range(wanted)}" + (f"; tested with {tested}" if tested else ""), True


def _range(wanted: SpecifierSet) -> str:
    return ",".join(sorted(map(str, wanted), reverse=True))


def _devices(found: dict) -> Iterator[tuple[str, str, str]]:
    if "gpus" not in found:
        return
    present = [line for line in local.gpu_listing().splitlines() if line.startswith("GPU ")]
    gpus = Counter(found["gpus"])
    if gpus:
        yield "devices", ", ".join(f"{number} x {name}" for name, number in gpus.items()), ""
    elif present and found["cuda"] is None:
        yield "devices", f"CPU: there are {len(present)} GPUs, but this torch is built without CUDA", ""
    elif present:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        old_driver = f"is the driver new enough for CUDA {found['cuda']}?"
        reason = f"CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else old_driver
        yield "devices", f"CPU: there are {len(present)} GPUs, but torch sees none; {reason}", ""
    else:
        yield "devices", "CPU: no GPU found", ""
    backend = "nccl" if gpus else "gloo"
    yield "backend", backend if found[backend] else f"{backend} is not in this torch; ranks could not talk", ""


def _probe() -> dict:
    ended = subprocess.run([sys.executable, "-m", "vit_tp.report.probe"], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ConfigError(
            f"looking at this installation ended with code {ended.returncode} ({ended.stderr.strip()}), so nothing is "
            f"known of it. Install it anew: pip install -r requirements.txt && pip install -e ."
        )
    return json.loads(ended.stdout.splitlines()[-1])
