"""`engine-core` as it runs on a GPU, on this CPU: rows and sampling on the device (by the
specification of its operations), and a step in flight while the next is planned. The device is as
late as it may be. Not a test."""

import dataclasses

from engine_core.cli import main
from engine_core.startup import build, model, runner_spec


def pretend_a_gpu():
    from tests.engine_core.model_runner.gpu.fake_device import LateQueue, PaddedOperations
    from tests.kernels.torch_device_steps import TorchDeviceSteps

    plan_runner = build.plan_runner

    def plan_device_runner(*options):
        spec = plan_runner(*options)
        scheduler = dataclasses.replace(
            spec.scheduler, max_steps_in_flight=2, computes_in_order=False
        )
        return dataclasses.replace(spec, on_device=True, scheduler=scheduler)

    build.plan_runner = plan_device_runner
    model.select_operations = lambda device, **options: PaddedOperations()
    runner_spec.device_step_operations = lambda device: TorchDeviceSteps()
    runner_spec.CudaQueue = lambda device: LateQueue()


if __name__ == "__main__":
    pretend_a_gpu()
    main()
