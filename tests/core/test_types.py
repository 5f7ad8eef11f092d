"""`types`: the rectangles of a row-major array, and views of buffers."""

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.core.types import Region, flat_view, regions_of_range, valid_step


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (1, 5, 1)])
def test_regions_of_a_range_cover_it_once_and_in_order(shape):
    places = np.arange(np.prod(shape)).reshape(shape)
    for start in range(places.size + 1):
        for stop in range(start, places.size + 1):
            found = [
                places[tuple(slice(o, o + s) for o, s in zip(r.offsets, r.sizes, strict=True))]
                for r in regions_of_range(shape, start, stop)
            ]
            joined = [number for part in found for number in part.reshape(-1)]
            assert joined == [*range(start, stop)]


def test_the_whole_of_a_shape_has_all_its_elements():
    assert Region.whole((2, 3)) == Region((0, 0), (2, 3))
    assert (Region.whole((2, 3)).numel, Region.whole(()).numel, Region.whole((0, 3)).numel) == (
        6,
        1,
        0,
    )


def test_a_flat_view_shares_the_memory_of_the_buffer():
    array = np.zeros((2, 3), np.float32)
    view = flat_view(array)
    assert (view.nbytes, view.format, view.ndim) == (24, "B", 1)
    view[:4] = np.float32(1.0).tobytes()
    assert array[0, 0] == 1.0


def test_message_on_a_wrong_step_shows_a_short_value_and_only_the_type_of_a_long_one():
    with pytest.raises(ConfigError, match="not 'seven'"):
        valid_step("seven")
    with pytest.raises(ConfigError, match=r"not <dict>$"):  # state and step in the wrong order
        valid_step({"model": "x" * 1000})
