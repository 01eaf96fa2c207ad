"""Tensor x pipeline x data parallel training of timm vision transformers."""
