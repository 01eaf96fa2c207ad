"""Start `small_rank` in two ranks through vit_tp.launch, as `vit-tp train` does. Usage: launch_small.py HOW FOLDER."""

import os
import sys
from pathlib import Path

from vit_tp.launch import commands, local

how, folder = sys.argv[1], Path(sys.argv[2])
port = local.free_port()
environ = commands.child_environment(os.environ, os.getpid(), threads=1, on_cpu=True)
environ["PYTHONPATH"] = str(Path(__file__).parent)
argv = commands.launch_argv([how, str(folder)], ["0", "1"], port, module="small_rank")
sys.exit(local.run(argv, environ, folder / "result.json", folder / "log", grace_s=3))
