"""`python -m vit_tp`: the form that every launcher starts."""

import sys

from vit_tp.cli import main

sys.exit(main())
