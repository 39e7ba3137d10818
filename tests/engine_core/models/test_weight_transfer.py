"""Weights through two staging buffers: never filled before they were copied, and in place."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.models.weight_transfer import StagedTransfer, weight_transfer_to


class LateBuffer:
    """A device that copies as late as it may: when it is waited for, from what the buffer holds
    then. So a buffer filled too early gives wrong weights."""

    def __init__(self, size_bytes, events):
        self.memory = torch.zeros(size_bytes, dtype=torch.uint8)
        self.events = events
        self.pending = []

    def send(self, destination, staged):
        assert staged.untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr()
        assert not self.pending, "a copy was begun before the last one was waited for"
        self.pending.append((destination, staged))
        self.events.append(("send", id(self)))

    def wait(self):
        self.events.append(("wait", id(self)))
        while self.pending:
            destination, staged = self.pending.pop()
            destination.copy_(staged)


class OnDevice:
    """A host tensor that says that it is elsewhere, so that it is a destination to be staged to."""

    device = torch.device("cuda")

    def __init__(self, tensor):
        self._tensor = tensor
        self.dtype = tensor.dtype

    def is_contiguous(self):
        return self._tensor.is_contiguous()

    def view(self, size):
        return self._tensor.view(size)

    def copy_(self, source):
        self._tensor.copy_(source)


def staged(size_bytes):
    events = []
    buffers = [LateBuffer(size_bytes, events) for _ in range(2)]
    return StagedTransfer(buffers), buffers, events


SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])


@settings(deadline=None)
@given(
    tensors=st.lists(st.tuples(SHAPES, DTYPES, DTYPES, st.booleans()), max_size=8),
    buffer_words=st.integers(1, 40),
)
def test_every_tensor_arrives_whole_in_its_own_dtype(tensors, buffer_words):
    transfer, _, _ = staged(8 * buffer_words)
    pairs = []
    for number, (shape, from_dtype, to_dtype, transposed) in enumerate(tensors):
        source = (torch.arange(torch.Size(shape).numel()).reshape(shape) + number).to(from_dtype)
        source = source.mT if transposed and source.ndim > 1 else source
        destination = torch.full(source.shape, -1, dtype=to_dtype)
        transfer.copy(OnDevice(destination), source)
        pairs.append((destination, source))
    transfer.finish()
    for destination, source in pairs:
        torch.testing.assert_close(destination, source.to(destination.dtype))


def test_the_host_fills_one_buffer_while_the_other_is_copied():
    transfer, (first, second), events = staged(16)
    transfer.copy(OnDevice(torch.empty(16)), torch.arange(16.0))  # four pieces of four
    a, b = id(first), id(second)
    one_turn = [("wait", a), ("send", a), ("wait", b), ("send", b)]
    assert events == one_turn * 2
    transfer.finish()
    assert events[8:] == [("wait", a), ("wait", b)]


def test_rows_of_a_fused_weight_are_written_in_place():
    transfer, _, _ = staged(24)
    fused = torch.zeros(5, 3)
    transfer.copy(OnDevice(fused[2:4]), torch.ones(2, 3, dtype=torch.float16))
    transfer.finish()
    assert fused.sum(1).tolist() == [0, 0, 3, 3, 0]


def test_a_destination_with_gaps_and_a_source_on_the_device_are_copied_as_they_are():
    transfer, _, events = staged(16)
    wide = torch.zeros(4, 4)
    transfer.copy(OnDevice(wide[:, 1:3]), torch.ones(4, 2))
    near = torch.zeros(3)
    transfer.copy(near, torch.ones(3))
    assert (wide.sum().item(), near.sum().item()) == (8, 3)
    assert not events


def test_a_cpu_has_nothing_between():
    transfer = weight_transfer_to(torch.device("cpu"))
    assert not isinstance(transfer, StagedTransfer)
    target = torch.zeros(3, dtype=torch.bfloat16)
    transfer.copy(target, torch.arange(3.0))
    transfer.finish()
    assert target.tolist() == [0, 1, 2]


@pytest.mark.parametrize("size_bytes", [8, 12, 1000])
def test_a_whole_model_loads_through_the_buffers(ops, paged_logits, size_bytes):
    """The layers' own copies go through the transfer, whatever they fuse."""
    import transformers

    from engine_core.models.loading import load_model

    class Everywhere(StagedTransfer):
        def copy(self, destination, source):
            super().copy(OnDevice(destination), source)
            self.wait()  # a CPU's layers read at once; a GPU's stream keeps the order

        def wait(self):
            for buffer in self._buffers:
                buffer.wait()

    config = transformers.Gemma3TextConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_blocks=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, max_position_embeddings=32,
        architectures=["Gemma3ForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(0)
    weights = transformers.Gemma3ForCausalLM(config).state_dict()
    events = []
    transfer = Everywhere([LateBuffer(size_bytes // 8 * 8, events) for _ in range(2)])
    options = {"dtype": torch.float32, "ops": ops}
    plain = load_model(config.to_dict(), weights.items(), **options)
    through = load_model(config.to_dict(), weights.items(), transfer=transfer, **options)
    tokens = [list(range(31))]
    assert torch.equal(*(paged_logits(model, tokens)[0] for model in (through, plain)))
    assert events
