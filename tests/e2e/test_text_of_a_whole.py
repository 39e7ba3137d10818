"""A daemon that serves the text of a model whose images it does not take."""

import numpy as np
import pytest
from daemons import running_daemon
from raw_client import RawClient

from protocol.errors import ErrorCode
from protocol.multimodal import MultiModalInput, TensorRef
from protocol.outputs import Rejected
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from tests.engine_core.models.tiny_wholes import OWN, make_whole

PROMPT = [5, 9, 7, 30, 44, 61, 3, 8]


@pytest.mark.slow
def test_an_image_is_refused_and_text_goes_on(tmp_path):
    make_whole("Qwen2_5OmniThinker", OWN["Qwen2_5OmniThinker"]).save_pretrained(tmp_path)
    image = MultiModalInput(
        modality="image",
        start=2,
        stop=6,
        tensors={"pixel_values": TensorRef(frame=0, dtype="float32", shape=(1, 3, 16, 16))},
    )
    with running_daemon(tmp_path, "--num-blocks", 64) as daemon:
        with RawClient(daemon.address) as client:
            tokens, _ = client.complete(PROMPT)
            client.send(
                EngineRequest(
                    request_id="image",
                    prompt_token_ids=PROMPT,
                    multimodal_inputs=(image,),
                    sampling_params=SamplingParams(max_tokens=4),
                ),
                np.zeros((1, 3, 16, 16), np.float32).tobytes(),
            )
            refused = client.wait_for(Rejected)
            assert (refused.request_id, refused.code) == ("image", ErrorCode.NOT_SUPPORTED)
            assert refused.message.startswith("multimodal_inputs: no encoder of a model of type")
            assert "'qwen2_5_omni_thinker'" in refused.message and refused.message.endswith(
                "; send text"
            )
            assert client.complete(PROMPT, request_id="again")[0] == tokens
        assert daemon.stop() == 0
        why = [line for line in daemon.log().splitlines() if "prompts are text: " in line]
        assert len(why) == 1
