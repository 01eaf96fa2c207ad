"""DeepSpeed's PipelineModule around the stages that this rank holds, cut over its tensor-parallel group."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence

from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from vit_tp.config.schedules import SCHEDULES, Schedule
from vit_tp.errors import ConfigError
from vit_tp.models.build import input_shape
from vit_tp.models.costs import stage_bounds
from vit_tp.models.sizes import UNARRANGED, Arrangement, arrange
from vit_tp.models.stages import BlockStage, Stage, Tables, stage_names
from vit_tp.models.weights import Fill, FirstWeights
from vit_tp.parallel.groups import Groups, build_groups
from vit_tp.parallel.regions import Region
from vit_tp.parallel.rng import Clock
from vit_tp.parallel.topology import Topology
from vit_tp.recipe.optimizer import no_decay_names
from vit_tp.sharding.cutting import CUT_HEAD_FROM, Cutting
from vit_tp.sharding.placement import count_elsewhere
from vit_tp.train.communication import start_communication
from vit_tp.train.parts import ScalarLoss, StageBuilder


class StageSpec(LayerSpec):
    """A stage that is made when DeepSpeed builds it, on the ranks that hold it only."""

    def __init__(self, builder: StageBuilder, name: str) -> None:
        super().__init__(Stage)
        self.builder: StageBuilder | None = builder
        self.name = name

    def build(self, log: bool = False) -> Stage:
        return self.builder.build(self.name)


class VitPipeline(PipelineModule):
    """The stages of one pipeline rank.

    Args:
        specs: One for each stage of the whole model, in order.
        bounds: Chunk c is stages [bounds[c], bounds[c + 1]); `schedule` says which rank holds it.
        groups: This rank's peers.
        loss_fn: (logits, targets) -> scalar, called on the pipeline rank that holds the last chunk.
        clock: Shared with the stages.
        no_decay: timm names of the parameters that get no weight decay, of the whole model.
        region: Where partial sums are exchanged.
        arrangements: Input sizes that the stages can be arranged for -> what they must know of each; first the model's.
    """

    schedule: Schedule = SCHEDULES["1f1b"]
    active_phase = 0  # which of this rank's chunks runs: DeepSpeed's name for it

    def __init__(
        self,
        specs: Sequence[StageSpec],
        bounds: Sequence[int],
        groups: Groups,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        clock: Clock,
        no_decay: set[str],
        region: Region,
        arrangements: Sequence[Arrangement],
    ) -> None:
        self._bounds = list(bounds)  # read by _partition_layers while nn.Module is set up
        topology = groups.topology
        super().__init__(
            layers=specs,
            topology=PipeModelDataParallelTopology(num_pp=topology.pp, num_mp=topology.tp, num_dp=topology.dp),
            loss_fn=ScalarLoss(loss_fn),
        )
        for spec in specs:  # DeepSpeed keeps them, and through them all that a checkpoint's filter made
            spec.builder = None
        self.groups = groups
        self.clock = clock
        self.no_decay = no_decay
        self.region = region
        self._arrangements = {one.input_size[-2:]: one for one in arrangements}
        self._arranged = arrangements[0]
        if groups.place.pp > 0:
            for param in self.table_parameters():
                count_elsewhere(param)

    def _partition_layers(self, method: str = "") -> None:
        """Take our boundaries in place of DeepSpeed's methods, which know neither blocks nor weights of the ends."""
        self.parts = self._bounds
        held = self.schedule.chunks_of(self._topo.get_coord(self.global_rank).pipe, self._topo.get_dim("pipe"))
        self.num_stages = len(self.parts) - 1
        self.phase_bounds = [(self.parts[chunk], self.parts[chunk + 1]) for chunk in held]
        self._set_bounds(*self.phase_bounds[0])

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.clock.next_micro_batch(self.active_phase)
        planned = self._arranged.num_tokens.get(self.training, 0)
        self.region.resume(planned)
        out = super().forward(x)
        self.region.require(planned)
        return out

    def arrange_(self, img_size: tuple[int, int]) -> bool:
        """Arrange the stages for images of another size, given to `pipeline`; return whether anything changed.

        Args:
            img_size: Height and width in pixels. The engine's activation shapes must be reset after a change.
        """
        arrangement = self._arrangements[img_size]
        is_other, self._arranged = arrangement is not self._arranged, arrangement
        for stage in self.stages if is_other else []:
            arrangement.apply_(stage)
        return is_other

    @property
    def chunks(self) -> list[list[Stage]]:
        """The runs of neighbouring stages that this rank holds."""
        return [list(self.forward_funcs)]

    @property
    def stages(self) -> list[Stage]:
        """The stages that this rank holds, in order."""
        return [stage for chunk in self.chunks for stage in chunk]

    @property
    def tables(self) -> Tables | None:
        """What the blocks of this rank read, as those of every other pipeline rank do."""
        return next((stage.tables for stage in self.stages if isinstance(stage, BlockStage)), None)

    @property
    def saved_stages(self) -> list[Stage]:
        """The stages, and the tables on the rank that saves them: over all ranks each parameter once."""
        tables = [self.tables] if self.tables is not None and self.groups.place.pp == 0 else []
        return [*tables, *self.stages]

    def table_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that every pipeline rank holds, in the same order on each."""
        return [] if self.tables is None else list(self.tables.inner.parameters())

    def named_timm_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, tables included, under the names that timm gives them."""
        for stage in (*([self.tables] if self.tables is not None else []), *self.stages):
            yield from stage.named_timm_parameters()

    def set_input_size(self, *args: object, **kwargs: object) -> None:
        """Refuse what would make new parameters."""
        raise ConfigError(
            "set_input_size makes new position tables, which the stages and the engine's optimizer would not know. "
            "Call it on the timm model before vit_tp.pipeline, or use model.img_size."
        )

    def reset_classifier(self, *args: object, **kwargs: object) -> None:
        """Refuse what would make new parameters."""
        raise ConfigError(
            "reset_classifier makes a new head, which the last stage and the engine's optimizer would not know. "
            "Call it on the timm model before vit_tp.pipeline."
        )


class FoldedPipeline(VitPipeline, DualPipeVModule):
    """The two chunks of one pipeline rank under DualPipeV; blocks of both read the same tables."""

    schedule = SCHEDULES["dualpipev"]

    @property
    def chunks(self) -> list[list[Stage]]:
        return [list(chunk) for chunk in self.phase_funcs]


PIPELINES = {kind.schedule.name: kind for kind in (VitPipeline, FoldedPipeline)}


def pipeline(
    model: nn.Module,
    topology: Topology,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    *,
    region: str = "exact",
    fraction: float = 1.0,
    recompute: str | int = "none",
    schedule: str = "1f1b",
    partition: str | Sequence[int] = "parameters",
    embed_weight: float | None = None,
    head_weight: float | None = None,
    cut_head_from: int = CUT_HEAD_FROM,
    gather_logits: bool = True,
    indivisible: str = "refuse",
    img_sizes: Sequence[tuple[int, int]] = (),
    seed: int = 0,
    fill: Fill | None = None,
    groups: Groups | None = None,
) -> VitPipeline:
    """Lay a timm model out over the grid and return what this rank holds of it. Collective over the world.

    Args:
        model: A whole timm model. A real one is copied slice by slice; one on meta gets its first weights here, one
            stage at a time, the same for every topology.
        topology: The grid; its size must be the world's.
        loss_fn: (logits, targets) -> scalar, called on the last stage.
        region: "exact"; "sequence" to divide tokens between blocks over tp; "partial" to sum only some channels of each
            product, which is another model.
        fraction: Of "partial": share of the channels that is summed.
        recompute: What backward makes again: "none"; "norm_act", the outputs of norms and activations; "block", all
            but the input of each block; or N, the same for every Nth block.
        schedule: Order of passes: "1f1b", or "dualpipev" with two runs of stages on each pipeline rank.
        partition: Blocks to pipeline ranks by "parameters", by "flops" (model on meta), or the first block of each.
        embed_weight: Cost of the embedding in mean blocks; None counts it.
        head_weight: The same for the head.
        cut_head_from: Number of classes from which on the classifier is cut over tp.
        gather_logits: Give `loss_fn` whole logits (B, K) from a cut classifier too. False cuts the classifier whatever
            its number of classes and gives this rank's columns (B, ceil(K/tp)), for `vit_tp.ShardedCrossEntropy`.
        indivisible: Where tp does not divide heads or MLP width: "refuse", or "mlp_only" to keep such modules whole.
        img_sizes: Other heights and widths that images will have, of a model with timm's dynamic_img_size.
        seed: Of weights and of all randomness in forward.
        fill: Where the weights of a model on meta come from; None draws them by `seed`.
        groups: This rank's peers where they exist already.

    Returns:
        A PipelineModule for `initialize`.

    Raises:
        ConfigError: If the model cannot be laid out on that many stages, or the region or `recompute` is unknown.
        ShardRuleError: If a module has no sharding rule, the model no stream of tokens that a region needs, or no
            classifier whose logits could be left ungathered.
        TopologyError: If the world or the heads do not fit the grid.
    """
    bounds = stage_bounds(model, topology.pp, partition, embed_weight, head_weight, schedule)
    cutting = Cutting(region, fraction, recompute, cut_head_from, gather_logits, indivisible)
    cutting.require(model, topology.tp)
    start_communication()
    groups = groups or build_groups(topology)
    exchange, clock = cutting.build_region(groups.tp_group), Clock(seed=seed)
    builder = StageBuilder(model, fill or FirstWeights(seed), exchange, clock, cutting)
    _, _, *own_size = input_shape(model, 1)
    sizes = dict.fromkeys([tuple(own_size[-2:]), *img_sizes])
    arrangements = [arrange(model, size) for size in sizes] if exchange.divides_tokens or img_sizes else [UNARRANGED]
    specs = [StageSpec(builder, name) for name in stage_names(model)]
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its topology
        return PIPELINES[schedule](
            specs, bounds, groups, loss_fn, clock, no_decay_names(model), region=exchange, arrangements=arrangements
        )
