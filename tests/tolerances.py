"""Every tolerance of the suite, with its reason."""

BLOCK_FLOAT64 = 1e-10
"""Cut against whole in float64: only the order of sums differs; seen at most 1e-14."""

FAMILY_FLOAT64 = 1e-9
"""The same over whole models of every family, convolution stems included."""

LAMBDAS_FLOAT32 = 1e-6
"""Gradients of parameters that timm keeps in float32 whatever the model's type."""

LOSS_FLOAT32 = 1e-5
"""Relative, on the first ten steps of a run: sums over ranks round differently, and steps carry it on."""

LOSS_LATE_FLOAT32 = 1e-4
"""Relative, from the eleventh step on: AdamW divides rounding by small second moments, and it grows with each step."""

NORM_FLOAT32 = 1e-4
"""Relative, of the gradient norm over twenty steps."""

WEIGHT_STEPS = 0.05
"""Final weights: at most this part of one optimizer step (learning rate) apart. AdamW takes a step of about lr whatever
the gradient's size, so a parameter whose gradient is rounding noise can take it in either direction."""

BF16_SPREAD = 3.0
"""A bf16 run may lie this many times further from the mean than single-process runs with other micro-batches do."""

CUT_LOSS_FLOAT64 = 1e-12
"""Loss of cut logits against torch's of whole ones in float64, relative where above one: sums of a few classes."""

LANES_FLOAT64 = 1e-12
"""Partial sums against lanes in one process, in float64: only the order of sums differs; seen at most 1e-13."""

NORMS_FLOAT32 = 1e-6
"""Models whose norms timm computes in float32 whatever their type: a last bit of float64 may round either way."""

PEAK_CLIPS = 0.08
"""How far the estimate of a video model may lie above: folded queries, keys and values; seen at most 0.054."""

PEAK_TENSORS = 0.02
"""Estimated peak of a rank against the tensors that really lived: the same to 0.1 % where a rank holds a hundred MB; on
smaller ones scalars, headers and a generator's state count too."""

PEAK_PAGES = 0.1
"""Estimated peak of a rank against the pages that the kernel counts: kernels' buffers, gloo's copies, whole pages."""
