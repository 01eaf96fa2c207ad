"""One thread for torch in this process, as in every rank: two cores are shared by all."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
