"""What a pooling request says of itself, and its answer as numbers."""

import struct

import pytest

from protocol.codec import decode_engine_message, encode
from protocol.errors import InvalidParameter
from protocol.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason
from protocol.pooling import Pooled, PoolingParams, PoolingTask


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"task": PoolingTask.EMBED, "dimensions": 0}, "dimensions is 0, it must be at least 1"),
        ({"task": PoolingTask.CLASSIFY, "dimensions": 4}, "dimensions is 4 for task classify"),
        ({"task": PoolingTask.SCORE, "second_segment_start": -1}, "must be at least 0"),
    ],
)
def test_values_outside_their_limits_are_refused(values, words):
    with pytest.raises(InvalidParameter, match=words):
        PoolingParams(**values)


def test_numbers_of_an_answer_cross_the_wire_unchanged():
    pooled = Pooled(shape=(2, 3), data=struct.pack("<6f", 0, 1, -2, 0.5, 4, 5))
    output = EngineCoreOutput(
        request_id="r", new_token_ids=[], finish_reason=FinishReason.STOP, pooled=pooled
    )
    message = decode_engine_message(encode(EngineCoreOutputs(other_outputs=[output])))
    assert isinstance(message, EngineCoreOutputs)
    received = message.other_outputs[0].pooled
    assert received is not None
    assert received.rows() == [[0, 1, -2], [0.5, 4, 5]]
    assert Pooled(shape=(2,), data=struct.pack("<2f", 1, 2)).rows() == [[1, 2]]
