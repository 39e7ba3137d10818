"""One step's outputs as objects, whether they came as columns or not."""

from protocol.outputs import EngineCoreOutput, EngineCoreOutputs


def all_outputs(outputs: EngineCoreOutputs) -> list[EngineCoreOutput]:
    columns = outputs.decoded
    if columns is None:
        return outputs.other_outputs
    token_ids = memoryview(columns.token_ids).cast("i")
    indexes = columns.indexes or [0] * len(columns.request_ids)
    return outputs.other_outputs + [
        EngineCoreOutput(request_id=request_id, new_token_ids=[token_id], index=index)
        for request_id, token_id, index in zip(columns.request_ids, token_ids, indexes, strict=True)
    ]
