"""A worker's loop: what rank 0 says is done in its order."""

import logging

from engine_core.control import ModelHost
from engine_core.distributed.parallel import Parallel
from engine_core.errors import RequestRefused
from engine_core.executor import InProcessExecutor
from engine_core.workers.channel import Channel
from engine_core.workers.codec import encode_output
from engine_core.workers.executor import carry_out, run_step
from engine_core.workers.messages import Change, Failed, Probe, StepOutput, Stop, WorkerAnswer

logger = logging.getLogger(__name__)

_PROBE_WAIT_S = 5.0
"""After a step that failed. Rank 0 failed as well, and asks; or it waits for this rank in a
collective operation, which fails when this process has ended."""
_NEXT_PLAN_S = 0.001
"""A step in flight is collected if no plan follows it for so long."""


def follow(
    channel: Channel, executor: InProcessExecutor, host: ModelHost, parallel: Parallel
) -> bool:
    """Until the engine ends. Returns False: a step has failed here alone."""
    reports = parallel.pp_rank == parallel.pp_size - 1 and parallel.tp_rank == 0
    in_flight: list[int] = []
    failed_step: int | None = None
    while True:
        if failed_step is not None:
            timeout_s: float | None = _PROBE_WAIT_S
        elif in_flight:
            timeout_s = _NEXT_PLAN_S if len(in_flight) < executor.max_steps_in_flight else 0.0
        else:
            timeout_s = None
        is_full = len(in_flight) >= executor.max_steps_in_flight
        message = None if is_full and failed_step is None else channel.receive(timeout_s)
        try:
            match message:
                case None if failed_step is not None:
                    return False
                case None:
                    step_id = in_flight.pop(0)
                    executor.collect()
                case (plan, sampled) if failed_step is None and parallel.pp_size > 1:
                    step_id = plan.step_id
                    output = run_step(executor.runner, plan, sampled)
                    if plan.total_num_scheduled_tokens and reports:
                        channel.send(StepOutput(step_id=step_id, output=encode_output(output)))
                case (plan, _) if failed_step is None:
                    step_id = plan.step_id
                    executor.submit(plan)
                    in_flight.append(step_id)
                case Probe():
                    channel.send(WorkerAnswer(failed_step=failed_step))
                    failed_step = None
                case Change():
                    channel.send(_answer(host, message))
                case Stop():
                    return True
        except Exception as error:
            logger.exception("step %d failed", step_id)
            failed_step = step_id
            channel.send(Failed(why=f"{type(error).__name__}: {error}", step_id=step_id))


def _answer(host: ModelHost, change: Change) -> WorkerAnswer:
    try:
        return WorkerAnswer(text=carry_out(host, change))
    except RequestRefused as error:
        return WorkerAnswer(refused=(error.code, str(error)))
