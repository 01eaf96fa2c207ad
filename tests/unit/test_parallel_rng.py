"""Random numbers follow from names and places, and leave no trace in the default generator."""

import pytest
import torch

from vit_tp.parallel.rng import Clock, PrivateStream, seed_from, seeded

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def default_generator():
    """The default generator in a known state, put back afterwards."""
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(7)
        yield torch.random.default_generator


def test_a_seed_depends_on_every_part_and_on_their_order():
    parts = [(0, "a"), ("a", 0), (0, "a", 0), (0, "b"), (1, "a"), ("0a",), (0, "a", ""), ("", 0, "a")]
    assert len({seed_from(*some) for some in parts}) == len(parts)
    assert all(0 <= seed_from(*some) < 2**63 for some in parts)


def test_a_seed_is_the_same_in_every_process_and_version():
    assert seed_from(0, "embed") == 8941906464125789639


def test_seeded_draws_by_its_parts_and_restores(default_generator):
    before = default_generator.get_state()
    with seeded(1, "x"):
        first = torch.rand(4)
    assert torch.equal(default_generator.get_state(), before)
    torch.rand(3)
    with seeded(1, "x"):
        again = torch.rand(4)
    with seeded(1, "y"):
        other = torch.rand(4)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_seeded_restores_after_an_error(default_generator):
    before = default_generator.get_state()
    with pytest.raises(KeyError), seeded(1):
        torch.rand(1)
        raise KeyError
    assert torch.equal(default_generator.get_state(), before)


def draws(clock: Clock, stage: str) -> torch.Tensor:
    with clock.randomness(CPU, stage):
        return torch.rand(4)


def test_a_moment_has_the_same_numbers_whatever_came_before(default_generator):
    clock = Clock(seed=3)
    clock.start_step(5, first_micro_batch=2)
    clock.next_micro_batch()
    first, before = draws(clock, "blocks.1"), default_generator.get_state()
    assert torch.equal(draws(clock, "blocks.1"), first)  # recompute
    assert torch.equal(default_generator.get_state(), before)
    torch.rand(9)
    assert torch.equal(draws(Clock(seed=3, step=5, micro_batch=2), "blocks.1"), first)  # resume


@pytest.mark.parametrize(
    ("moment", "stage"),
    [
        ({"seed": 4}, "blocks.1"),
        ({"step": 6}, "blocks.1"),
        ({"micro_batch": 3}, "blocks.1"),
        ({}, "blocks.2"),
        ({"step": 2, "micro_batch": 5}, "blocks.1"),
    ],
)
def test_another_moment_or_stage_has_other_numbers(moment, stage):
    here = {"seed": 3, "step": 5, "micro_batch": 2}
    assert not torch.equal(draws(Clock(**here), "blocks.1"), draws(Clock(**{**here, **moment}), stage))


def test_micro_batches_are_numbered_over_all_replicas():
    """Two replicas with two micro-batches each see the moments of one replica with four."""
    alone, moments = Clock(), []
    alone.start_step(1, first_micro_batch=0)
    for _ in range(4):
        alone.next_micro_batch()
        moments.append((alone.step, alone.micro_batch))
    shared = []
    for dp_rank in range(2):
        clock = Clock()
        clock.start_step(1, first_micro_batch=2 * dp_rank)
        for _ in range(2):
            clock.next_micro_batch()
            shared.append((clock.step, clock.micro_batch))
    assert shared == moments


def one_pass(stream: PrivateStream, num_draws: int = 8) -> torch.Tensor:
    stream.enter(CPU)
    inside = torch.rand(num_draws)
    stream.leave(CPU)
    return inside


def test_the_shared_stream_does_not_notice_what_was_drawn_inside(default_generator):
    states = []
    for tp_rank, num_draws in [(0, 1), (0, 100), (1, 7)]:
        default_generator.manual_seed(11)
        one_pass(PrivateStream("blocks.0.attn", tp_rank), num_draws)
        states.append(default_generator.get_state())
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])


def test_masks_differ_between_ranks_modules_and_passes_and_replay(default_generator):
    seen = {}
    for name in ("blocks.0.attn", "blocks.0.mlp"):
        for tp_rank in range(3):
            default_generator.manual_seed(11)
            stream = PrivateStream(name, tp_rank)
            for index in range(3):  # successive passes without a shared draw between them
                seen[name, tp_rank, index] = one_pass(stream)
    assert len({tuple(mask.tolist()) for mask in seen.values()}) == len(seen)
    default_generator.manual_seed(11)
    assert torch.equal(one_pass(PrivateStream("blocks.0.attn", 0)), seen["blocks.0.attn", 0, 0])


def test_leaving_a_stream_that_was_not_entered_changes_nothing(default_generator):
    before = default_generator.get_state()
    PrivateStream("blocks.0.attn", 0).leave(CPU)
    assert torch.equal(default_generator.get_state(), before)


def test_a_stream_is_left_once(default_generator):
    stream = PrivateStream("blocks.0.attn", 0)
    one_pass(stream)
    torch.rand(1)
    after = default_generator.get_state()
    stream.leave(CPU)
    assert torch.equal(default_generator.get_state(), after)


def test_chunks_that_take_turns_each_meet_every_micro_batch():
    clock, met = Clock(seed=1), []
    clock.start_step(3, first_micro_batch=8)
    for chunk in (0, 0, 1, 0, 1, 1):
        clock.next_micro_batch(chunk)
        met.append((chunk, clock.micro_batch))
    assert met == [(0, 8), (0, 9), (1, 8), (0, 10), (1, 9), (1, 10)]
    clock.start_step(4, first_micro_batch=8)
    clock.next_micro_batch(1)
    assert (clock.step, clock.micro_batch) == (4, 8)
