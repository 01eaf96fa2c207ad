"""Moments of a clip: arithmetic, checked against counting frames of a constant rate."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit_tp.config import DataConfig
from vit_tp.data.frames import Span, clip_times, dense_times, drawn_places, eval_places, segment_times

SEGMENTS, DENSE = DataConfig(sampling="segments"), DataConfig(sampling="dense", frame_stride=4)

spans = st.builds(
    lambda start, frames, rate: Span(start, start + frames / rate, rate),
    st.floats(-5, 100),
    st.integers(1, 2000),
    st.sampled_from([1.0, 23.976, 25.0, 30000 / 1001, 60.0]),
)
lengths = st.integers(1, 64)


def frame_numbers(span, times):
    """Which frame of a video of constant rate is on display, the last one for ever."""
    count = round((span.end_s - span.start_s) * span.rate)
    return [min(count - 1, int(np.floor((time - span.start_s) * span.rate))) for time in times]


@given(spans, lengths, st.integers(0, 2**32))
def test_a_segment_holds_one_moment_wherever_it_is_drawn(span, num_frames, seed):
    places = drawn_places(SEGMENTS, num_frames, random.Random(seed).random)
    times = clip_times(SEGMENTS, span, num_frames, places)
    parts = (np.array(times) - span.start_s) / (span.end_s - span.start_s) * num_frames
    # where a time is rounded it may fall on the edge
    assert [int(np.floor(part + 1e-6)) - number in (0, 1) for number, part in enumerate(parts)] == [True] * num_frames
    assert all(number - 1e-6 <= part <= number + 1 + 1e-6 for number, part in enumerate(parts))


def test_evaluation_looks_at_the_middle_of_each_part():
    [places] = eval_places(SEGMENTS, 4)
    assert segment_times(Span(10.0, 18.0, 25.0), places) == [11.0, 13.0, 15.0, 17.0]


def test_several_clips_of_segments_share_no_moment():
    data = DataConfig(sampling="segments", eval_clips=2)
    clips = [clip_times(data, Span(0.0, 8.0, 25.0), 4, places) for places in eval_places(data, 4)]
    assert clips == [[0.5, 2.5, 4.5, 6.5], [1.5, 3.5, 5.5, 7.5]]


@given(spans, lengths, st.integers(1, 8), st.floats(0, 1))
def test_a_dense_clip_is_every_stride_th_frame_whatever_is_rounded(span, num_frames, stride, place):
    numbers = frame_numbers(span, dense_times(span, num_frames, stride, place))
    count = round((span.end_s - span.start_s) * span.rate)
    window = (num_frames - 1) * stride + 1
    first = numbers[0]
    assert numbers == [min(count - 1, first + index * stride) for index in range(num_frames)]
    assert first == 0 if window >= count else 0 <= first <= count - window


def test_every_window_that_fits_is_drawn_equally_often():
    span = Span(0.5, 0.5 + 12 / 25, 25.0)  # 12 frames, 4 windows of 9
    places = [(k + 0.5) / 400 for k in range(400)]
    firsts = [frame_numbers(span, dense_times(span, 3, 4, place))[0] for place in places]
    assert [firsts.count(first) for first in range(4)] == [100] * 4


def test_dense_clips_of_an_evaluation_go_from_the_start_to_the_end():
    span = Span(0.0, 101 / 25, 25.0)
    for count, expected in ((1, [46]), (2, [0, 92]), (3, [0, 46, 92])):
        data = DataConfig(sampling="dense", frame_stride=4, eval_clips=count)
        clips = [clip_times(data, span, 3, places) for places in eval_places(data, 3)]
        assert [frame_numbers(span, clip)[0] for clip in clips] == expected


def test_a_video_too_short_holds_its_last_frame():
    assert frame_numbers(Span(3.0, 3.2, 25.0), dense_times(Span(3.0, 3.2, 25.0), 4, 4, 0.7)) == [0, 4, 4, 4]


@pytest.mark.parametrize(("data", "count"), [(SEGMENTS, 16), (DENSE, 1)])
def test_a_clip_draws_so_many_numbers_before_its_video_is_known(data, count):
    drawn = []
    drawn_places(data, 16, lambda: drawn.append(0) or 0.5)
    assert len(drawn) == count


def test_a_video_of_one_frame_without_length():
    span = Span(2.0, 2.0, 1.0)
    assert segment_times(span, (0.5, 0.5)) == [2.0, 2.0]
    assert dense_times(span, 2, 4, 0.5)[0] == 2.5  # behind its end, where its only frame stays
