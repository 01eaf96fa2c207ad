"""Starting processes: which rank is this one, what command starts the others, and how a job ends.

Does not import torch, deepspeed or timm, so that it answers at once.
"""
