"""Every knob: its name, type, default and one line of text.

The dataclasses are the schema that the YAML files in conf/ fill with values. The first half (plugins, task, model,
data, recipe and run.seed) is what is learnt, and makes the fingerprint; the second half (parallel, compute, cluster,
log) is how it is run and may not change the result.

Does not know: which values make sense (checks.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, get_type_hints

FIRST_HALF = ("plugins", "task", "model", "data", "recipe")
SECOND_HALF = ("parallel", "compute", "cluster", "log")


def knob(default: Any, text: str) -> Any:
    """Return a dataclass field with its default and its one line of help."""
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": text})
    if isinstance(default, type):
        return field(default_factory=default, metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass
class RunConfig:
    name: str = knob("run", "name of the run; its folder is <run.dir>/<run.name>")
    dir: str = knob("runs", "folder that holds all runs")
    seed: int = knob(0, "seed of weights, data order, augmentation, mixing and dropout")


@dataclass
class TaskConfig:
    name: str = knob("classification", "what is asked of the model: classification")


@dataclass
class VideoConfig:
    num_frames: int | None = knob(None, "frames of a clip; null: the model sees images")
    tubelet_size: int = knob(2, "frames that one token covers")
    attention: str = knob(
        "joint",
        "joint: over all tokens | divided: time, then space, in each block | factorised: space, then blocks over time",
    )
    position: str = knob(
        "learned", "of a frame in time: learned, from 0 | sincos: fixed, in 3-D | rope: rotary, in 3-D"
    )
    inflation: str = knob("mean", "an image model's patch embedding over time: mean | central: in the middle frame")
    time_depth: int = knob(4, "factorised: blocks over time")


@dataclass
class ModelConfig:
    timm: str = knob("vit_tiny_patch16_224", "a timm model name")
    kwargs: dict[str, Any] = knob({}, "arguments passed on to timm.create_model")
    img_size: Any = knob(None, "pixels of the input: one number, or [height, width]; null: the model's own")
    pretrained: Any = knob(None, "start from true: timm's own weights of that name | a file; null: first weights")
    video: VideoConfig = knob(VideoConfig, "clips in place of images")


@dataclass
class DataConfig:
    source: str = knob(
        "digits",
        "where samples come from: digits | moving_digits | image_folder | image_tars | video_folder | video_tars",
    )
    root: str | None = knob(
        None, "folder with train/<class>/* and val/<class>/*; of tars, the folder or URL they are in"
    )
    num_workers: int = knob(0, "loader processes on each reading rank")
    prefetch: int = knob(2, "micro-batches that each loader process makes ahead")
    timeout_s: float | None = knob(60.0, "seconds that decoding an image or clip, or a step in a shard, may take")
    max_bad_fraction: float = knob(0.01, "share of samples that may be unreadable before the run ends; 0: none")
    # augmentation of training samples, by timm; a clip's frames all alike
    crop_scale: list[float] = knob([0.08, 1.0], "area range of the random resized crop")
    crop_ratio: list[float] = knob([0.75, 4 / 3], "aspect ratio range of the random resized crop")
    hflip: float = knob(0.5, "probability of a horizontal flip")
    vflip: float = knob(0.0, "probability of a vertical flip")
    color_jitter: float = knob(0.0, "colour jitter, timm's factor")
    auto_augment: str | None = knob(None, "timm's policy string, for example rand-m9-mstd0.5-inc1 or original-mstd0.5")
    random_erasing: float = knob(0.0, "probability of timm's random erasing")
    erasing_mode: str = knob("pixel", "what is erased becomes: pixel: noise | rand: one colour | const: the mean")
    erasing_count: int = knob(1, "at most so many boxes are erased of a sample")
    repeats: int = knob(1, "repeated augmentation: copies of a sample in a batch; an epoch keeps its length")
    interpolation: str = knob("bicubic", "resampling: bilinear | bicubic | random")
    eval_crop: float = knob(0.875, "share of the image that the evaluation's centre crop keeps")
    mean: list[float] | None = knob(None, "subtracted from red, green and blue; null: ImageNet's")
    std: list[float] | None = knob(None, "what red, green and blue are divided by; null: ImageNet's")
    # large images
    reduced_decode: str = knob(
        "train", "decode JPEGs at 1/2, 1/4 or 1/8 where the crop stays large enough: never | train | always"
    )
    tile_size: int | None = knob(None, "image_folder: each window of so many pixels is a sample; null: whole images")
    # tars
    train_shards: str = knob("train-*.tar", "names of the training shards in data.root, by pattern or {0000..0099}")
    val_shards: str = knob("val-*.tar", "names of the validation shards")
    num_classes: int | None = knob(None, "tars: classes, K; null: one more than the highest label in the shards")
    num_streams: int | None = knob(
        None, "tars: streams that an epoch is read in, divided among replicas and workers; null: chosen by the batch"
    )
    shuffle_window: int = knob(64, "tars: samples of a stream that are shuffled with one another")
    # video
    decoder: str = knob("auto", "of videos: auto: torchcodec where it runs, or pyav | pyav | torchcodec")
    decoder_device: str = knob("cpu", "where torchcodec decodes: cpu | cuda")
    sampling: str = knob("segments", "frames: segments: one of each of T equal parts | dense: T frames at a stride")
    frame_stride: int = knob(4, "dense: frames from one chosen to the next, at the video's mean rate")
    eval_clips: int = knob(1, "clips of a video in evaluation, spread over its length; their answers are averaged")
    eval_crops: int = knob(1, "crops of each clip in evaluation, along its longer side: 1 | 3")


@dataclass
class OptimizerConfig:
    name: str = knob("adamw", "an elementwise timm or torch optimizer: adamw | adam | nadamw | sgd | momentum | lion")
    lr: float = knob(1e-3, "peak learning rate")
    weight_decay: float = knob(0.05, "decay of matrices; biases, norms and what timm's no_weight_decay names get none")
    betas: list[float] = knob([0.9, 0.999], "momentum of the first and second moment")
    eps: float = knob(1e-8, "term that keeps the denominator from zero")
    momentum: float = knob(0.9, "sgd and momentum only")


@dataclass
class ScheduleConfig:
    name: str = knob("cosine", "course of the learning rate: cosine | constant")
    warmup_epochs: float = knob(0.0, "linear warm-up from warmup_lr, in epochs")
    warmup_lr: float = knob(1e-6, "learning rate at step 0 of the warm-up")
    min_lr: float = knob(1e-6, "learning rate at the end of the cosine")


@dataclass
class MixingConfig:
    mixup_alpha: float = knob(0.0, "mixup's beta parameter; 0 switches it off")
    cutmix_alpha: float = knob(0.0, "cutmix's beta parameter; 0 switches it off")
    prob: float = knob(1.0, "probability that a micro-batch is mixed")
    switch_prob: float = knob(0.5, "probability of cutmix where both are on")
    mode: str = knob("batch", "what is drawn anew for each: batch: micro-batch | pair: two images | elem: image")
    cutmix_minmax: list[float] | None = knob(None, "range of a cut box's sides as share of the image; null: by alpha")


@dataclass
class RecipeConfig:
    global_batch_size: int = knob(64, "samples in one optimizer step over all ranks")
    epochs: int = knob(10, "passes over the training set")
    max_steps: int | None = knob(
        None, "stop after this many steps, where epochs would go on; the schedule ends there too"
    )
    optimizer: OptimizerConfig = knob(OptimizerConfig, "optimizer")
    schedule: ScheduleConfig = knob(ScheduleConfig, "schedule")
    mixing: MixingConfig = knob(MixingConfig, "mixup and cutmix")
    smoothing: float = knob(0.0, "label smoothing")
    sync: str = knob("exact", "tensor-parallel sums: exact | partial: of some channels only, another model for each tp")
    sync_fraction: float = knob(0.5, "partial: share of the channels that is summed after attention and MLP")
    resolution_schedule: Any = knob(
        [], "image size from an epoch on, for example [[0,128],[50,192],[80,224]]; evaluation: model.img_size"
    )
    clip_grad: float = knob(1.0, "clip the global gradient norm to this; 0 switches it off")
    freeze: list[str] = knob([], "shell patterns of timm parameter names that do not train, for example blocks.0.*")


@dataclass
class ParallelConfig:
    tp: int = knob(1, "tensor-parallel ranks: attention heads and MLP columns are cut over them")
    pp: int = knob(1, "pipeline stages")
    dp: int | None = knob(None, "data-parallel replicas; null: as many as the devices allow, 1 without GPU")
    schedule: str = knob(
        "1f1b",
        "order of passes: 1f1b | dualpipev: two runs of blocks on each rank, at least 2*pp micro-batches",
    )
    sequence: bool = knob(False, "divide the tokens between blocks over tp: less memory for activations")
    partition: Any = knob("parameters", "blocks to stages by parameters | flops | [0, 3, 6]: first block of each stage")
    embed_weight: float | None = knob(None, "cost of the patch embedding in blocks; null: measured")
    head_weight: float | None = knob(None, "cost of the head in blocks; null: measured")
    cut_head_from: int = knob(
        4096, "cut the classifier over tp from this many classes on; the loss then never gathers logits"
    )
    indivisible: str = knob(
        "refuse", "where tp does not divide heads or MLP width: refuse | mlp_only: keep those whole"
    )


@dataclass
class ComputeConfig:
    dtype: str = knob("fp32", "fp32 | bf16 (fp32 gradient accumulation and master weights) | fp16 (GPU only)")
    recompute: Any = knob(
        "none",
        "made again in backward: none | norm_act (norm and activation outputs) | block | N (every Nth block)",
    )
    micro_batch_size: int | None = knob(None, "samples of one forward pass; null: global_batch_size / dp in 2*pp parts")
    eval_micro_batch_size: int | None = knob(None, "the same in evaluation; null: micro_batch_size")
    device: str = knob("auto", "auto (GPUs if any, unless DS_ACCELERATOR=cpu is in the environment) | cpu | cuda")
    memory_gb: float | None = knob(
        None, "memory that tensors of one rank may take, in GB of 10^9 bytes; null: what this machine has"
    )
    timeout_s: int = knob(600, "seconds that a rank waits for a peer before the job ends")


@dataclass
class ClusterConfig:
    name: str = knob("local", "how ranks are started: local (DeepSpeed's launcher on this machine)")
    port: int | None = knob(None, "port of the rendezvous; null: a free one")


@dataclass
class LogConfig:
    every_steps: int = knob(10, "write loss, learning rate, gradient norm and samples/s every so many steps")
    eval_every_epochs: int = knob(1, "evaluate every so many epochs, and at the end; 0: only at the end")
    check_replicas_every_steps: int = knob(100, "compare tensor-parallel replicas bit for bit; 0 switches it off")
    tensorboard: bool = knob(True, "write TensorBoard event files")
    progress: bool = knob(True, "show a progress bar on the console")


@dataclass
class Config:
    """One run, whole. Fields are groups; see the classes above."""

    plugins: list[str] = knob(
        [], "modules of yours to import in every process: they register sharding rules and models"
    )
    run: RunConfig = field(default_factory=RunConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True)
class Knob:
    """One leaf of the schema.

    Args:
        path: Dotted name, as typed on the command line.
        type: Annotated type of the field.
        default: Value where nobody says otherwise.
        text: One line of help.
    """

    path: str
    type: Any
    default: Any
    text: str


def list_knobs(schema: Any = Config, prefix: str = "") -> Iterator[Knob]:
    """Yield every leaf of a dataclass of dataclasses, in the order of writing."""
    hints = get_type_hints(schema)
    defaults = schema()
    for item in dataclasses.fields(schema):
        path, hint = prefix + item.name, hints[item.name]
        if dataclasses.is_dataclass(hint):
            yield from list_knobs(hint, path + ".")
        else:
            yield Knob(path, hint, getattr(defaults, item.name), item.metadata["help"])
