"""Which names, numbers and timm arguments a knob takes, whatever the other knobs say.

Does not know: what is said when one is broken, nor combinations (checks.py).
"""

from __future__ import annotations

from vit_tp.config.schedules import SCHEDULES

NAMES = {
    "task.name": ["classification"],
    "model.video.attention": ["joint", "divided", "factorised"],
    "model.video.position": ["learned", "sincos", "rope"],
    "model.video.inflation": ["mean", "central"],
    "data.source": ["digits", "moving_digits", "image_folder", "image_tars", "video_folder", "video_tars"],
    "data.interpolation": ["bilinear", "bicubic", "random"],
    "data.erasing_mode": ["pixel", "rand", "const"],
    "data.reduced_decode": ["never", "train", "always"],
    "data.decoder": ["auto", "pyav", "torchcodec"],
    "data.decoder_device": ["cpu", "cuda"],
    "data.sampling": ["segments", "dense"],
    "recipe.mixing.mode": ["batch", "pair", "elem"],
    "recipe.optimizer.name": ["adamw", "adam", "nadamw", "sgd", "momentum", "lion"],
    "recipe.schedule.name": ["cosine", "constant"],
    "recipe.sync": ["exact", "partial"],
    "parallel.indivisible": ["refuse", "mlp_only"],
    "parallel.schedule": list(SCHEDULES),
    "compute.dtype": ["fp32", "bf16", "fp16"],
    "compute.device": ["auto", "cpu", "cuda"],
    "cluster.name": ["local"],
}
_ANY = ("num_workers", "prefetch", "max_bad_fraction", "repeats", "random_erasing", "erasing_mode", "erasing_count")
_FILES = (
    *("root", "timeout_s", "crop_scale", "crop_ratio", "hflip", "vflip", "color_jitter", "auto_augment"),
    *("interpolation", "eval_crop", "mean", "std"),
)
_VIDEOS = ("decoder", "decoder_device", "sampling", "frame_stride", "eval_clips", "eval_crops")
_SHARDS = ("train_shards", "val_shards", "num_classes", "num_streams", "shuffle_window")
READ_BY: dict[str, frozenset[str]] = {
    "digits": frozenset(_ANY),
    "moving_digits": frozenset((*_ANY, *_FILES, *_VIDEOS)),
    "image_folder": frozenset((*_ANY, *_FILES, "reduced_decode", "tile_size")),
    "image_tars": frozenset((*_ANY, *_FILES, *_SHARDS, "reduced_decode")),
    "video_folder": frozenset((*_ANY, *_FILES, *_VIDEOS)),
    "video_tars": frozenset((*_ANY, *_FILES, *_VIDEOS, *_SHARDS)),
}
"""Source -> knobs of the data group that it reads; another one would change nothing."""
STREAM_SOURCES = ("image_tars", "video_tars")
VIDEO_SOURCES = ("moving_digits", "video_folder", "video_tars")
RECOMPUTE = ("none", "norm_act", "block")
# Their step depends on the norm or the shape of a whole layer; ZeRO hands an optimizer flat slices of many layers.
LAYERWISE_OPTIMIZERS = (
    *("lamb", "lambc", "lars", "larc", "nlars", "nlarc"),
    *("adafactor", "adafactorbv", "muon", "adamuon", "nadamuon", "shampoo", "soap", "kron", "novograd", "nvnovograd"),
)
# (lowest, highest or None, is the lowest itself allowed)
RANGES: dict[str, tuple[float, float | None, bool]] = {
    "run.seed": (0, 2**32 - 1, True),
    "model.video.num_frames": (1, None, True),
    "model.video.tubelet_size": (1, None, True),
    "model.video.time_depth": (1, None, True),
    "data.num_workers": (0, 1024, True),
    "data.prefetch": (1, 1000, True),
    "data.timeout_s": (0, None, False),
    "data.max_bad_fraction": (0, 1, True),
    "data.vflip": (0, 1, True),
    "data.erasing_count": (1, 100, True),
    "data.repeats": (1, 1000, True),
    "data.tile_size": (1, None, True),
    "data.num_classes": (1, 10000000, True),
    "data.num_streams": (1, None, True),
    "data.shuffle_window": (1, None, True),
    "data.frame_stride": (1, None, True),
    "data.eval_clips": (1, 1000, True),
    "data.eval_crops": (1, 3, True),
    "data.color_jitter": (0, None, True),
    "data.random_erasing": (0, 1, True),
    "data.hflip": (0, 1, True),
    "data.eval_crop": (0, 1, False),
    "recipe.global_batch_size": (1, None, True),
    "recipe.epochs": (1, None, True),
    "recipe.max_steps": (1, None, True),
    "recipe.optimizer.lr": (0, None, False),
    "recipe.optimizer.weight_decay": (0, None, True),
    "recipe.optimizer.eps": (0, None, False),
    "recipe.optimizer.momentum": (0, 1, True),
    "recipe.schedule.warmup_epochs": (0, None, True),
    "recipe.schedule.warmup_lr": (0, None, True),
    "recipe.schedule.min_lr": (0, None, True),
    "recipe.mixing.mixup_alpha": (0, None, True),
    "recipe.mixing.cutmix_alpha": (0, None, True),
    "recipe.mixing.prob": (0, 1, True),
    "recipe.mixing.switch_prob": (0, 1, True),
    "recipe.smoothing": (0, 0.999, True),
    "recipe.sync_fraction": (0, 1, True),
    "recipe.clip_grad": (0, None, True),
    "parallel.tp": (1, None, True),
    "parallel.pp": (1, None, True),
    "parallel.dp": (1, None, True),
    "parallel.embed_weight": (0, None, True),
    "parallel.head_weight": (0, None, True),
    "parallel.cut_head_from": (1, None, True),
    "compute.micro_batch_size": (1, None, True),
    "compute.eval_micro_batch_size": (1, None, True),
    "compute.memory_gb": (0, None, False),
    "compute.timeout_s": (1, None, True),
    "cluster.port": (1, 65535, True),
    "log.every_steps": (1, None, True),
    "log.eval_every_epochs": (0, None, True),
    "log.check_replicas_every_steps": (0, None, True),
}
# timm arguments that another knob, or the data, decides.
DECIDED_ELSEWHERE = {
    "num_classes": "the data source says how many classes there are; leave it out",
    "in_chans": "the data source says how many channels an image has; leave it out",
    "img_size": "the data is prepared for one size. Use model.img_size",
    "pretrained": "every rank reads its own part of a checkpoint. Use model.pretrained=true, or a file",
    "checkpoint_path": "every rank reads its own part of a checkpoint. Use model.pretrained=<file>",
}
